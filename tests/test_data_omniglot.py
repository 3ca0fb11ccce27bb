"""Omniglot from tiny trees in the official layout."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from data_layouts import leftovers, omniglot_drawing, write_tree, write_zip
from vsm.data import open_images, prepared
from vsm.data.catalog import prepare
from vsm.data.published import paper_split, published_split
from vsm.errors import DataError

BACKGROUND = ("Greek/character01", "Greek/character02")
EVALUATION = ("Angelic/character01", "Tengwar/character07")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "prepared"))
    return tmp_path / "prepared"


def drawings(part: str, characters: tuple[str, ...], each: int = 20) -> dict[str, bytes]:
    return {
        f"{part}/{character}/{number:04}_{drawing:02}.png": omniglot_drawing()
        for number, character in enumerate(characters)
        for drawing in range(1, each + 1)
    }


@pytest.fixture(params=["zips", "folders"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for part, characters in (("images_background", BACKGROUND), ("images_evaluation", EVALUATION)):
        if request.param == "zips":
            write_zip(folder / f"{part}.zip", drawings(part, characters))
        else:
            write_tree(folder, drawings(part, characters))
    return folder


def test_both_halves_are_read_from_zips_or_folders(source: Path) -> None:
    prepare("omniglot", source, allow_missing=True)
    dataset = open_images("omniglot")
    assert dataset.image_shape == (1, 28, 28)
    upright = {name for name in dataset.class_names if "@" not in name}
    assert upright == {*BACKGROUND, *EVALUATION}
    assert set(dataset.class_sizes) == {20}
    assert "4 characters in 4 rotations" in dataset.origin
    assert "INCOMPLETE, 80 of 32,460 images" in dataset.origin


def test_one_half_is_enough_to_find_the_other(source: Path) -> None:
    half = next(path for path in source.iterdir() if path.name.startswith("images_evaluation"))
    prepare("omniglot", half, allow_missing=True)
    assert len(open_images("omniglot").class_names) == 16


def test_ink_is_signal_and_rotations_are_classes_of_the_same_split(source: Path) -> None:
    prepare("omniglot", source, allow_missing=True)
    dataset = open_images("omniglot")
    name = "Greek/character01"
    ids = [dataset.class_names.index(name + turn) for turn in ("", "@90", "@180", "@270")]
    upright, *turned = (dataset.images[dataset.image_ids(c)[0], :, :, 0] for c in ids)
    assert upright[14, 3] > 200  # the stroke is near the left edge
    assert upright[14, 14] == 0
    for quarter, image in enumerate(turned, start=1):
        assert np.array_equal(image, np.rot90(upright, quarter))
    assert turned[0][-4, 14] > 200  # turned by 90° to the left, it lies at the bottom
    for classes in dataset.splits.values():
        assert set(ids) <= set(classes) or not set(ids) & set(classes)


def test_the_papers_split_has_its_sizes_and_never_changes() -> None:
    split = paper_split()
    assert {name: len(classes) for name, classes in split.items()} == {
        "train": 1100,
        "validation": 100,
        "test": 423,
    }
    assert len({name for classes in split.values() for name in classes}) == 1623
    assert hashlib.sha256(repr(split).encode()).hexdigest().startswith("4273d6d66a9fe713")


def test_the_split_of_vinyals_can_be_chosen(source: Path) -> None:
    prepare("omniglot-vinyals", source, allow_missing=True)
    dataset = open_images("omniglot-vinyals")
    for split, names in published_split("omniglot_vinyals").items():
        stored = {dataset.class_names[c] for c in dataset.splits.get(split, ())}
        assert {name for name in stored if "@" not in name} <= set(names)


def test_missing_characters_are_counted(source: Path, root: Path) -> None:
    with pytest.raises(DataError, match=r"32,380 of 32,460 images are missing.*--allow-missing"):
        prepare("omniglot", source)
    assert leftovers(root) == []


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    write_zip(tmp_path / "images_background.zip", drawings("images_background", BACKGROUND))
    with pytest.raises(DataError, match=r"neither images_evaluation\.zip nor a folder"):
        prepare("omniglot", tmp_path, allow_missing=True)


def test_a_truncated_drawing_is_named_and_nothing_stays(source: Path, root: Path) -> None:
    if (source / "images_background").is_dir():
        bad = source / "images_background" / "Greek" / "character02" / "0001_07.png"
        bad.write_bytes(bad.read_bytes()[:60])
    else:
        files = drawings("images_background", BACKGROUND)
        name = "images_background/Greek/character02/0001_07.png"
        write_zip(source / "images_background.zip", files | {name: files[name][:60]})
    with pytest.raises(DataError, match=r"Greek/character02/0001_07\.png: unreadable or truncated"):
        prepare("omniglot", source, allow_missing=True)
    assert leftovers(root) == []
    assert not prepared.is_prepared("omniglot")
