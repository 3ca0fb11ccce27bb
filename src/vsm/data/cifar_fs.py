"""CIFAR-FS: the 100 classes of CIFAR-100, 600 images each, split 64 / 16 / 20.

L. Bertinetto, J. F. Henriques, P. H. S. Torr, A. Vedaldi: Meta-learning with differentiable
closed-form solvers. ICLR 2019. Images: A. Krizhevsky, 2009.

Two sources hold the same pictures: the CIFAR-FS zip (``cifar100/data/<class>/*.png``), and the
CIFAR-100 archive for Python, which can be downloaded. Either may be unpacked.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from vsm.data import pickles
from vsm.data.archives import Tree, open_tree, read_file
from vsm.data.class_lists import published
from vsm.data.images import ImageFormat, is_image_name
from vsm.data.preparation import (
    Preparation,
    completeness,
    from_files,
    in_classes,
    keep_present,
)
from vsm.errors import DataError

FORMAT = ImageFormat(side=32, channels=3)
IMAGES = 600  # of a class
ARCHIVE = "cifar-100-python.tar.gz"
PICKLES = ("train", "test")  # both are dealt to classes; the split is by class


@contextmanager
def read(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read CIFAR-FS or CIFAR-100 from an archive or its unpacked folder."""
    if source.is_dir():
        for archive in (source / "cifar100.zip", source / ARCHIVE):
            source = archive if archive.is_file() else source
    with open_tree(source) as tree:
        pickled = {PurePosixPath(name).name: name for name in tree.names}
        if {"meta", *PICKLES} <= pickled.keys():
            yield _from_pickles(tree, pickled, allow_missing)
        else:
            yield _from_images(tree, allow_missing)


def _from_images(tree: Tree, allow_missing: bool) -> Preparation:
    files: dict[str, list[str]] = {}
    for name in filter(is_image_name, tree.names):
        files.setdefault(PurePosixPath(name).parent.name, []).append(name)
    if not files:
        raise DataError(
            f"cifar-fs: {tree.location} holds neither <class>/*.png nor the pickles of {ARCHIVE}; "
            "pass one of these with --from, or use --download"
        )
    sizes = {name: len(found) for name, found in files.items()}
    lists = keep_present(published("cifar_fs"), sizes, IMAGES, allow_missing)
    chosen = {name: files[name] for names in lists.values() for name in names}
    return from_files(tree, chosen, lists, FORMAT, _origin(tree, sum(map(len, chosen.values()))))


def _from_pickles(tree: Tree, members: dict[str, str], allow_missing: bool) -> Preparation:
    names, labels, images = _load_pickles(tree, members)
    positions = {name: np.flatnonzero(labels == label) for label, name in enumerate(names)}
    sizes = {name: len(found) for name, found in positions.items()}
    lists = keep_present(published("cifar_fs"), sizes, IMAGES, allow_missing)
    chosen = [name for names in lists.values() for name in names]
    return Preparation(
        image_shape=FORMAT.shape,
        class_sizes={name: sizes[name] for name in chosen},
        class_lists=lists,
        batches=in_classes(images, (positions[name] for name in chosen)),
        origin=_origin(tree, sum(sizes[name] for name in chosen)),
    )


def _load_pickles(
    tree: Tree, members: dict[str, str]
) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return class names, labels ``[n]`` and images ``[n, 32, 32, 3]`` of both pickles."""
    described = f"{tree.location}: {members['meta']}"
    loaded = {
        key: pickles.text_keys(
            pickles.load(io.BytesIO(read_file(tree, members[key])), f"{tree.location}: {key}"),
            f"{tree.location}: {key}",
        )
        for key in ("meta", *PICKLES)
    }
    try:
        names = [pickles.text(name) for name in loaded["meta"]["fine_label_names"]]
        labels = np.concatenate([np.asarray(loaded[k]["fine_labels"], np.int64) for k in PICKLES])
        planes = np.concatenate([np.asarray(loaded[k]["data"], np.uint8) for k in PICKLES])
        images = planes.reshape(len(labels), 3, FORMAT.side, FORMAT.side).transpose(0, 2, 3, 1)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{described}: not the layout of CIFAR-100 ({error!r}); fetch {ARCHIVE} again"
        ) from error
    return names, labels, images


def _origin(tree: Tree, found: int) -> str:
    return f"{tree.location.resolve()}: {found:,} images{completeness(found, 100 * IMAGES)}"
