"""Omniglot, CIFAR-FS, miniImageNet and tieredImageNet, as they are published.

Every reader opens an archive or a folder, finds the images of every class, and compares them with
the published class lists (:class:`Layout`), which gives a :class:`~vsm.data.store.Preparation`.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from vsm.data import pickles
from vsm.data.archives import Tree, open_tree
from vsm.data.augmentation import NO_AUGMENTATION, Augmentation, natural
from vsm.data.dataset import (
    SPLITS,
    ClassLists,
    Ids,
    PixelNormalization,
    Pixels,
    Split,
    all_classes,
    random_split,
)
from vsm.data.downloads import PublicFile
from vsm.data.images import ImageFormat, decode_all
from vsm.data.store import Preparation
from vsm.errors import DataError

Reader = Callable[[Path, bool], AbstractContextManager[Preparation]]
"""Reads a source; the second argument allows images to be missing."""
SHORT_NAMES: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}


def published_split(name: str) -> ClassLists:
    """Return the class names of each split in the published list ``name``, in its order.

    The lists are ``cifar_fs`` (Bertinetto et al.), ``mini_imagenet`` (Ravi & Larochelle),
    ``omniglot_vinyals`` (Vinyals et al.) and ``tiered_imagenet`` (Ren et al.).
    """
    text = (resources.files("vsm.data") / "splits" / f"{name}.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    return {split: [row["class"] for row in rows if row["split"] == split] for split in SPLITS}


@dataclass(frozen=True)
class Layout:
    """What a published dataset consists of."""

    lists: ClassLists  # the classes of each split
    class_size: int | None  # images of each class; None if they differ, and only classes count
    form: ImageFormat  # of all images
    allow_missing: bool  # go on with the classes that have any images

    def from_files(self, tree: Tree, files: Mapping[str, Sequence[str]]) -> Preparation:
        """Prepare image files of ``tree``, given those of every class."""
        if tree.is_tar:
            raise DataError(f"{tree.location}: a tar of images; unpack it and pass the folder")

        def batches(present: list[str]) -> Iterator[Pixels]:
            names = [file for class_name in present for file in files[class_name]]
            return decode_all(names, tree.read, self.form, lambda n: f"{tree.location}/{n}")

        return self.prepare(tree.location, files, batches)

    def from_arrays(self, location: Path, images: Mapping[str, Pixels]) -> Preparation:
        """Prepare the images ``[n, H, W, C]`` of every class."""
        return self.prepare(location, images, lambda present: map(images.__getitem__, present))

    def prepare(
        self,
        location: Path,
        found: Mapping[str, Sequence[str] | Ids | Pixels],
        batches: Callable[[list[str]], Iterable[Pixels]],
    ) -> Preparation:
        """Compare what was found with what was published, and prepare what is there.

        Args:
            location: where it was found.
            found: the images of each class that has any.
            batches: gives the images of these classes, class after class.
        """
        each, unit = (self.class_size, "images") if self.class_size else (1, "classes")
        sizes = {name: len(found.get(name, ())) for name in all_classes(self.lists)}
        present = {s: [name for name in names if sizes[name]] for s, names in self.lists.items()}
        missing = {name: each - size for name, size in sizes.items() if size < each}
        num_missing, expected = sum(missing.values()), each * len(sizes)
        images = sum(sizes.values())
        if missing and not (self.allow_missing and images):
            first = next(iter(missing))
            raise DataError(
                f"{num_missing:,} of {expected:,} {unit} are missing, first of class {first!r} "
                f"({sizes[first]} of {each}); complete the files"
                + (", or pass --allow-missing to go without them" if images else "")
            )
        origin = f"{location.resolve()}: {images:,} images"
        if missing:
            origin += f"; INCOMPLETE, {expected - num_missing:,} of {expected:,} {unit}"
        names = all_classes(present)
        chosen = {name: sizes[name] for name in names}
        return Preparation(self.form.shape, present, chosen, batches(names), origin)


# Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings each. B. M. Lake,
# R. Salakhutdinov, J. B. Tenenbaum: Human-level concept learning through probabilistic program
# induction. Science, 2015. Drawings are reduced from 105×105 to 28×28, ink is 255 and paper 0. As
# in Vinyals et al. (2016) and most work since, a character turned by 90°, 180° and 270° is a new
# class; the four stay in one split. Turned drawings are stored (102 MB in all), not computed.

OMNIGLOT_PARTS = ("images_background", "images_evaluation")
OMNIGLOT_TURNS = ("", "@90", "@180", "@270")  # suffixes of class names, counter-clockwise
OMNIGLOT_FORMAT = ImageFormat(side=28, channels=1, ink=True)


def paper_split() -> ClassLists:
    """Return 1,100 / 100 / 423 characters, drawn once from a fixed seed."""
    characters = all_classes(published_split("omniglot_vinyals"))
    return random_split(characters, (1100, 100, 423), seed=0)


@contextmanager
def read_omniglot(
    source: Path, allow_missing: bool, split: Callable[[], ClassLists] = paper_split
) -> Iterator[Preparation]:
    """Read the official zips or folders, in ``source`` or beside it."""
    is_above = source.is_dir() and source.name not in OMNIGLOT_PARTS
    folder = source if is_above else source.parent
    owner: dict[str, Tree] = {}

    def open_member(name: str) -> IO[bytes]:
        return owner[name].open(name.partition("/")[2])

    with ExitStack() as stack:
        for part in OMNIGLOT_PARTS:
            found = [one for one in (folder / part, folder / f"{part}.zip") if one.exists()]
            if not found:
                raise DataError(
                    f"omniglot: found neither {part}.zip nor a folder {part} in {folder}; pass the "
                    "folder that holds both with --from, or use --download"
                )
            tree = stack.enter_context(open_tree(found[0]))
            owner |= {f"{found[0].name}/{name}": tree for name in tree.names}
        both = Tree(folder, list(owner), open_member)
        # …/<alphabet>/<character>/<file>
        files = both.images_by_class(lambda path: "/".join(path.parts[-3:-1]))
        upright = Layout(split(), 20, OMNIGLOT_FORMAT, allow_missing).from_files(both, files)
        yield _with_rotations(upright)


def _with_rotations(upright: Preparation) -> Preparation:
    """Follow each character by the same turned by 90°, 180° and 270°."""
    sizes = upright.class_sizes

    def batches() -> Iterator[Pixels]:
        drawings = np.concatenate(list(upright.batches))  # all of them are 25 MB
        for character in np.split(drawings, np.cumsum(list(sizes.values()))[:-1]):
            for turns in range(len(OMNIGLOT_TURNS)):
                yield np.rot90(character, turns, axes=(1, 2))

    return upright._replace(
        class_lists={
            split: [name + turn for name in names for turn in OMNIGLOT_TURNS]
            for split, names in upright.class_lists.items()
        },
        class_sizes={name + turn: size for name, size in sizes.items() for turn in OMNIGLOT_TURNS},
        batches=batches(),
        origin=f"{upright.origin}; {len(sizes):,} characters in 4 rotations",
    )


# CIFAR-FS: the 100 classes of CIFAR-100, 600 images each, split 64 / 16 / 20. L. Bertinetto,
# J. F. Henriques, P. H. S. Torr, A. Vedaldi: Meta-learning with differentiable closed-form solvers.
# ICLR 2019. Images: A. Krizhevsky, 2009. Two sources hold the same images: the CIFAR-FS zip
# (cifar100/data/<class>/*.png), and the CIFAR-100 archive for Python, which can be downloaded.

CIFAR_ARCHIVE = "cifar-100-python.tar.gz"
CIFAR_PICKLES = ("train", "test")  # classes of the three splits are in both
CIFAR_FORMAT = ImageFormat(side=32, channels=3)


@contextmanager
def read_cifar_fs(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read CIFAR-FS or CIFAR-100 from an archive or its unpacked folder."""
    if source.is_dir():
        for archive in (source / "cifar100.zip", source / CIFAR_ARCHIVE):
            source = archive if archive.is_file() else source
    layout = Layout(published_split("cifar_fs"), 600, CIFAR_FORMAT, allow_missing)
    with open_tree(source) as tree:
        if {"meta", *CIFAR_PICKLES} <= {PurePosixPath(name).name for name in tree.names}:
            yield layout.from_arrays(tree.location, _load_cifar(tree))
            return
        files = tree.images_by_class()
        if not files:
            raise DataError(
                f"cifar-fs: {tree.location} holds neither <class>/*.png nor the pickles of "
                f"{CIFAR_ARCHIVE}; pass one of these with --from, or use --download"
            )
        yield layout.from_files(tree, files)


