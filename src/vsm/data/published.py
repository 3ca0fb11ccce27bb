"""Omniglot, CIFAR-FS, miniImageNet and tieredImageNet, as they are published.

:data:`CATALOG` describes them. :meth:`PublishedDataset.read` finds the images of every class in an
archive or a folder and compares them with the published class lists.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np

from vsm.data.archives import Tree, open_tree, text
from vsm.data.dataset import (
    NO_AUGMENTATION,
    SPLITS,
    Augmentation,
    ClassLists,
    Ids,
    PixelNormalization,
    Pixels,
    Split,
    all_classes,
    natural,
    random_split,
)
from vsm.data.images import ImageFormat, decode_all, is_image_name
from vsm.data.prepared import Preparation
from vsm.errors import DataError

SHORT_NAMES: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}


def published_split(name: str) -> ClassLists:
    """Return the class names of each split in the published list ``name``, in its order.

    The lists are ``cifar_fs`` (Bertinetto et al.), ``mini_imagenet`` (Ravi & Larochelle),
    ``omniglot_vinyals`` (Vinyals et al.) and ``tiered_imagenet`` (Ren et al.).
    """
    listed = (resources.files("vsm.data") / "splits" / f"{name}.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(listed.splitlines()))
    return {split: [row["class"] for row in rows if row["split"] == split] for split in SPLITS}


class PublicFile(NamedTuple):
    """A file that can be downloaded."""

    url: str
    md5: str  # as its publisher says

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]


class Images(NamedTuple):
    """The images found in some files."""

    sizes: Mapping[str, int]  # of each class
    batches: Callable[[list[str]], Iterable[Pixels]]  # of these classes, class after class
    lists: ClassLists | None = None  # the classes of each split, if the files say

    @staticmethod
    def of_arrays(arrays: Mapping[str, Pixels]) -> "Images":
        """Return the images ``[n, H, W, C]`` of every class."""
        sizes = {name: len(array) for name, array in arrays.items()}
        return Images(sizes, lambda names: map(arrays.__getitem__, names))


@dataclass(frozen=True)
class PublishedDataset:
    """What is known of a dataset before it is prepared."""

    title: str  # one line
    needs: str  # what --from expects
    form: ImageFormat
    lists: Callable[[], ClassLists]  # the classes of each split
    class_size: int | None  # images of each class; None if they differ, and only classes count
    normalization: PixelNormalization  # mean and standard deviation of the training images
    open: Callable[[Path], AbstractContextManager[Tree]]
    class_of: Callable[[PurePosixPath], str]  # the class of an image file
    load_pickles: Callable[[Tree, bool], Images | None] | None = None
    """Load the images of pickles, if there are any; the second argument allows missing splits."""
    has_rotations: bool = False  # each class is followed by its rotations
    augmentation: Augmentation = NO_AUGMENTATION
    downloads: tuple[PublicFile, ...] = ()  # public files that --download fetches

    @contextmanager
    def read(self, source: Path, allow_missing: bool) -> Iterator[Preparation]:
        """Read ``source``; if ``allow_missing``, go on with the classes that have any images."""
        with self.open(source) as tree:
            pickled = self.load_pickles(tree, allow_missing) if self.load_pickles else None
            images = pickled or self._image_files(tree)
            upright = self._prepare(tree.location, images, allow_missing)
            yield _with_rotations(upright) if self.has_rotations else upright

    def _image_files(self, tree: Tree) -> Images:
        files: dict[str, list[str]] = {}
        for name in filter(is_image_name, tree.names):
            files.setdefault(self.class_of(PurePosixPath(name)), []).append(name)
        if files and tree.is_tar:
            raise DataError(f"{tree.location}: a tar of images; unpack it and pass the folder")

        def decode(classes: list[str]) -> Iterator[Pixels]:
            names = [name for class_name in classes for name in files[class_name]]
            return decode_all(names, tree.read, self.form, lambda n: f"{tree.location}/{n}")

        return Images({name: len(found) for name, found in files.items()}, decode)

    def _prepare(self, location: Path, images: Images, allow_missing: bool) -> Preparation:
        """Compare what was found with what was published, and prepare what is there."""
        each, unit = (self.class_size, "images") if self.class_size else (1, "classes")
        lists = images.lists or self.lists()
        sizes = {name: images.sizes.get(name, 0) for name in all_classes(lists)}
        total, expected = sum(sizes.values()), each * len(sizes)
        if not total:
            raise DataError(
                f"data: {location} holds no images of this dataset; pass {self.needs} with --from"
                + (", or use --download" if self.downloads else "")
            )
        missing = {name: each - size for name, size in sizes.items() if size < each}
        num_missing = sum(missing.values())
        if missing and not allow_missing:
            first = next(iter(missing))
            raise DataError(
                f"{num_missing:,} of {expected:,} {unit} are missing, first of class {first!r} "
                f"({sizes[first]} of {each}); complete the files, or pass --allow-missing to go "
                "without them"
            )
        for name, size in sizes.items():
            if self.class_size and size > self.class_size:
                raise DataError(
                    f"data: class {name} has {size:,} images in {location}, more than "
                    f"{self.class_size}; keep the published ones only"
                )
        origin = f"{location.resolve()}: {total:,} images"
        if missing:
            origin += f"; INCOMPLETE, {expected - num_missing:,} of {expected:,} {unit}"
        present = {split: [n for n in names if sizes[n]] for split, names in lists.items()}
        names = all_classes(present)
        found = {name: sizes[name] for name in names}
        return Preparation(self.form.shape, present, found, images.batches(names), origin)


# Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings each. B. M. Lake,
# R. Salakhutdinov, J. B. Tenenbaum: Human-level concept learning through probabilistic program
# induction. Science, 2015. As in Vinyals et al. (2016) and most work since, a character turned by
# 90°, 180° and 270° is a new class of the same split.

OMNIGLOT_PARTS = ("images_background", "images_evaluation")
OMNIGLOT_TURNS = ("", "@90", "@180", "@270")  # suffixes of class names, counter-clockwise


def paper_split() -> ClassLists:
    """Return 1,100 / 100 / 423 characters, drawn once from a fixed seed."""
    characters = all_classes(published_split("omniglot_vinyals"))
    return random_split(characters, (1100, 100, 423), seed=0)


@contextmanager
def _open_omniglot(source: Path) -> Iterator[Tree]:
    """Open the two official zips or folders, in ``source`` or beside it, as one tree."""
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
        yield Tree(folder, list(owner), open_member)


def _with_rotations(upright: Preparation) -> Preparation:
    """Follow each character by the same turned by 90°, 180° and 270°."""
    sizes = upright.class_sizes

    def rotations() -> Iterator[Pixels]:
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
        batches=rotations(),
        origin=f"{upright.origin}; {len(sizes):,} characters in 4 rotations",
    )


# CIFAR-FS: the 100 classes of CIFAR-100, 600 images each, split 64 / 16 / 20. L. Bertinetto,
# J. F. Henriques, P. H. S. Torr, A. Vedaldi: Meta-learning with differentiable closed-form solvers.
# ICLR 2019. Images: A. Krizhevsky, 2009. Two sources hold the same images: the CIFAR-FS zip
# (cifar100/data/<class>/*.png), and the CIFAR-100 archive for Python, which can be downloaded.

CIFAR_ARCHIVE = "cifar-100-python.tar.gz"
CIFAR_PICKLES = ("train", "test")  # classes of the three splits are in both


def _open_cifar(source: Path) -> AbstractContextManager[Tree]:
    for archive in (source / "cifar100.zip", source / CIFAR_ARCHIVE):
        source = archive if archive.is_file() else source
    return open_tree(source)


def _load_cifar(tree: Tree, _: bool) -> Images | None:
    if not {"meta", *CIFAR_PICKLES} <= tree.file_names:
        return None
    what = "the layout of CIFAR-100"
    with tree.pickled("meta", what) as meta:
        names = [text(name) for name in meta["fine_label_names"]]
    labels, planes = [], []
    for part in CIFAR_PICKLES:
        with tree.pickled(part, what) as table:
            labels.append(np.asarray(table["fine_labels"], np.int64))
            planes.append(np.asarray(table["data"], np.uint8).reshape(len(labels[-1]), 3, 32, 32))
    images = np.concatenate(planes).transpose(0, 2, 3, 1)
    ids = np.concatenate(labels)
    return Images.of_arrays({name: images[ids == label] for label, name in enumerate(names)})


# miniImageNet: 100 classes of 600 images of ImageNet at 84×84. O. Vinyals et al.: Matching networks
# for one shot learning. NIPS 2016, with the classes of S. Ravi, H. Larochelle: Optimization as a
# model for few-shot learning. ICLR 2017. tieredImageNet: 608 classes, split by what they are kinds
# of. M. Ren et al.: Meta-learning for semi-supervised few-shot classification. ICLR 2018.
# The images may not be passed on, so there is no download. Both are read from image files, or from
# pickles: all of miniImageNet's at once (1.3 GB), of tieredImageNet's one split (6 GB) at a time.

IMAGENET_FORMAT = ImageFormat(side=84, channels=3)
MINI_PICKLE = "mini-imagenet-cache-{}.pkl"
TIERED_CLASSES: dict[Split, int] = {"train": 351, "validation": 97, "test": 160}
TIERED_IMAGES, TIERED_LABELS = "{}_images_png.pkl", "{}_labels.pkl"
SYNSET = re.compile(r"n\d{8}")  # a WordNet id


def _open_imagenet(source: Path) -> AbstractContextManager[Tree]:
    return open_tree(source.parent if source.suffix == ".pkl" else source)


def _synset(path: PurePosixPath) -> str:
    """Return the synset that the folder of an image file, or the file itself, is named by."""
    folder = path.parent.name
    return folder if SYNSET.fullmatch(folder) else path.name[:9]


def _splits_with(pickle: str, tree: Tree, allow_missing: bool) -> list[Split]:
    """Return the splits to read if there are such pickles, else none."""
    there = [split for split in SPLITS if pickle.format(SHORT_NAMES[split]) in tree.file_names]
    return there if allow_missing or not there else list(SPLITS)


def _load_mini(tree: Tree, allow_missing: bool) -> Images | None:
    what = "a miniImageNet cache, which has image_data uint8 [n, 84, 84, 3] and class_dict"
    images: dict[str, Pixels] = {}
    for split in _splits_with(MINI_PICKLE, tree, allow_missing):
        with tree.pickled(MINI_PICKLE.format(SHORT_NAMES[split]), what) as cache:
            pixels = np.asarray(cache["image_data"])
            if pixels.dtype != np.uint8 or pixels.shape[1:] != IMAGENET_FORMAT.shape:
                raise ValueError(f"image_data is {pixels.dtype} {pixels.shape}")
            for label, ids in cache["class_dict"].items():
                images[label] = pixels[np.asarray(ids, np.int64)]
    return Images.of_arrays(images) if images else None


def _load_tiered(tree: Tree, allow_missing: bool) -> Images | None:
    """Read the labels of all splits now, and the images of one split after another later."""
    splits = _splits_with(TIERED_IMAGES, tree, allow_missing)
    positions = {split: _load_tiered_labels(tree, split) for split in splits}
    lists = {split: [*positions.get(split, ())] for split in SPLITS}
    for split, count in TIERED_CLASSES.items():  # what is not there counts as missing
        numbers = range(len(lists[split]) + 1, count + 1)
        lists[split] += [f"{split} number {number}" for number in numbers]

    def batches(_: list[str]) -> Iterator[Pixels]:
        for split, classes in positions.items():
            yield from _decode_tiered(tree, split, np.concatenate([*classes.values()]).tolist())

    sizes = {name: len(ids) for classes in positions.values() for name, ids in classes.items()}
    return Images(sizes, batches, lists) if sizes else None


def _load_tiered_labels(tree: Tree, split: Split) -> dict[str, Ids]:
    """Return the positions of every class of one split."""
    what = "the labels of tieredImageNet, label_specific and label_specific_str"
    with tree.pickled(TIERED_LABELS.format(SHORT_NAMES[split]), what) as table:
        labels = np.asarray(table["label_specific"], np.int64)
        words = [text(word) for word in table["label_specific_str"]]
        return {
            f"{split} {label:03} {words[label]}": np.flatnonzero(labels == label)
            for label in np.unique(labels)  # part of the name: two classes are called crane
        }


def _decode_tiered(tree: Tree, split: Split, order: list[int]) -> Iterator[Pixels]:
    """Yield the images of a pickled list of PNGs in this order, class after class."""
    name = TIERED_IMAGES.format(SHORT_NAMES[split])
    with tree.pickled(name, f"a list of {len(order):,} PNGs, one for each label") as encoded:
        if len(encoded) != len(order):
            raise ValueError(f"it has {len(encoded):,}")
        yield from decode_all(
            order,
            lambda position: np.asarray(encoded[position], np.uint8).tobytes(),
            IMAGENET_FORMAT,
            label=lambda position: f"{tree.location}/{name}, image {position}",
        )


_OMNIGLOT_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
_OMNIGLOT = PublishedDataset(
    title="Omniglot, 1100/100/423 characters in 4 rotations (split of the paper)",
    needs="images_background.zip and images_evaluation.zip, or the folders inside them",
    form=ImageFormat(side=28, channels=1, ink=True),
    lists=paper_split,
    class_size=20,
    normalization=PixelNormalization(mean=(0.0839,), std=(0.2393,)),
    open=_open_omniglot,
    class_of=lambda path: "/".join(path.parts[-3:-1]),  # …/<alphabet>/<character>/<file>
    has_rotations=True,
    downloads=(
        PublicFile(f"{_OMNIGLOT_URL}/images_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
        PublicFile(f"{_OMNIGLOT_URL}/images_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
    ),
)
_MINI_IMAGENET = PublishedDataset(
    title="miniImageNet, 64/16/20 classes (Ravi & Larochelle)",
    needs="the folder of mini-imagenet-cache-{train,val,test}.pkl, or of the images",
    form=IMAGENET_FORMAT,
    lists=partial(published_split, "mini_imagenet"),
    class_size=600,
    normalization=PixelNormalization(mean=(0.4721, 0.4533, 0.4100), std=(0.2772, 0.2678, 0.2845)),
    open=_open_imagenet,
    class_of=_synset,
    load_pickles=_load_mini,
    augmentation=natural(crop_padding=8),
)
_CIFAR_100_URL = f"https://www.cs.toronto.edu/~kriz/{CIFAR_ARCHIVE}"

CATALOG: dict[str, PublishedDataset] = {
    "omniglot": _OMNIGLOT,
    "omniglot-vinyals": replace(
        _OMNIGLOT,
        title="Omniglot, 1028/172/423 characters in 4 rotations (split of Vinyals et al.)",
        lists=partial(published_split, "omniglot_vinyals"),
    ),
    "cifar-fs": PublishedDataset(
        title="CIFAR-FS, 64/16/20 classes (Bertinetto et al.)",
        needs=f"the CIFAR-FS zip cifar100.zip or {CIFAR_ARCHIVE}, or either unpacked",
        form=ImageFormat(side=32, channels=3),
        lists=partial(published_split, "cifar_fs"),
        class_size=600,
        normalization=PixelNormalization(
            mean=(0.5088, 0.4917, 0.4437), std=(0.2674, 0.2564, 0.2772)
        ),
        open=_open_cifar,
        class_of=lambda path: path.parent.name,
        load_pickles=_load_cifar,
        augmentation=natural(crop_padding=4),
        downloads=(PublicFile(_CIFAR_100_URL, "eb9058c3a382ffc7106e4002c42a8d85"),),
    ),
    "mini-imagenet": _MINI_IMAGENET,
    "tiered-imagenet": replace(
        _MINI_IMAGENET,
        title="tieredImageNet, 351/97/160 classes (Ren et al.)",
        needs="the folder of {train,val,test}_images_png.pkl and *_labels.pkl, or ImageNet's "
        "folder of synsets",
        lists=partial(published_split, "tiered_imagenet"),
        class_size=None,
        load_pickles=_load_tiered,
    ),
}
