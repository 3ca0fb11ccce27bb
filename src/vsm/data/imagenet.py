"""miniImageNet and tieredImageNet: classes of ImageNet at 84×84.

- miniImageNet has 100 classes of 600 images. O. Vinyals et al.: Matching networks for one shot
  learning. NIPS 2016, with the classes of S. Ravi, H. Larochelle: Optimization as a model for
  few-shot learning. ICLR 2017.
- tieredImageNet has 608 classes, split by what they are kinds of. M. Ren et al.: Meta-learning for
  semi-supervised few-shot classification. ICLR 2018.

The images may not be passed on, so there is no download. Both are read from image files, and from
the pickles that people have; those of one split are held in memory at a time (about 6 GB for
tieredImageNet's train).
"""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np

from vsm.data import pickles
from vsm.data.archives import Tree, open_tree
from vsm.data.dataset import Ids, Pixels, Split
from vsm.data.images import ImageFormat, decode_all, is_image_name
from vsm.data.preparation import ClassLists, Layout, Preparation, flat, origin_of, published
from vsm.errors import DataError

FORMAT = ImageFormat(side=84, channels=3)
MINI_CLASS_SIZE = 600  # images
TIERED_CLASSES: dict[Split, int] = {"train": 351, "validation": 97, "test": 160}
SYNSET_LENGTH = 9  # characters of a WordNet id such as n01532829
SHORT_NAMES: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}


