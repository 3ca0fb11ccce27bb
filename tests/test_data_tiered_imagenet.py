"""tieredImageNet from Ren et al.'s pickles and from a folder of synsets."""

from pathlib import Path

import numpy as np
import pytest

from data_layouts import (
    color_image,
    encoded,
    leftovers,
    python2_pickle,
    write_pickle,
    write_tree,
)
from vsm.data import open_images
from vsm.data.catalog import prepare
from vsm.data.published import published_split
from vsm.errors import DataError

SHORT = {"train": "train", "validation": "val", "test": "test"}
LABELS = [1, 0, 1, 1]  # of the four images of each split


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "prepared"))
    return tmp_path / "prepared"


def write_pickles(folder: Path, python2: bool = False) -> Path:
    for position, short in enumerate(SHORT.values()):
        pngs = [
            np.frombuffer(encoded(color_image(60 * position + 10 * n, 84)), np.uint8)[:, None]
            for n in range(len(LABELS))
        ]
        labels = {
            "label_specific": np.array(LABELS),
            "label_specific_str": ["crane", "crane"],  # the bird and the machine
            "label_general": np.array(LABELS),
        }
        for name, value in ((f"{short}_images_png", pngs), (f"{short}_labels", labels)):
            if python2:
                write_tree(folder, {f"{name}.pkl": python2_pickle(value)})
            else:
                write_pickle(folder / f"{name}.pkl", value)
    return folder


@pytest.mark.parametrize("python2", [True, False])
def test_the_pickles_are_read_class_after_class(python2: bool, tmp_path: Path) -> None:
    prepare("tiered-imagenet", write_pickles(tmp_path / "source", python2), allow_missing=True)
    dataset = open_images("tiered-imagenet")
    assert dataset.image_shape == (3, 84, 84)
    assert dataset.class_names[:2] == ("train 000 crane", "train 001 crane")
    assert dataset.class_sizes.tolist() == [1, 3] * 3
    for position, split in enumerate(SHORT):
        classes = dataset.splits[split]  # type: ignore[index]
        assert classes.tolist() == [2 * position, 2 * position + 1]
        reds = [dataset.images[dataset.image_ids(c), 0, 0, 0].tolist() for c in classes]
        first = 60 * position
        assert reds == [[first + 10], [first, first + 20, first + 30]]


def test_missing_classes_are_counted(tmp_path: Path, root: Path) -> None:
    with pytest.raises(DataError, match=r"602 of 608 classes are missing"):
        prepare("tiered-imagenet", write_pickles(tmp_path / "source"))
    assert leftovers(root) == []


def test_labels_that_do_not_match_the_images_are_refused(tmp_path: Path, root: Path) -> None:
    source = write_pickles(tmp_path / "source")
    write_pickle(source / "val_images_png.pkl", [])
    with pytest.raises(DataError, match=r"val_images_png\.pkl: not a list of 4 PNGs"):
        prepare("tiered-imagenet", source, allow_missing=True)
    assert leftovers(root) == []


def test_a_truncated_png_is_named_by_its_position(tmp_path: Path, root: Path) -> None:
    source = write_pickles(tmp_path / "source")
    good = np.frombuffer(encoded(color_image(0, 84)), np.uint8)
    write_pickle(source / "test_images_png.pkl", [good, good, good[:50], good])
    with pytest.raises(DataError, match=r"test_images_png\.pkl, image 2: unreadable or truncated"):
        prepare("tiered-imagenet", source, allow_missing=True)
    assert leftovers(root) == []


@pytest.mark.parametrize(
    "labels", [{}, {"label_specific": [0, 5, 0, 0], "label_specific_str": ["one"]}, [1, 2]]
)
def test_labels_of_another_layout_are_refused(labels: object, tmp_path: Path) -> None:
    source = write_pickles(tmp_path / "source")
    write_pickle(source / "train_labels.pkl", labels)
    with pytest.raises(DataError, match=r"train_labels\.pkl: (not the labels|expected a dict)"):
        prepare("tiered-imagenet", source, allow_missing=True)


def test_a_folder_of_synsets_is_split_by_the_published_classes(tmp_path: Path) -> None:
    chosen = {split: names[:2] for split, names in published_split("tiered_imagenet").items()}
    files = {
        f"train/{name}/{name}_{number}.JPEG": encoded(color_image(number, 120), "JPEG")
        for names in chosen.values()
        for name in names
        for number in range(2)
    }
    files["train/n00000000/other.JPEG"] = b"not looked at"
    prepare("tiered-imagenet", write_tree(tmp_path / "imagenet", files), allow_missing=True)
    dataset = open_images("tiered-imagenet")
    for split, names in chosen.items():
        assert [dataset.class_names[c] for c in dataset.splits[split]] == names
    assert "INCOMPLETE, 6 of 608 classes" in dataset.origin


def test_synsets_missing_from_a_folder_are_counted(tmp_path: Path) -> None:
    files = {"n01530575/n01530575_1.JPEG": encoded(color_image(0, 120), "JPEG")}
    with pytest.raises(DataError, match=r"607 of 608 classes are missing"):
        prepare("tiered-imagenet", write_tree(tmp_path / "imagenet", files))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no images .* or ImageNet's folder of synsets"):
        prepare("tiered-imagenet", write_tree(tmp_path / "x", {"a/b.png": b""}), allow_missing=True)


def test_the_classes_are_rens() -> None:
    lists = published_split("tiered_imagenet")
    assert [len(names) for names in lists.values()] == [351, 97, 160]
    assert len({name for names in lists.values() for name in names}) == 608
