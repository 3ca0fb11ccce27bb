"""CIFAR-FS from a tiny zip in its own layout, and from tiny pickles in CIFAR-100's."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_layouts import color_image, encoded, leftovers, python2_pickle, write_tree, write_zip
from vsm.data import ImageDataset, open_images
from vsm.data.catalog import prepare
from vsm.data.dataset import natural
from vsm.data.published import published_split
from vsm.errors import DataError

CLASSES = {"train": "skyscraper", "validation": "otter", "test": "baby"}
NAMES = sorted(CLASSES.values())


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "prepared"))
    return tmp_path / "prepared"


def pngs(prefix: str = "cifar100/data/") -> dict[str, bytes]:
    """Two images per class; the red value tells class and number."""
    return {
        f"{prefix}{name}/{number:04}.png": encoded(color_image(10 * label + number, 32))
        for label, name in enumerate(NAMES)
        for number in range(2)
    }


def archive_members() -> dict[str, dict[str, Any]]:
    """One image per class in train and one in test, stored as planes."""
    planes = {
        number: np.stack(
            [color_image(10 * label + number, 32).transpose(2, 0, 1).ravel() for label in range(3)]
        )
        for number in range(2)
    }
    return {
        "meta": {"fine_label_names": NAMES},
        "train": {"data": planes[0], "fine_labels": [0, 1, 2]},
        "test": {"data": planes[1], "fine_labels": [0, 1, 2]},
    }


def write_archive(path: Path, members: dict[str, dict[str, Any]]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, value in members.items():
            data = python2_pickle(value)
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def assert_holds_the_drawn_images(dataset: ImageDataset) -> None:
    assert dataset.image_shape == (3, 32, 32)
    for split, name in CLASSES.items():
        (class_id,) = dataset.splits[split]  # type: ignore[index]
        assert dataset.class_names[class_id] == name
        label = NAMES.index(name)
        expected = [color_image(10 * label + number, 32) for number in range(2)]
        assert np.array_equal(dataset.images[dataset.image_ids(class_id)], expected)


@pytest.mark.parametrize("layout", ["zip", "folder of the zip", "unpacked", "class folders"])
def test_the_cifar_fs_layout_is_read(layout: str, tmp_path: Path) -> None:
    zipped = write_zip(tmp_path / "source" / "cifar100.zip", pngs())
    source = {
        "zip": zipped,
        "folder of the zip": zipped.parent,
        "unpacked": write_tree(tmp_path / "unpacked", pngs()),
        "class folders": write_tree(tmp_path / "plain", pngs(prefix="")),
    }[layout]
    prepare("cifar-fs", source, allow_missing=True)
    assert_holds_the_drawn_images(open_images("cifar-fs"))


@pytest.mark.parametrize("layout", ["archive", "folder of the archive", "unpacked"])
def test_the_python_archive_of_cifar_100_is_read(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    archive = write_archive(folder / "cifar-100-python.tar.gz", archive_members())
    files = {name: python2_pickle(value) for name, value in archive_members().items()}
    source = {
        "archive": archive,
        "folder of the archive": folder,
        "unpacked": write_tree(tmp_path / "cifar-100-python", files),
    }[layout]
    prepare("cifar-fs", source, allow_missing=True)
    assert_holds_the_drawn_images(open_images("cifar-fs"))


def test_photographs_are_augmented(tmp_path: Path) -> None:
    prepare("cifar-fs", write_zip(tmp_path / "cifar100.zip", pngs()), allow_missing=True)
    assert open_images("cifar-fs").augmentation == natural(crop_padding=4)


def test_missing_images_are_counted_and_nothing_stays(tmp_path: Path, root: Path) -> None:
    message = r"59,994 of 60,000 images are missing, first of class 'train' \(0 of 600\)"
    with pytest.raises(DataError, match=message):
        prepare("cifar-fs", write_zip(tmp_path / "cifar100.zip", pngs()))
    assert leftovers(root) == []


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "other.zip", {"readme.txt": b"hello"})
    with pytest.raises(DataError, match=r"other\.zip holds no images .* pass the CIFAR-FS zip"):
        prepare("cifar-fs", path, allow_missing=True)


def test_pickles_of_another_layout_are_refused(tmp_path: Path) -> None:
    members = archive_members()
    del members["train"]["fine_labels"]
    path = write_archive(tmp_path / "cifar-100-python.tar.gz", members)
    with pytest.raises(
        DataError, match=r"not the layout of CIFAR-100 \(KeyError\('fine_labels'\)\)"
    ):
        prepare("cifar-fs", path, allow_missing=True)


def test_the_classes_are_bertinettos() -> None:
    lists = published_split("cifar_fs")
    assert [len(names) for names in lists.values()] == [64, 16, 20]
    assert len({name for names in lists.values() for name in names}) == 100