def _load_cifar(tree: Tree) -> dict[str, Pixels]:
    """Return the images of every class of CIFAR-100."""
    with pickles.expecting("the layout of CIFAR-100", f"{tree.location}: meta"):
        names = [pickles.text(name) for name in tree.load_pickle("meta")["fine_label_names"]]
        parts = [tree.load_pickle(name) for name in CIFAR_PICKLES]
        labels = np.concatenate([np.asarray(part["fine_labels"], np.int64) for part in parts])
        planes = np.concatenate([np.asarray(part["data"], np.uint8) for part in parts])
        images = planes.reshape(len(labels), 3, 32, 32).transpose(0, 2, 3, 1)
        return {name: images[labels == label] for label, name in enumerate(names)}


# miniImageNet: 100 classes of 600 images of ImageNet at 84×84. O. Vinyals et al.: Matching networks
# for one shot learning. NIPS 2016, with the classes of S. Ravi, H. Larochelle: Optimization as a
# model for few-shot learning. ICLR 2017. tieredImageNet: 608 classes, split by what they are kinds
# of. M. Ren et al.: Meta-learning for semi-supervised few-shot classification. ICLR 2018.
# The images may not be passed on, so there is no download. Both are read from image files, or from
# pickles: all of miniImageNet's at once (1.3 GB), of tieredImageNet's one split (6 GB) at a time.