@contextmanager
def read_mini(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read miniImageNet from a folder or archive of images, or from the folder of the pickles."""
    layout = Layout(published("mini_imagenet"), MINI_CLASS_SIZE, FORMAT, allow_missing)
    caches = _pickles(source, "mini-imagenet-cache-{}.pkl")
    if any(path.is_file() for path in caches.values()):
        yield _from_caches(layout, caches)
        return
    with open_tree(source) as tree:
        yield _from_images(layout, tree)


@contextmanager
def read_tiered(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read tieredImageNet from the folder of the pickles, or from an ImageNet folder or archive."""
    images = _pickles(source, "{}_images_png.pkl")
    if any(path.is_file() for path in images.values()):
        yield _from_pngs(images, _pickles(source, "{}_labels.pkl"), allow_missing)
        return
    with open_tree(source) as tree:
        lists, files = published("tiered_imagenet"), tree.images_by_class()
        if not files.keys() & flat(lists):
            raise DataError(
                f"tiered-imagenet: {tree.location} holds neither *_images_png.pkl nor images in "
                "folders named by synset, such as n01530575; pass the folder that does with --from"
            )
        yield Layout(lists, None, FORMAT, allow_missing).from_files(tree, files)


def _pickles(source: Path, name: str) -> dict[Split, Path]:
    """Return where the pickles of each split are, if they are there."""
    folder = source.parent if source.suffix == ".pkl" else source
    return {split: folder / name.format(short) for split, short in SHORT_NAMES.items()}


def _from_images(layout: Layout, tree: Tree) -> Preparation:
    """Prepare what the CSVs of miniImageNet name, if they are there, or all images by class."""
    images = [name for name in tree.names if is_image_name(name)]
    if not images:
        raise DataError(
            f"mini-imagenet: {tree.location} holds no images and no mini-imagenet-cache-*.pkl; "
            "pass the folder that does with --from"
        )
    tables = {PurePosixPath(name).name: name for name in tree.names if name.endswith(".csv")}
    if any(f"{short}.csv" in tables for short in SHORT_NAMES.values()):
        return layout.from_files(tree, _by_tables(layout, tree, images, tables))
    return layout.from_files(tree, _by_class(layout, tree))


def _by_tables(
    layout: Layout, tree: Tree, images: list[str], tables: dict[str, str]
) -> dict[str, list[str]]:
    """Return the files of every class by the rows of the CSVs; suffixes need not agree."""
    by_stem = {PurePosixPath(name).stem: name for name in images}
    files: dict[str, list[str]] = {}
    found, missing = 0, []
    for split, short in SHORT_NAMES.items():
        if f"{short}.csv" not in tables:
            raise DataError(
                f"mini-imagenet: {short}.csv is missing in {tree.location}, though other CSVs are "
                "there; add it, or remove them all to go by class"
            )
        table, classes = tables[f"{short}.csv"], set(layout.lists[split])
        text = tree.read(table).decode("utf-8-sig", errors="replace")
        for row in (reader := csv.DictReader(text.splitlines())):
            name, label = row.get("filename"), row.get("label")
            if not name or label not in classes:
                raise DataError(
                    f"{tree.location}: {table}, line {reader.line_num}: expected filename,label "
                    f"with a {split} class of Ravi & Larochelle, got {name},{label}; restore the "
                    "published CSV"
                )
            if stored := by_stem.get(PurePosixPath(name).stem):
                files.setdefault(label, []).append(stored)
                found += 1
            else:
                missing.append(name)
    if missing and not layout.allow_missing:
        raise DataError(
            f"mini-imagenet: {len(missing):,} of the {found + len(missing):,} images named in the "
            f"CSVs are missing in {tree.location}, first {missing[0]}; add them, or pass "
            "--allow-missing to go without them"
        )
    return files


def _by_class(layout: Layout, tree: Tree) -> dict[str, list[str]]:
    """Return the files of every class by the name of their folder, or by how their name begins."""
    classes = set(flat(layout.lists))

    def class_of(path: PurePosixPath) -> str:
        return path.parent.name if path.parent.name in classes else path.name[:SYNSET_LENGTH]

    files = tree.images_by_class(class_of)
    for label in flat(layout.lists):
        if (count := len(files.get(label, ()))) > MINI_CLASS_SIZE:
            raise DataError(
                f"mini-imagenet: class {label} has {count:,} images in {tree.location}, more than "
                f"{MINI_CLASS_SIZE}; add train.csv, val.csv and test.csv, which say which of them "
                "count"
            )
    return files


def _from_caches(layout: Layout, caches: dict[Split, Path]) -> Preparation:
    """Read the pickles twice, once for sizes and once for pixels, and hold one at a time."""
    positions: dict[str, Ids] = {}
    for split, path in caches.items():
        if path.is_file() or not layout.allow_missing:
            found = _load_cache(path)[1]
            positions |= {name: found[name] for name in layout.lists[split] if name in found}

    def batches(present: ClassLists) -> Iterator[Pixels]:
        for split, names in present.items():
            if names:
                images, _ = _load_cache(caches[split])
                yield from (images[positions[name]] for name in names)

    folder = caches["train"].parent
    sizes = {name: len(found) for name, found in positions.items()}
    return layout.prepare(folder, sizes, batches)


def _load_cache(path: Path) -> tuple[Pixels, dict[str, Ids]]:
    """Return the images ``[n, 84, 84, 3]`` of a pickle and each class's positions in them."""
    layout = "a miniImageNet cache, which has image_data uint8 [n, 84, 84, 3] and class_dict"
    cache = pickles.load_path(path)
    with pickles.expecting(layout, str(path)):
        images = np.asarray(cache["image_data"])
        classes = cache["class_dict"].items()
        positions = {name: np.asarray(found, np.int64) for name, found in classes}
        if images.dtype != np.uint8 or images.shape[1:] != FORMAT.shape:
            raise ValueError(f"image_data is {images.dtype} {images.shape}")
        for name, found in positions.items():
            if len(found) and not 0 <= found.min() <= found.max() < len(images):
                raise ValueError(f"class {name} points past the {len(images)} images")
    return images, positions


def _from_pngs(
    images: dict[Split, Path], labels: dict[Split, Path], allow_missing: bool
) -> Preparation:
    """Read the labels of all splits now, and the images of one split after another later."""
    positions: dict[Split, dict[str, Ids]] = {}
    for split, path in labels.items():
        if path.is_file() or not allow_missing:
            positions[split] = _load_labels(path, split)
            if len(positions[split]) < TIERED_CLASSES[split] and not allow_missing:
                raise DataError(
                    f"{path}: {len(positions[split])} of {TIERED_CLASSES[split]} {split} classes; "
                    "fetch it again, or pass --allow-missing to go without them"
                )
    sizes = {name: len(found) for classes in positions.values() for name, found in classes.items()}
    what, expected = f"{sum(sizes.values()):,} images", sum(TIERED_CLASSES.values())
    return Preparation(
        image_shape=FORMAT.shape,
        class_lists={split: list(classes) for split, classes in positions.items()},
        class_sizes=sizes,
        batches=chain.from_iterable(
            _decode_split(images[split], np.concatenate(list(classes.values())).tolist())
            for split, classes in positions.items()
        ),
        origin=origin_of(images["train"].parent, what, len(sizes), expected, "classes"),
    )


def _load_labels(path: Path, split: Split) -> dict[str, Ids]:
    """Return the positions of every class of one split.

    Two classes may share an English word (crane), so names begin with split and label.
    """
    table = pickles.load_path(path)
    layout = "the labels of tieredImageNet, label_specific and label_specific_str"
    with pickles.expecting(layout, str(path)):
        labels = np.asarray(table["label_specific"], np.int64)
        words = [pickles.text(word) for word in table["label_specific_str"]]
        return {
            f"{split} {label:03} {words[label]}": np.flatnonzero(labels == label)
            for label in np.unique(labels)
        }


def _decode_split(path: Path, order: list[int]) -> Iterator[Pixels]:
    """Yield the images of a pickled list of PNGs in this order, class after class."""
    encoded = pickles.load_path(path)
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
