"""Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings each.

B. M. Lake, R. Salakhutdinov, J. B. Tenenbaum: Human-level concept learning through probabilistic
program induction. Science, 2015.

Drawings are reduced from 105×105 to 28×28 with a Lanczos filter, ink is 255 and paper 0. As in
Vinyals et al. (2016) and most work since, a character turned by 90°, 180° and 270° is a new class,
in all three splits; the four stay in one split. Turned drawings are stored, not computed when
loaded: all of it is 102 MB, and every reader of the prepared file stays a plain lookup.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from vsm.data.archives import Tree, open_tree
from vsm.data.dataset import Pixels
from vsm.data.images import ImageFormat
from vsm.data.preparation import ClassLists, Layout, Preparation, flat, origin_of, published, seeded
from vsm.errors import DataError

PARTS = ("images_background", "images_evaluation")
FORMAT = ImageFormat(side=28, channels=1, ink=True)
CLASS_SIZE = 20  # drawings
TURNS = ("", "@90", "@180", "@270")  # suffixes of class names, counter-clockwise


def vinyals_split() -> ClassLists:
    """Return the 1,028 / 172 / 423 characters of Vinyals et al."""
    return published("omniglot_vinyals")


def paper_split() -> ClassLists:
    """Return 1,100 / 100 / 423 characters, drawn once from a fixed seed."""
    return seeded(flat(vinyals_split()), (1100, 100, 423), seed=0)


@contextmanager
def read(
    source: Path, allow_missing: bool, split: Callable[[], ClassLists] = paper_split
) -> Iterator[Preparation]:
    """Read the official zips or folders at ``source``."""
    with _both_parts(source) as tree:
        # …/<alphabet>/<character>/<file>
        files = tree.images_by_class(lambda path: "/".join(path.parts[-3:-1]))
        lists = split()
        upright = Layout(lists, CLASS_SIZE, FORMAT, allow_missing).from_files(tree, files)
        sizes = upright.class_sizes
        drawings = sum(sizes.values())
        what = f"{len(sizes):,} characters, {drawings:,} drawings, each in 4 rotations"
        yield Preparation(
            image_shape=FORMAT.shape,
            class_lists={
                split: [name + turn for name in names for turn in TURNS]
                for split, names in upright.class_lists.items()
            },
            class_sizes={name + turn: size for name, size in sizes.items() for turn in TURNS},
            batches=_turned(upright),
            origin=origin_of(source, what, drawings, CLASS_SIZE * len(flat(lists))),
        )


@contextmanager
def _both_parts(source: Path) -> Iterator[Tree]:
    """Open the folders or zips of both parts, in ``source`` or beside it, as one tree."""
    folder = source if source.is_dir() and source.name not in PARTS else source.parent
    with ExitStack() as stack:
        trees = [stack.enter_context(open_tree(_find(folder, part))) for part in PARTS]
        found = {f"{t.location.name}/{name}": (t, name) for t in trees for name in t.names}

        def contents(name: str) -> bytes:
            tree, inner = found[name]
            return tree.read(inner)

        yield Tree(folder, list(found), all(tree.in_any_order for tree in trees), contents)


def _find(folder: Path, part: str) -> Path:
    for candidate in (folder / part, folder / f"{part}.zip"):
        if candidate.exists():
            return candidate
    raise DataError(
        f"omniglot: found neither {part}.zip nor a folder {part} in {folder}; pass the folder "
        "that holds both with --from, or use --download"
    )


def _turned(upright: Preparation) -> Iterator[Pixels]:
    """Yield each character's drawings ``[n, 28, 28, 1]``, then turned by 90°, 180° and 270°."""
    drawings = np.concatenate(list(upright.batches))  # all of them are 25 MB
    for character in np.split(drawings, np.cumsum(list(upright.class_sizes.values()))[:-1]):
        for turns in range(len(TURNS)):
            yield np.rot90(character, turns, axes=(1, 2))
