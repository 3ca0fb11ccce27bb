"""Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings each.

B. M. Lake, R. Salakhutdinov, J. B. Tenenbaum: Human-level concept learning through probabilistic
program induction. Science, 2015.

Drawings are reduced from 105×105 to 28×28 with a Lanczos filter, ink is 255 and paper 0. As in
Vinyals et al. (2016) and most work since, a character turned by 90°, 180° and 270° is a new class,
in all three splits; the four stay in one split. Turned drawings are stored, not computed when
loaded: all of it is 102 MB, and every reader of the prepared file stays a plain lookup.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from vsm.data.archives import open_tree, read_file
from vsm.data.class_lists import ClassLists, published, seeded
from vsm.data.images import ImageFormat, decode_all, is_image_name
from vsm.data.preparation import Preparation, completeness, keep_present, regroup
from vsm.errors import DataError

PARTS = ("images_background", "images_evaluation")
FORMAT = ImageFormat(side=28, channels=1, ink=True)
DRAWINGS = 20  # of a character
TURNS = ("", "@90", "@180", "@270")  # suffixes of class names, counter-clockwise
PAPER_SPLIT_SEED = 0


def paper_split() -> ClassLists:
    """Return 1,100 / 100 / 423 characters, drawn once from a fixed seed."""
    names = chain.from_iterable(published("omniglot_vinyals").values())
    return seeded(names, {"train": 1100, "validation": 100, "test": 423}, PAPER_SPLIT_SEED)


def vinyals_split() -> ClassLists:
    """Return the 1,028 / 172 / 423 characters of Vinyals et al."""
    return published("omniglot_vinyals")


@contextmanager
def read_paper_split(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read the official zips or folders at ``source``, with the split of the paper."""
    with _read(source, paper_split(), allow_missing) as preparation:
        yield preparation


@contextmanager
def read_vinyals_split(source: Path, allow_missing: bool) -> Iterator[Preparation]:
    """Read the official zips or folders at ``source``, with the split of Vinyals et al."""
    with _read(source, vinyals_split(), allow_missing) as preparation:
        yield preparation


@contextmanager
def _read(source: Path, lists: ClassLists, allow_missing: bool) -> Iterator[Preparation]:
    with ExitStack() as stack:
        halves = [stack.enter_context(open_tree(_find(source, part))) for part in PARTS]
        tree_of = {name: tree for tree in halves for name in tree.names}
        files: dict[str, list[str]] = {}
        for name in filter(is_image_name, tree_of):
            character = "/".join(
                PurePosixPath(name).parts[-3:-1]
            )  # …/<alphabet>/<character>/<file>
            files.setdefault(character, []).append(name)
        total = DRAWINGS * sum(map(len, lists.values()))
        sizes = {name: len(found) for name, found in files.items()}
        lists = keep_present(lists, sizes, DRAWINGS, allow_missing)
        characters = [name for names in lists.values() for name in names]
        drawings = [name for character in characters for name in files[character]]
        upright = decode_all(
            drawings,
            lambda name: read_file(tree_of[name], name),
            FORMAT,
            label=lambda name: f"{tree_of[name].location}/{name}",
        )
        yield Preparation(
            image_shape=FORMAT.shape,
            class_sizes={name + turn: sizes[name] for name in characters for turn in TURNS},
            class_lists={
                split: [name + turn for name in names for turn in TURNS]
                for split, names in lists.items()
            },
            batches=_turned(regroup(upright, [sizes[name] for name in characters])),
            origin=f"{source.resolve()}: {len(characters):,} characters, {len(drawings):,} "
            f"drawings, each in 4 rotations{completeness(len(drawings), total)}",
        )


def _find(source: Path, part: str) -> Path:
    """Return the folder or zip of one half, in ``source`` or beside it."""
    folder = source if source.is_dir() and source.name not in PARTS else source.parent
    for candidate in (folder / part, folder / f"{part}.zip"):
        if candidate.exists():
            return candidate
    raise DataError(
        f"omniglot: found neither {part}.zip nor a folder {part} in {folder}; pass the folder "
        "that holds both halves with --from, or use --download"
    )


def _turned(characters: Iterable[npt.NDArray[np.uint8]]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield each character's drawings ``[n, 28, 28, 1]``, then turned by 90°, 180° and 270°."""
    for drawings in characters:
        for turns in range(len(TURNS)):
            yield np.rot90(drawings, turns, axes=(1, 2))
