"""miniImageNet from image files, named by class, and from the passed-around pickles."""

from pathlib import Path
from typing import Any

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
from vsm.data import ImageDataset, open_images
from vsm.data.catalog import prepare
from vsm.data.published import published_split
from vsm.errors import DataError

CLASSES = {"train": "n01532829", "val": "n01855672", "test": "n01930112"}
SPLITS = {"train": "train", "val": "validation", "test": "test"}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "prepared"))
    return tmp_path / "prepared"


def value(position: int, number: int) -> int:
    """Return the red value of an image: it tells class and number apart."""
    return 60 * position + 10 * number


def images(foldered: bool, each: int = 3) -> dict[str, bytes]:
    """JPEGs of different sizes, named as Ravi & Larochelle name them."""
    return {
        (f"images/{name}/" if foldered else "images/") + f"{name}{number:08}.jpg": encoded(
            color_image(value(position, number), 100 + 10 * number), "JPEG"
        )
        for position, name in enumerate(CLASSES.values())
        for number in range(each)
    }


def assert_holds(dataset: ImageDataset, numbers: tuple[int, ...]) -> None:
    assert dataset.image_shape == (3, 84, 84)
    for position, (short, name) in enumerate(CLASSES.items()):
        (class_id,) = dataset.splits[SPLITS[short]]  # type: ignore[index]
        assert dataset.class_names[class_id] == name
        reds = dataset.images[dataset.image_ids(class_id), 42, 42, 0].astype(int)
        expected = [value(position, number) for number in numbers]
        assert np.abs(reds - expected).max() <= 4  # JPEG


@pytest.mark.parametrize("foldered", [True, False])
def test_images_are_found_by_class(foldered: bool, tmp_path: Path) -> None:
    others = {"images/n99999999/n9999999900000001.jpg": b"not looked at", "train.csv": b"nor this"}
    source = write_tree(tmp_path / "source", images(foldered) | others)
    prepare("mini-imagenet", source, allow_missing=True)
    assert_holds(open_images("mini-imagenet"), (0, 1, 2))


def test_missing_images_are_counted(tmp_path: Path, root: Path) -> None:
    source = write_tree(tmp_path / "source", images(False))
    with pytest.raises(DataError, match=r"59,991 of 60,000 images are missing, first of class"):
        prepare("mini-imagenet", source)
    assert leftovers(root) == []


def test_all_of_imagenet_is_not_miniimagenet(tmp_path: Path) -> None:
    many = {f"n01532829/n01532829_{number}.JPEG": b"" for number in range(601)}
    with pytest.raises(DataError, match=r"class n01532829 has 601 images .*more than 600"):
        prepare("mini-imagenet", write_tree(tmp_path / "source", many), allow_missing=True)


def test_a_truncated_image_is_named_and_nothing_stays(tmp_path: Path, root: Path) -> None:
    files = images(False)
    name = "images/n0185567200000001.jpg"
    files[name] = files[name][:300]
    with pytest.raises(DataError, match=r"n0185567200000001\.jpg: unreadable or truncated"):
        prepare("mini-imagenet", write_tree(tmp_path / "source", files), allow_missing=True)
    assert leftovers(root) == []


def caches(each: int = 3) -> dict[str, dict[str, Any]]:
    return {
        f"mini-imagenet-cache-{short}.pkl": {
            "image_data": np.stack([color_image(value(position, n), 84) for n in range(each)]),
            "class_dict": {name: list(range(each))},
        }
        for position, (short, name) in enumerate(CLASSES.items())
    }


@pytest.mark.parametrize("writer", ["python 2", "python 3"])
def test_the_pickles_are_read(writer: str, tmp_path: Path) -> None:
    for name, cache in caches().items():
        if writer == "python 2":
            write_tree(tmp_path, {name: python2_pickle(cache)})
        else:
            write_pickle(tmp_path / name, cache, protocol=4)
    prepare("mini-imagenet", tmp_path, allow_missing=True)
    assert_holds(open_images("mini-imagenet"), (0, 1, 2))


def test_a_missing_pickle_is_named(tmp_path: Path) -> None:
    for name, cache in list(caches().items())[:2]:
        write_pickle(tmp_path / name, cache)
    with pytest.raises(DataError, match=r"mini-imagenet-cache-test\.pkl is missing"):
        prepare("mini-imagenet", tmp_path)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("image_data", np.zeros((3, 84, 84, 3), dtype=np.float32)),
        ("image_data", np.zeros((3, 32, 32, 3), dtype=np.uint8)),
        ("class_dict", {"n01532829": [0, 1, 3]}),
        ("class_dict", {"n01532829": ["a"]}),
        ("class_dict", [1, 2]),
    ],
)
def test_a_pickle_of_another_layout_is_refused(key: str, wrong: object, tmp_path: Path) -> None:
    for name, cache in caches().items():
        write_pickle(tmp_path / name, cache | {key: wrong})
    with pytest.raises(DataError, match=r"mini-imagenet-cache-train\.pkl: (not a|expected)"):
        prepare("mini-imagenet", tmp_path, allow_missing=True)


def test_a_folder_without_images_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no images .* of mini-imagenet-cache"):
        prepare("mini-imagenet", write_tree(tmp_path / "source", {"notes.txt": b""}))


def test_the_classes_are_ravis_and_larochelles() -> None:
    lists = published_split("mini_imagenet")
    assert [len(names) for names in lists.values()] == [64, 16, 20]
