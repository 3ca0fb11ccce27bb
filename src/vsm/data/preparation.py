"""What a reader of some published layout hands to the store."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vsm.data.archives import Tree, read_file
from vsm.data.class_lists import ClassLists
from vsm.data.dataset import SPLITS, Split
from vsm.data.images import ImageFormat, decode_all
from vsm.errors import DataError


@dataclass(frozen=True)
class Preparation:
    """A dataset about to be written; its pixels are read as ``batches`` is consumed.

    Attributes:
        image_shape: ``(height, width, channels)``.
        class_sizes: images of each class, by name, in the order of the images.
        class_lists: class names of each split.
        batches: uint8 ``[batch, height, width, channels]``, class after class.
        origin: one line for people.
    """

    image_shape: tuple[int, int, int]
    class_sizes: Mapping[str, int]
    class_lists: ClassLists
    batches: Iterable[npt.NDArray[np.uint8]]
    origin: str

    def splits(self) -> dict[Split, list[int]]:
        """Return the class ids of each split that has any, after checking them.

        Raises:
            DataError: for a class without images, or one in two splits.
        """
        for name, size in self.class_sizes.items():
            if size == 0:
                raise DataError(f"class {name!r} has no images; add some or remove it")
        seen: dict[str, Split] = {}
        for split, names in self.class_lists.items():
            for name in names:
                if name in seen:
                    raise DataError(
                        f"class {name!r} is in two splits, {seen[name]} and {split}; "
                        "keep it in one of them"
                    )
                seen[name] = split
        ids = {name: position for position, name in enumerate(self.class_sizes)}
        lists = self.class_lists
        return {split: [ids[name] for name in lists[split]] for split in SPLITS if lists.get(split)}


def from_files(
    tree: Tree,
    files: Mapping[str, Sequence[str]],
    class_lists: ClassLists,
    form: ImageFormat,
    origin: str,
) -> Preparation:
    """Prepare image files of ``tree``, given the file names of every class."""
    if not tree.in_any_order:
        raise DataError(
            f"{tree.location}: images in a compressed tar can only be read from its beginning to "
            "its end; unpack it and pass the folder"
        )
    names = [name for chosen in files.values() for name in chosen]
    return Preparation(
        image_shape=form.shape,
        class_sizes={name: len(chosen) for name, chosen in files.items()},
        class_lists=class_lists,
        batches=decode_all(
            names,
            lambda name: read_file(tree, name),
            form,
            label=lambda name: f"{tree.location}/{name}",
        ),
        origin=origin,
    )


def keep_present(
    class_lists: ClassLists,
    sizes: Mapping[str, int],
    expected: int,
    allow_missing: bool,
    unit: str = "images",
) -> ClassLists:
    """Compare what was found with what was published.

    Args:
        class_lists: the published classes of each split.
        sizes: images found of each class; absent classes may be absent here.
        expected: images a class should have.
        allow_missing: go on with the classes that have any images.
        unit: what is counted, for messages.

    Raises:
        DataError: if images are missing and that is not allowed; says how many, and the first.
    """
    names = [name for split in SPLITS for name in class_lists[split]]
    short = {n: expected - sizes.get(n, 0) for n in names if sizes.get(n, 0) < expected}
    present = {s: [n for n in class_lists[s] if sizes.get(n, 0)] for s in SPLITS}
    if short and not (allow_missing and any(present.values())):
        first = next(iter(short))
        raise DataError(
            f"{sum(short.values()):,} of {expected * len(names):,} {unit} are missing, first of "
            f"class {first!r} ({sizes.get(first, 0)} of {expected}); complete the files"
            + ", or pass --allow-missing to go without them"
            * any(present.values())
        )
    return present


def completeness(found: int, published: int) -> str:
    """Return the tail of an origin line: how much of the published data is there."""
    return "" if found >= published else f"; INCOMPLETE, {found:,} of {published:,} images"


def in_classes(
    images: npt.NDArray[np.uint8], classes: Iterable[Sequence[int] | npt.NDArray[np.int64]]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the images of one class after another, from an array in any order."""
    for positions in classes:
        yield images[np.asarray(positions, dtype=np.int64)]


def regroup(
    batches: Iterable[npt.NDArray[np.uint8]], sizes: Iterable[int]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Cut a stream of batches anew, into batches of the given ``sizes``."""
    stream = iter(batches)
    held = next(stream)
    for size in sizes:
        while len(held) < size:
            held = np.concatenate([held, next(stream)])
        yield held[:size]
        held = held[size:]
