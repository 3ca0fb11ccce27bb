"""Your own images: any sizes, given or seeded splits, and clear words for what cannot work."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_layouts import color_image, encoded, leftovers, write_tree
from vsm.data import open_images
from vsm.data.catalog import describe, list_datasets, prepare
from vsm.data.dataset import NO_AUGMENTATION, natural
from vsm.errors import DataError


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "prepared"))
    return tmp_path / "prepared"


def images(classes: dict[str, int], side: int = 32) -> dict[str, bytes]:
    """Draw as many images of each class as is asked for; red values tell classes apart."""
    return {
        f"{name}/{number}.png": encoded(color_image(10 * label, side))
        for label, (name, count) in enumerate(classes.items())
        for number in range(count)
    }


def test_classes_without_split_folders_are_split_from_a_seed(tmp_path: Path) -> None:
    classes = {f"bird{number:02}": 1 + number % 3 for number in range(25)}
    dataset = open_images(f"folder:{write_tree(tmp_path / 'birds', images(classes))}")
    assert dataset.name == "folder:birds"
    assert {split: len(ids) for split, ids in dataset.splits.items()} == {
        "train": 16,
        "validation": 4,
        "test": 5,
    }
    found = {dataset.class_names[c]: int(dataset.class_sizes[c]) for c in range(25)}
    assert found == classes
    for class_id, name in enumerate(dataset.class_names):
        label = list(classes).index(name)
        assert set(dataset.images[dataset.image_ids(class_id), 0, 0, 0]) == {10 * label}


def test_the_same_classes_are_always_split_the_same_way(tmp_path: Path) -> None:
    classes = {f"bird{number}": 1 for number in range(9)}
    tests = []
    for place in ("here", "there"):
        dataset = open_images(f"folder:{write_tree(tmp_path / place, images(classes))}")
        tests.append([dataset.class_names[c] for c in dataset.splits["test"]])
    assert tests[0] == tests[1]


@pytest.mark.parametrize("validation", ["validation", "valid", "val"])
def test_split_folders_are_respected(validation: str, tmp_path: Path) -> None:
    wanted = {"train": ["a", "b"], validation: ["c"], "test": ["d", "train"]}
    files = images({f"{split}/{name}": 2 for split, names in wanted.items() for name in names})
    dataset = open_images(f"folder:{write_tree(tmp_path / 'birds', files)}")
    names = {
        split: [dataset.class_names[c] for c in classes]
        for split, classes in dataset.splits.items()
    }
    assert names == {"train": ["a", "b"], "validation": ["c"], "test": ["d", "train"]}


def test_a_split_folder_may_be_left_out_and_counts_as_empty(tmp_path: Path) -> None:
    files = images({"train/a": 2, "train/b": 2, "test/c": 2})
    described = describe(f"folder:{write_tree(tmp_path / 'birds', files)}")
    assert described["splits"] == {"train": 2, "validation": 0, "test": 1}


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    files = images({"train": 2, "bus": 2, "car": 2})
    assert "train" in open_images(f"folder:{write_tree(tmp_path / 'x', files)}").class_names


def test_small_squares_keep_their_size_and_photographs_are_augmented(tmp_path: Path) -> None:
    files = images({"a": 1, "b": 1, "c": 1}, side=40)
    dataset = open_images(f"folder:{write_tree(tmp_path / 'x', files)}")
    assert dataset.image_shape == (3, 40, 40)
    assert dataset.augmentation == natural(4)


def test_images_of_different_sizes_become_84_by_84(tmp_path: Path) -> None:
    files = images({"a": 1, "b": 1, "c": 1}, side=40)
    files["a/wide.jpg"] = encoded(np.zeros((50, 200, 3), dtype=np.uint8), "JPEG")
    assert open_images(f"folder:{write_tree(tmp_path / 'x', files)}").image_shape == (3, 84, 84)


def test_gray_images_stay_gray_and_are_not_augmented(tmp_path: Path) -> None:
    gray = encoded(np.full((20, 20), 70, dtype=np.uint8))
    dataset = open_images(
        f"folder:{write_tree(tmp_path / 'x', {f'{name}/0.png': gray for name in 'abc'})}"
    )
    assert dataset.image_shape == (1, 20, 20)
    assert set(dataset.images.ravel()) == {70}
    assert dataset.augmentation == NO_AUGMENTATION


def test_one_color_image_makes_all_of_them_color(tmp_path: Path) -> None:
    files = {f"{name}/0.png": encoded(np.zeros((20, 20), dtype=np.uint8)) for name in "abc"}
    files["b/1.png"] = encoded(np.zeros((20, 20, 3), dtype=np.uint8))
    assert open_images(f"folder:{write_tree(tmp_path / 'x', files)}").image_shape == (3, 20, 20)


def test_a_changed_folder_is_prepared_anew_and_an_unchanged_one_is_not(
    tmp_path: Path, root: Path
) -> None:
    source = write_tree(tmp_path / "x", images({"a": 1, "b": 1, "c": 1}))
    first = prepare("folder", source)
    written = (first / "images.npy").stat().st_mtime_ns
    assert prepare("folder", source) == first
    assert (first / "images.npy").stat().st_mtime_ns == written
    (source / "a" / "new.png").write_bytes(encoded(color_image(5, 32)))
    assert prepare("folder", source) != first
    assert len(open_images(f"folder:{source}").images) == 4
    os.utime(source / "a" / "new.png", (1, 1))  # same size, edited
    assert len({prepare("folder", source), first}) == 2
    assert leftovers(root) == []


def test_prepared_folders_are_listed(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "birds", images({"a": 1, "b": 1, "c": 1}))
    location = prepare("folder", source)
    (row,) = [row for row in list_datasets() if row["name"].startswith("folder-birds-")]
    assert row["prepared"]
    assert row["location"] == str(location)
    assert str(source) in row["title"]
    shutil.rmtree(source)  # what was prepared stays usable by its stored name
    assert len(open_images(row["name"]).class_names) == 3
    (location / "index.json").write_text("damage")
    assert "is damaged" in list_datasets()[-1]["title"]


def assert_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    source = write_tree(tmp_path / "x", files)
    with pytest.raises(DataError, match=message):
        open_images(f"folder:{source}")
    assert leftovers(tmp_path / "prepared") == []


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    files = images({"a": 1, "b": 1, "c": 1}) | {"hollow/notes.txt": b""}
    assert_refused(tmp_path, files, "x/hollow has no images; add some or remove it")


def test_a_class_in_two_splits_is_named(tmp_path: Path) -> None:
    files = images({"train/a": 1, "train/b": 1, "test/b": 1})
    assert_refused(tmp_path, files, "class 'b' is in two splits, train and test")


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    files = images({"a": 1, "b": 1, "c": 1})
    files["b/bad.png"] = encoded(color_image(0, 32))[:70]
    assert_refused(tmp_path, files, r"x/b/bad\.png: unreadable or truncated image")


def test_too_few_classes_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, images({"a": 1, "b": 1}), "2 classes found, but at least 3 are needed")


def test_folders_without_any_images_are_refused(tmp_path: Path) -> None:
    files = {f"{name}/notes.txt": b"" for name in "abc"}
    assert_refused(tmp_path, files, r"x/[abc] has no images; add some or remove it")


def test_a_stray_folder_beside_split_folders_is_named(tmp_path: Path) -> None:
    files = images({"train/a": 1, "test/b": 1, "c": 1})
    assert_refused(tmp_path, files, "has 'c' beside 'test'")


def test_split_folders_without_train_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, images({"test/b": 1}), "has no 'train' folder beside 'test'")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_class_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "x", images({"a": 1, "b": 1, "c": 1}))
    (source / "b").chmod(0)
    with pytest.raises(DataError, match=r"cannot list .*/b: Permission denied"):
        open_images(f"folder:{source}")


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        open_images(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(DataError, match="folder: needs a path"):
        open_images("folder:")
    with pytest.raises(DataError, match="prepare folder needs --from PATH"):
        prepare("folder")