IMAGENET_FORMAT = ImageFormat(side=84, channels=3)
MINI_CLASS_SIZE = 600  # images
MINI_PICKLE = "mini-imagenet-cache-{}.pkl"
TIERED_CLASSES: dict[Split, int] = {"train": 351, "validation": 97, "test": 160}
TIERED_IMAGES, TIERED_LABELS = "{}_images_png.pkl", "{}_labels.pkl"
SYNSET_LENGTH = 9  # characters of a WordNet id such as n01532829


@contextmanager
def read_mini_imagenet(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read miniImageNet from a folder or archive of images or of the pickles."""
    lists = published_split("mini_imagenet")
    layout = Layout(lists, MINI_CLASS_SIZE, IMAGENET_FORMAT, allow_missing)
    with _open_imagenet(source) as tree:
        if splits := _splits_with(MINI_PICKLE, tree, allow_missing):
            images = {name: i for split in splits for name, i in _load_mini(tree, split).items()}
            yield layout.from_arrays(tree.location, images)
            return
        classes = set(all_classes(lists))
        files = tree.images_by_class(
            lambda path: (
                path.parent.name if path.parent.name in classes else path.name[:SYNSET_LENGTH]
            )
        )
        if not files:
            raise DataError(
                f"mini-imagenet: {tree.location} holds no images and no mini-imagenet-cache-*.pkl; "
                "pass the folder that does with --from"
            )
        for label in classes & files.keys():
            if (count := len(files[label])) > MINI_CLASS_SIZE:
                raise DataError(
                    f"mini-imagenet: class {label} has {count:,} images in {tree.location}, more "
                    f"than {MINI_CLASS_SIZE}; keep those of miniImageNet only"
                )
        yield layout.from_files(tree, files)


@contextmanager
def read_tiered_imagenet(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read tieredImageNet from the pickles, or from an ImageNet folder or archive."""
    with _open_imagenet(source) as tree:
        if splits := _splits_with(TIERED_IMAGES, tree, allow_missing):
            yield _tiered_from_pickles(tree, splits, allow_missing)
            return
        lists, files = published_split("tiered_imagenet"), tree.images_by_class()
        if not files.keys() & all_classes(lists):
            raise DataError(
                f"tiered-imagenet: {tree.location} holds neither *_images_png.pkl nor images in "
                "folders named by synset, such as n01530575; pass the folder that does with --from"
            )
        yield Layout(lists, None, IMAGENET_FORMAT, allow_missing).from_files(tree, files)


def _open_imagenet(source: Path) -> AbstractContextManager[Tree]:
    return open_tree(source.parent if source.suffix == ".pkl" else source)


def _splits_with(pickle: str, tree: Tree, allow_missing: bool) -> list[Split]:
    """Return the splits to read if there are such pickles, else none."""
    names = {PurePosixPath(name).name for name in tree.names}
    there = [split for split in SPLITS if pickle.format(SHORT_NAMES[split]) in names]
    return there if allow_missing or not there else list(SPLITS)


def _load_mini(tree: Tree, split: Split) -> dict[str, Pixels]:
    """Return the images ``[n, 84, 84, 3]`` of every class in the pickle of a split."""
    what = "a miniImageNet cache, which has image_data uint8 [n, 84, 84, 3] and class_dict"
    name = MINI_PICKLE.format(SHORT_NAMES[split])
    cache = tree.load_pickle(name)
    with pickles.expecting(what, f"{tree.location}/{name}"):
        images = np.asarray(cache["image_data"])
        if images.dtype != np.uint8 or images.shape[1:] != IMAGENET_FORMAT.shape:
            raise ValueError(f"image_data is {images.dtype} {images.shape}")
        classes = cache["class_dict"].items()
        return {label: images[np.asarray(ids, np.int64)] for label, ids in classes}


def _tiered_from_pickles(tree: Tree, splits: list[Split], allow_missing: bool) -> Preparation:
    """Read the labels of all splits now, and the images of one split after another later."""
    positions = {split: _load_tiered_labels(tree, split) for split in splits}
    lists = {split: [*positions.get(split, ())] for split in SPLITS}
    for split, count in TIERED_CLASSES.items():  # what is not there counts as missing
        numbers = range(len(lists[split]) + 1, count + 1)
        lists[split] += [f"{split} number {number}" for number in numbers]

    def batches(_: list[str]) -> Iterator[Pixels]:
        for split, classes in positions.items():
            yield from _decode_tiered(tree, split, np.concatenate([*classes.values()]).tolist())

    found = {name: ids for classes in positions.values() for name, ids in classes.items()}
    layout = Layout(lists, None, IMAGENET_FORMAT, allow_missing)
    return layout.prepare(tree.location, found, batches)


def _load_tiered_labels(tree: Tree, split: Split) -> dict[str, Ids]:
    """Return the positions of every class of one split.

    Two classes may share an English word (crane), so names begin with split and label.
    """
    name = TIERED_LABELS.format(SHORT_NAMES[split])
    table = tree.load_pickle(name)
    what = "the labels of tieredImageNet, label_specific and label_specific_str"
    with pickles.expecting(what, f"{tree.location}/{name}"):
        labels = np.asarray(table["label_specific"], np.int64)
        words = [pickles.text(word) for word in table["label_specific_str"]]
        return {
            f"{split} {label:03} {words[label]}": np.flatnonzero(labels == label)
            for label in np.unique(labels)
        }


def _decode_tiered(tree: Tree, split: Split, order: list[int]) -> Iterator[Pixels]:
    """Yield the images of a pickled list of PNGs in this order, class after class."""
    name = TIERED_IMAGES.format(SHORT_NAMES[split])
    encoded = tree.load_pickle(name)
    if not isinstance(encoded, list) or len(encoded) != len(order):
        raise DataError(
            f"{tree.location}/{name}: expected a list of {len(order):,} PNGs, one for each label; "
            "fetch or copy it and its labels again"
        )
    yield from decode_all(
        order,
        lambda position: np.asarray(encoded[position], np.uint8).tobytes(),
        IMAGENET_FORMAT,
        label=lambda position: f"{tree.location}/{name}, image {position}",
    )


@dataclass(frozen=True)
class Entry:
    """What is known of a dataset before it is prepared."""

    title: str  # one line
    needs: str  # what --from expects
    read: Reader
    normalization: PixelNormalization  # mean and standard deviation of the training images
    augmentation: Augmentation = NO_AUGMENTATION
    downloads: tuple[PublicFile, ...] = ()  # public files that --download fetches


_OMNIGLOT_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
_OMNIGLOT = Entry(
    title="Omniglot, 1100/100/423 characters in 4 rotations (split of the paper)",
    needs="images_background.zip and images_evaluation.zip, or the folders inside them",
    read=read_omniglot,
    normalization=PixelNormalization(mean=(0.0839,), std=(0.2393,)),
    downloads=(
        PublicFile(f"{_OMNIGLOT_URL}/images_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
        PublicFile(f"{_OMNIGLOT_URL}/images_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
    ),
)
_MINI_IMAGENET = Entry(
    title="miniImageNet, 64/16/20 classes (Ravi & Larochelle)",
    needs="the folder of mini-imagenet-cache-{train,val,test}.pkl, or of the images",
    read=read_mini_imagenet,
    normalization=PixelNormalization(mean=(0.4721, 0.4533, 0.4100), std=(0.2772, 0.2678, 0.2845)),
    augmentation=natural(crop_padding=8),
)
_CIFAR_100_URL = f"https://www.cs.toronto.edu/~kriz/{CIFAR_ARCHIVE}"

CATALOG: dict[str, Entry] = {
    "omniglot": _OMNIGLOT,
    "omniglot-vinyals": replace(
        _OMNIGLOT,
        title="Omniglot, 1028/172/423 characters in 4 rotations (split of Vinyals et al.)",
        read=partial(read_omniglot, split=partial(published_split, "omniglot_vinyals")),
    ),
    "cifar-fs": Entry(
        title="CIFAR-FS, 64/16/20 classes (Bertinetto et al.)",
        needs=f"the CIFAR-FS zip cifar100.zip or {CIFAR_ARCHIVE}, or either unpacked",
        read=read_cifar_fs,
        normalization=PixelNormalization(
            mean=(0.5088, 0.4917, 0.4437), std=(0.2674, 0.2564, 0.2772)
        ),
        augmentation=natural(crop_padding=4),
        downloads=(PublicFile(_CIFAR_100_URL, "eb9058c3a382ffc7106e4002c42a8d85"),),
    ),
    "mini-imagenet": _MINI_IMAGENET,
    "tiered-imagenet": replace(
        _MINI_IMAGENET,
        title="tieredImageNet, 351/97/160 classes (Ren et al.)",
        needs="the folder of {train,val,test}_images_png.pkl and *_labels.pkl, or ImageNet's "
        "folder of synsets",
        read=read_tiered_imagenet,
    ),
}
