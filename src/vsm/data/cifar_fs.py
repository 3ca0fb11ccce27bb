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
from typing import Any

import numpy as np

from vsm.data import pickles
from vsm.data.archives import Tree, open_tree
from vsm.data.images import ImageFormat
from vsm.data.preparation import Layout, Preparation, flat, published
from vsm.errors import DataError

FORMAT = ImageFormat(side=32, channels=3)
ARCHIVE = "cifar-100-python.tar.gz"
PICKLES = ("train", "test")  # both are dealt to classes; the split is by class


@contextmanager
def read(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read CIFAR-FS or CIFAR-100 from an archive or its unpacked folder."""
    if source.is_dir():
        for archive in (source / "cifar100.zip", source / ARCHIVE):
            source = archive if archive.is_file() else source
    layout = Layout(published("cifar_fs"), 600, FORMAT, allow_missing)
    with open_tree(source) as tree:
        members = {PurePosixPath(name).name: name for name in tree.names}
        if {"meta", *PICKLES} <= members.keys():
            yield _from_pickles(layout, tree, members)
            return
        files = tree.images_by_class()
        if not files:
            raise DataError(
                f"cifar-fs: {tree.location} holds neither <class>/*.png nor the pickles of "
                f"{ARCHIVE}; pass one of these with --from, or use --download"
            )
        yield layout.from_files(tree, files)


def _from_pickles(layout: Layout, tree: Tree, members: dict[str, str]) -> Preparation:
    def load(key: str) -> Any:
        return pickles.load(io.BytesIO(tree.read(members[key])), f"{tree.location}: {key}")

    with pickles.expecting("the layout of CIFAR-100", f"{tree.location}: {members['meta']}"):
        names = [pickles.text(name) for name in load("meta")["fine_label_names"]]
        parts = [load(key) for key in PICKLES]
        labels = np.concatenate([np.asarray(part["fine_labels"], np.int64) for part in parts])
        planes = np.concatenate([np.asarray(part["data"], np.uint8) for part in parts])
        images = planes.reshape(len(labels), 3, FORMAT.side, FORMAT.side).transpose(0, 2, 3, 1)
    positions = {name: np.flatnonzero(labels == label) for label, name in enumerate(names)}
    return layout.prepare(
        tree.location,
        {name: len(found) for name, found in positions.items()},
        lambda present: (images[positions[name]] for name in flat(present)),
    )
