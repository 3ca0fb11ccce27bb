"""What readers of published layouts hand to the store: classes, their splits, and pixels."""

import csv
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from vsm.data.archives import Tree
from vsm.data.dataset import SPLITS, Pixels, Split
from vsm.data.images import ImageFormat, decode_all
from vsm.errors import DataError

ClassLists = dict[Split, list[str]]


class Preparation(NamedTuple):
    """A dataset about to be written; its pixels are read as ``batches`` is consumed."""

    image_shape: tuple[int, int, int]  # (height, width, channels)
    class_lists: ClassLists  # of each split; no class is in two
    class_sizes: Mapping[str, int]  # images of each class, at least 1, in the order of the images
    batches: Iterable[Pixels]  # uint8 [batch, height, width, channels], class after class
    origin: str  # one line for people


def published(name: str) -> ClassLists:
    """Return the class names of each split in the published list ``name``, in its order.

    The lists are ``cifar_fs`` (Bertinetto et al.), ``mini_imagenet`` (Ravi & Larochelle),
    ``omniglot_vinyals`` (Vinyals et al.) and ``tiered_imagenet`` (Ren et al.).
    """
    text = (resources.files("vsm.data") / "splits" / f"{name}.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    return {split: [row["class"] for row in rows if row["split"] == split] for split in SPLITS}


def dealt(names: Collection[str], found: str, fix: str, seed: int = 0) -> ClassLists:
    """Deal classes 64 / 16 / 20 percent to train, validation and test.

    If there are too few of them, the error says what was ``found`` and how to ``fix`` that.
    """
    count = len(names)
    if count < len(SPLITS):
        raise DataError(
            f"{found}, but needs at least {len(SPLITS)}, one for each of train, validation and "
            f"test; {fix}"
        )
    validation, test = (max(1, round(share * count)) for share in (0.16, 0.20))
    return seeded(names, (count - validation - test, validation, test), seed)


def seeded(names: Iterable[str], sizes: Sequence[int], seed: int) -> ClassLists:
    """Deal ``names`` at random to train, validation and test splits of ``sizes`` classes.

    Names are ordered by a hash of seed and name, so the result depends on nothing else: neither on
    the order of ``names`` nor on the version of a random number generator.
    """
    hashed = sorted(names, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
    left = iter(hashed)
    return {split: sorted(islice(left, size)) for split, size in zip(SPLITS, sizes, strict=True)}


def flat(lists: ClassLists) -> list[str]:
    """Return the classes of all splits, split after split."""
    return [name for names in lists.values() for name in names]


@dataclass(frozen=True)
class Layout:
    """What a published dataset consists of, and what is made of it as far as it is there."""

    lists: ClassLists  # the classes of each split
    class_size: int | None  # images of each class; None if they differ, and only classes count
    form: ImageFormat  # of all images
    allow_missing: bool  # go on with the classes that have any images

    def from_files(self, tree: Tree, files: Mapping[str, Sequence[str]]) -> Preparation:
        """Prepare image files of ``tree``, given those of every class; see :meth:`prepare`."""
        if not tree.in_any_order:
            raise DataError(
                f"{tree.location}: images in a compressed tar can only be read from its beginning "
                "to its end; unpack it and pass the folder"
            )

        def batches(present: ClassLists) -> Iterator[Pixels]:
            names = [file for class_name in flat(present) for file in files[class_name]]
            return decode_all(names, tree.read, self.form, lambda n: f"{tree.location}/{n}")

        sizes = {name: len(found) for name, found in files.items()}
        return self.prepare(tree.location, sizes, batches)

    def prepare(
        self,
        location: Path,
        sizes: Mapping[str, int],
        batches: Callable[[ClassLists], Iterable[Pixels]],
    ) -> Preparation:
        """Compare what was found with what was published, and prepare what is there.

        Args:
            location: where it was found.
            sizes: images found of each class; absent classes may be absent here.
            batches: gives the images of the classes that are present, class after class.
        """
        each, unit = (self.class_size, "images") if self.class_size else (1, "classes")
        names = flat(self.lists)
        present = {s: [name for name in self.lists[s] if sizes.get(name)] for s in self.lists}
        chosen = {name: sizes[name] for name in flat(present)}
        short = {n: sizes.get(n, 0) for n in names if sizes.get(n, 0) < each}
        if short and not (self.allow_missing and chosen):
            first, missing = next(iter(short)), each * len(short) - sum(short.values())
            raise DataError(
                f"{missing:,} of {each * len(names):,} {unit} are missing, first of class "
                f"{first!r} ({short[first]} of {each}); complete the files"
                + ", or pass --allow-missing to go without them"
                * bool(chosen)
            )
        images = sum(chosen.values())
        found = images if self.class_size else len(chosen)
        origin = origin_of(location, f"{images:,} images", found, each * len(names), unit)
        return Preparation(self.form.shape, present, chosen, batches(present), origin)


def origin_of(location: Path, what: str, found: int, expected: int, unit: str = "images") -> str:
    """Return one line for people: what came from where, and how much of it is missing."""
    incomplete = f"; INCOMPLETE, {found:,} of {expected:,} {unit}" if found < expected else ""
    return f"{location.resolve()}: {what}{incomplete}"
