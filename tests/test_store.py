"""Prepared data on disk: complete or absent."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from vsm.data import PixelNormalization, prepared
from vsm.data.prepared import Preparation
from vsm.errors import DataError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VSM_DATA", str(tmp_path))
    return tmp_path


def write(num_images: int = 5) -> Path:
    images = np.arange(num_images * 4, dtype=np.uint8).reshape(num_images, 2, 2, 1)
    preparation = Preparation(
        image_shape=(2, 2, 1),
        class_lists={"train": ["b"], "test": ["a"]},
        class_sizes={"a": 2, "b": 3},
        batches=[images[:2], images[2:]],
        origin="drawn by a test",
    )
    return prepared.write("little", preparation, PixelNormalization((0.1,), (0.2,)))


def test_what_is_written_is_read_back(root: Path) -> None:
    assert not prepared.is_prepared("little")
    assert write() == root / "little"
    assert prepared.is_prepared("little")
    dataset = prepared.read("little")
    assert dataset.images.tolist() == np.arange(20).reshape(5, 2, 2, 1).tolist()
    assert dataset.class_names == ("a", "b")
    assert dataset.class_sizes.tolist() == [2, 3]
    assert dataset.classes("train").tolist() == [1]
    assert dataset.image_shape == (1, 2, 2)
    assert dataset.normalization == PixelNormalization((0.1,), (0.2,))
    assert isinstance(dataset.images, np.memmap)


def test_an_interrupted_preparation_leaves_nothing(root: Path) -> None:
    with pytest.raises(DataError, match="expected 5 images, got 4"):
        write(num_images=4)
    assert list(root.iterdir()) == []


def test_writing_twice_keeps_the_first(root: Path) -> None:
    write()
    before = (root / "little" / "index.json").stat().st_mtime_ns
    write()
    assert (root / "little" / "index.json").stat().st_mtime_ns == before
    assert [path.name for path in root.iterdir()] == ["little"]


def test_missing_data_is_named(root: Path) -> None:
    with pytest.raises(DataError, match="data: little is not prepared"):
        prepared.read("little")


@pytest.mark.parametrize("damage", ["truncate images", "garble index", "other format"])
def test_damaged_data_is_named_with_its_remedy(root: Path, damage: str) -> None:
    folder = write()
    if damage == "truncate images":
        os.truncate(folder / "images.npy", 90)
    elif damage == "garble index":
        (folder / "index.json").write_text("{")
    else:
        (folder / "index.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match=r"is damaged \(.*\); delete that folder"):
        prepared.read("little")


def test_an_unwritable_folder_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("VSM_DATA", str(blocked))
    with pytest.raises(DataError, match=r"cannot write .* VSM_DATA"):
        write()


def test_an_unknown_split_is_answered_with_the_known_ones(root: Path) -> None:
    write()
    with pytest.raises(DataError, match="has the splits train, test; got 'validation'"):
        prepared.read("little").classes("validation")
