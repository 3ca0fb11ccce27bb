"""tieredImageNet: 608 classes of ImageNet at 84×84, split 351 / 97 / 160 by what they are kinds of.

M. Ren et al.: Meta-learning for semi-supervised few-shot classification. ICLR 2018.

The images may not be passed on, so there is no download. Two forms that people have are read: Ren
et al.'s ``{train,val,test}_images_png.pkl`` with ``*_labels.pkl``, and an ImageNet folder with one
folder a synset. The pickles of one split are held in memory at a time (about 6 GB for train).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from vsm.data import pickles
from vsm.data.archives import Tree, open_tree
from vsm.data.class_lists import ClassLists, published
from vsm.data.dataset import SPLITS, Split
from vsm.data.images import ImageFormat, decode_all, is_image_name
from vsm.data.preparation import Preparation, from_files, keep_present
from vsm.errors import DataError

FORMAT = ImageFormat(side=84, channels=3)
SHORT_NAMES: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}
NUM_CLASSES: dict[Split, int] = {"train": 351, "validation": 97, "test": 160}


@contextmanager
def read(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read tieredImageNet from the folder of the pickles, or from an ImageNet folder or archive."""
    folder = source.parent if source.suffix == ".pkl" else source
    if any((folder / f"{short}_images_png.pkl").is_file() for short in SHORT_NAMES.values()):
        yield _from_pickles(folder, allow_missing)
        return
    with open_tree(source) as tree:
        yield _from_images(tree, allow_missing)


def _from_images(tree: Tree, allow_missing: bool) -> Preparation:
    lists = published("tiered_imagenet")
    files: dict[str, list[str]] = {name: [] for names in lists.values() for name in names}
    for name in filter(is_image_name, tree.names):
        synset = PurePosixPath(name).parent.name
        if synset in files:
            files[synset].append(name)
    sizes = {name: len(found) for name, found in files.items()}
    if not any(sizes.values()):
        raise DataError(
            f"tiered-imagenet: {tree.location} holds neither *_images_png.pkl nor images in "
            "folders named by synset, such as n01530575; pass the folder that does with --from"
        )
    # ImageNet's classes differ in size, so only whole classes can be known to be missing.
    lists = keep_present(lists, sizes, 1, allow_missing, unit="classes")
    chosen = {name: files[name] for names in lists.values() for name in names}
    return from_files(tree, chosen, lists, FORMAT, _origin(tree.location, sizes, lists))


def _from_pickles(folder: Path, allow_missing: bool) -> Preparation:
    """Read the labels of all splits now, and the images of one split after another later."""
    positions: dict[Split, dict[str, npt.NDArray[np.int64]]] = {}
    for split, short in SHORT_NAMES.items():
        path = folder / f"{short}_labels.pkl"
        if path.is_file() or not allow_missing:
            positions[split] = _load_labels(path, split)
            if len(positions[split]) < NUM_CLASSES[split] and not allow_missing:
                raise DataError(
                    f"{path}: {len(positions[split])} of {NUM_CLASSES[split]} {split} classes; "
                    "fetch it again, or pass --allow-missing to go without them"
                )
    lists: ClassLists = {split: list(positions.get(split, {})) for split in SPLITS}
    sizes = {name: len(found) for classes in positions.values() for name, found in classes.items()}

    return Preparation(
        image_shape=FORMAT.shape,
        class_sizes=sizes,
        class_lists=lists,
        batches=chain.from_iterable(
            _decode_split(folder / f"{SHORT_NAMES[split]}_images_png.pkl", list(classes.values()))
            for split, classes in positions.items()
        ),
        origin=_origin(folder, sizes, lists),
    )


def _load_labels(path: Path, split: Split) -> dict[str, npt.NDArray[np.int64]]:
    """Return the positions of every class of one split.

    Two classes may share an English word (crane), so names begin with split and label.
    """
    table = pickles.text_keys(pickles.load_path(path), str(path))
    try:
        labels = np.asarray(table["label_specific"], np.int64)
        words = [pickles.text(word) for word in table["label_specific_str"]]
        return {
            f"{split} {label:03} {words[label]}": np.flatnonzero(labels == label)
            for label in np.unique(labels)
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not the labels of tieredImageNet, label_specific and label_specific_str "
            f"({error!r}); fetch or copy it again"
        ) from error


def _decode_split(
    path: Path, classes: list[npt.NDArray[np.int64]]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the images of a pickled list of PNGs, class after class."""
    encoded = pickles.load_path(path)
    order = np.concatenate(classes).tolist()
    if not isinstance(encoded, list) or len(encoded) != len(order):
        raise DataError(
            f"{path}: expected a list of {len(order):,} PNGs, one for each label; "
            "fetch or copy it and its labels again"
        )
    yield from decode_all(
        order,
        lambda position: np.asarray(encoded[position], np.uint8).tobytes(),
        FORMAT,
        label=lambda position: f"{path}, image {position}",
    )


def _origin(location: Path, sizes: Mapping[str, int], lists: ClassLists) -> str:
    found = {split: len(names) for split, names in lists.items()}
    missing = "" if found == NUM_CLASSES else f"; INCOMPLETE, {sum(found.values())} of 608 classes"
    total = sum(sizes[name] for names in lists.values() for name in names)
    return f"{location.resolve()}: {total:,} images{missing}"
