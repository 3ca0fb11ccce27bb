"""miniImageNet: 100 classes of ImageNet, 600 images each at 84×84, split 64 / 16 / 20.

O. Vinyals et al.: Matching networks for one shot learning. NIPS 2016, with the classes of S. Ravi,
H. Larochelle: Optimization as a model for few-shot learning. ICLR 2017.

The images may not be passed on, so there is no download. Two forms that people have are read: the
image files, by the names in ``train.csv``, ``val.csv`` and ``test.csv`` where those are present and
by class otherwise; and the three ``mini-imagenet-cache-*.pkl``.
"""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from vsm.data import pickles
from vsm.data.archives import Tree, open_tree, read_file
from vsm.data.class_lists import ClassLists, published
from vsm.data.dataset import SPLITS, Split
from vsm.data.images import ImageFormat, is_image_name
from vsm.data.preparation import (
    Preparation,
    completeness,
    from_files,
    in_classes,
    keep_present,
)
from vsm.errors import DataError

FORMAT = ImageFormat(side=84, channels=3)
IMAGES = 600  # of a class
SYNSET_LENGTH = 9  # characters of a WordNet id such as n01532829
SHORT_NAMES: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}


@contextmanager
def read(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read miniImageNet from a folder or archive of images, or from the folder of the pickles."""
    folder = source.parent if source.suffix == ".pkl" else source
    caches = {s: folder / f"mini-imagenet-cache-{SHORT_NAMES[s]}.pkl" for s in SPLITS}
    if any(path.is_file() for path in caches.values()):
        yield _from_caches(folder, caches, allow_missing)
        return
    with open_tree(source) as tree:
        yield _from_images(tree, allow_missing)


def _from_images(tree: Tree, allow_missing: bool) -> Preparation:
    images = [name for name in tree.names if is_image_name(name)]
    if not images:
        raise DataError(
            f"mini-imagenet: {tree.location} holds no images and no mini-imagenet-cache-*.pkl; "
            "pass the folder that does with --from"
        )
    lists = published("mini_imagenet")
    tables = {PurePosixPath(name).name: name for name in tree.names if name.endswith(".csv")}
    if any(f"{short}.csv" in tables for short in SHORT_NAMES.values()):
        files = _by_tables(tree, images, tables, lists, allow_missing)
    else:
        files = _by_class(tree, images, lists)
    sizes = {name: len(found) for name, found in files.items()}
    lists = keep_present(lists, sizes, IMAGES, allow_missing)
    chosen = {name: files[name] for names in lists.values() for name in names}
    found = sum(map(len, chosen.values()))
    return from_files(tree, chosen, lists, FORMAT, _origin(tree.location, found))


def _by_tables(
    tree: Tree,
    images: list[str],
    tables: dict[str, str],
    lists: ClassLists,
    allow_missing: bool,
) -> dict[str, list[str]]:
    """Return the files of every class by the rows of the CSVs; suffixes need not agree."""
    by_stem = {PurePosixPath(name).stem: name for name in images}
    files: dict[str, list[str]] = {}
    missing: list[str] = []
    num_rows = 0
    for split, short in SHORT_NAMES.items():
        if f"{short}.csv" not in tables:
            raise DataError(
                f"mini-imagenet: {short}.csv is missing in {tree.location}, though other CSVs are "
                "there; add it, or remove them all to go by class"
            )
        for name, label in _rows(tree, tables[f"{short}.csv"], set(lists[split]), split):
            num_rows += 1
            if found := by_stem.get(PurePosixPath(name).stem):
                files.setdefault(label, []).append(found)
            else:
                missing.append(name)
    if missing and not allow_missing:
        raise DataError(
            f"mini-imagenet: {len(missing):,} of the {num_rows:,} images named in the CSVs are "
            f"missing in {tree.location}, first {missing[0]}; add them, or pass --allow-missing "
            "to go without them"
        )
    return files


def _rows(tree: Tree, table: str, classes: set[str], split: Split) -> Iterator[tuple[str, str]]:
    """Yield (filename, label) of each row of a CSV, checked against the published classes."""
    text = read_file(tree, table).decode("utf-8-sig", errors="replace")
    for row in (reader := csv.DictReader(text.splitlines())):
        name, label = row.get("filename"), row.get("label")
        if not name or label not in classes:
            raise DataError(
                f"{tree.location}: {table}, line {reader.line_num}: expected filename,label with a "
                f"{split} class of Ravi & Larochelle, got {name},{label}; restore the published CSV"
            )
        yield name, label


def _by_class(tree: Tree, images: list[str], lists: ClassLists) -> dict[str, list[str]]:
    """Return the files of every class by the name of their folder, or by how their name begins."""
    files: dict[str, list[str]] = {name: [] for names in lists.values() for name in names}
    for name in images:
        path = PurePosixPath(name)
        label = path.parent.name if path.parent.name in files else path.name[:SYNSET_LENGTH]
        if label in files:
            files[label].append(name)
    for label, found in files.items():
        if len(found) > IMAGES:
            raise DataError(
                f"mini-imagenet: class {label} has {len(found):,} images in {tree.location}, more "
                f"than {IMAGES}; add train.csv, val.csv and test.csv, which say which of them count"
            )
    return files


def _from_caches(folder: Path, caches: dict[Split, Path], allow_missing: bool) -> Preparation:
    """Read the pickles twice, once for sizes and once for pixels, and hold one at a time."""
    positions: dict[str, npt.NDArray[np.int64]] = {}
    lists = published("mini_imagenet")
    for split, path in caches.items():
        if path.is_file() or not allow_missing:
            found = _load_cache(path)[1]
            positions |= {name: found[name] for name in lists[split] if name in found}
    sizes = {name: len(found) for name, found in positions.items()}
    lists = keep_present(lists, sizes, IMAGES, allow_missing)

    def batches() -> Iterator[npt.NDArray[np.uint8]]:
        for split, path in caches.items():
            if lists[split]:
                yield from in_classes(_load_cache(path)[0], (positions[n] for n in lists[split]))

    return Preparation(
        image_shape=FORMAT.shape,
        class_sizes={name: sizes[name] for names in lists.values() for name in names},
        class_lists=lists,
        batches=batches(),
        origin=_origin(folder, sum(sizes[name] for names in lists.values() for name in names)),
    )


def _load_cache(path: Path) -> tuple[npt.NDArray[np.uint8], dict[str, npt.NDArray[np.int64]]]:
    """Return the images ``[n, 84, 84, 3]`` of a pickle and each class's positions in them."""
    cache = pickles.text_keys(pickles.load_path(path), str(path))
    try:
        images = np.asarray(cache["image_data"])
        classes = pickles.text_keys(cache["class_dict"], str(path))
        positions = {name: np.asarray(found, np.int64) for name, found in classes.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong_layout(path, repr(error)) from error
    if images.dtype != np.uint8 or images.shape[1:] != FORMAT.shape:
        raise _wrong_layout(path, f"image_data is {images.dtype} {images.shape}")
    for name, found in positions.items():
        if len(found) and not 0 <= found.min() <= found.max() < len(images):
            raise _wrong_layout(path, f"class {name} points past the {len(images)} images")
    return images, positions


def _wrong_layout(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: not a miniImageNet cache, which has image_data uint8 [n, 84, 84, 3] and "
        f"class_dict ({reason}); fetch or copy it again"
    )


def _origin(location: Path, found: int) -> str:
    return f"{location.resolve()}: {found:,} images{completeness(found, 100 * IMAGES)}"
