"""The real files, where they are present: counts, classes, images, and the published splits."""

import csv
import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_layouts import shared_data
from vsm.data import EpisodeSampler, ImageDataset, open_images, prepared
from vsm.data.catalog import describe, prepare
from vsm.data.published import CATALOG, paper_split, published_split
from vsm.seeding import generator

SHORT = {"train": "train", "validation": "val", "test": "test"}
PUBLISHED = {
    "cifar_fs": "31c87dcba089e8df",
    "mini_imagenet": "ebaf1ddd8bf75a86",
    "omniglot_vinyals": "9d083c59ee2dc939",
    "tiered_imagenet": "4ec2958d736236a1",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("real")
        patch.setenv("VSM_DATA", str(folder))
        yield folder


@pytest.fixture(scope="module")
def omniglot(root: Path) -> ImageDataset:
    return prepared_images("omniglot", shared_data("omniglot"))


@pytest.fixture(scope="module")
def cifar_fs(root: Path) -> ImageDataset:
    return prepared_images("cifar-fs", shared_data("cifar_fs", "cifar100.zip"))


def prepared_images(name: str, source: Path) -> ImageDataset:
    prepare(name, source)
    return open_images(name)


def test_all_of_omniglot_is_there(omniglot: ImageDataset) -> None:
    described = describe("omniglot")
    assert described["images"] == 4 * 1623 * 20
    assert described["classes"] == 4 * 1623
    assert described["class_sizes"] == {"smallest": 20, "largest": 20}
    assert described["image_shape"] == [1, 28, 28]
    assert described["splits"] == {"train": 4400, "validation": 400, "test": 1692}
    assert described["origin"].endswith("32,460 images; 1,623 characters in 4 rotations")
    prepared.verify("omniglot")


def test_rotations_of_a_character_share_its_split(omniglot: ImageDataset) -> None:
    for split, names in paper_split().items():
        stored = [omniglot.class_names[c] for c in omniglot.classes(split)]
        assert [name for name in stored if "@" not in name] == names
        assert {name.partition("@")[0] for name in stored} == set(names)


def test_omniglot_is_mostly_paper_with_some_ink(omniglot: ImageDataset) -> None:
    ink = omniglot.images[::4].astype(np.float32).mean((1, 2, 3))
    assert ink.min() > 0  # no drawing is blank
    assert 10 < np.median(ink) < 40
    assert omniglot.images[:, 0, 0].mean() < 5  # corners are paper


def test_all_of_cifar_fs_is_there(cifar_fs: ImageDataset) -> None:
    described = describe("cifar-fs")
    assert described["images"] == 100 * 600
    assert described["class_sizes"] == {"smallest": 600, "largest": 600}
    assert described["image_shape"] == [3, 32, 32]
    assert described["splits"] == {"train": 64, "validation": 16, "test": 20}
    prepared.verify("cifar-fs")


def test_cifar_fs_has_the_split_in_its_archive(cifar_fs: ImageDataset) -> None:
    with zipfile.ZipFile(shared_data("cifar_fs", "cifar100.zip")) as archive:
        for split, short in SHORT.items():
            listed = archive.read(f"cifar100/splits/bertinetto/{short}.txt").decode().split()
            classes = cifar_fs.splits[split]  # type: ignore[index]
            assert {cifar_fs.class_names[c] for c in classes} == set(listed)


@pytest.mark.parametrize("name", ["omniglot", "cifar_fs"])
def test_normalization_constants_are_those_of_the_training_images(
    name: str, request: pytest.FixtureRequest
) -> None:
    dataset: ImageDataset = request.getfixturevalue(name)
    pixels = dataset.normalize(dataset.load(dataset.split_ids("train")[::7]))
    assert pixels.mean((0, 2, 3)).abs().max() < 0.02
    assert (pixels.std((0, 2, 3)) - 1).abs().max() < 0.02


@pytest.mark.parametrize("name", ["omniglot", "cifar_fs"])
def test_episodes_can_be_drawn(name: str, request: pytest.FixtureRequest) -> None:
    dataset: ImageDataset = request.getfixturevalue(name)
    random = generator(0, "test")
    batch = EpisodeSampler(dataset, "train", way=20, shot=5, queries=15).draw(2, random)
    pixels = dataset.augment(dataset.load(batch.image_ids), random)
    assert pixels.shape == (2, 20, 20, *dataset.image_shape)


@pytest.mark.parametrize(
    ("name", "folder", "suffix"),
    [
        ("cifar_fs", "cifar_fs_txt", "txt"),
        ("omniglot_vinyals", "omniglot_vinyals", "txt"),
        ("tiered_imagenet", "tiered_imagenet", "csv"),
    ],
)
def test_shipped_class_lists_equal_the_published_ones(name: str, folder: str, suffix: str) -> None:
    for split, short in SHORT.items():
        lines = shared_data("splits", folder, f"{short}.{suffix}").read_text().split()
        assert published_split(name)[split] == [line.split(",")[0] for line in lines]  # type: ignore[index]


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_class_lists_have_the_digest_of_the_published_ones(name: str) -> None:
    """Also where the published files are absent: the digests were computed from these."""
    lists = "\n".join(",".join(names) for names in published_split(name).values())
    assert hashlib.sha256(lists.encode()).hexdigest().startswith(PUBLISHED[name])


def test_shipped_mini_imagenet_classes_equal_the_published_ones() -> None:
    for split, short in SHORT.items():
        with shared_data("splits", "mini_imagenet_ravi", f"{short}.csv").open() as file:
            labels = list(dict.fromkeys(row["label"] for row in csv.DictReader(file)))
        assert published_split("mini_imagenet")[split] == labels  # type: ignore[index]


def test_every_public_file_is_one_the_readers_know() -> None:
    names = {file.name for entry in CATALOG.values() for file in entry.downloads}
    assert names == {"images_background.zip", "images_evaluation.zip", "cifar-100-python.tar.gz"}
