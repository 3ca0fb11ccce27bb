"""Which classes belong to which split: the published lists, and splits drawn from a seed."""

import csv
import hashlib
from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from itertools import islice

from vsm.data.dataset import SPLITS, Split

ClassLists = dict[Split, list[str]]
DEALING_SEED = 0
VALIDATION_SHARE, TEST_SHARE = 0.16, 0.20


def published(name: str) -> ClassLists:
    """Return the class names of each split in the published list ``name``, in its order.

    The lists are ``cifar_fs`` (Bertinetto et al.), ``mini_imagenet`` (Ravi & Larochelle),
    ``omniglot_vinyals`` (Vinyals et al.) and ``tiered_imagenet`` (Ren et al.).
    """
    text = (resources.files("vsm.data") / "splits" / f"{name}.csv").read_text(encoding="utf-8")
    lists: ClassLists = {split: [] for split in SPLITS}
    for row in csv.DictReader(text.splitlines()):
        for split in SPLITS:
            if row["split"] == split:
                lists[split].append(row["class"])
    return lists


def dealt(names: Collection[str]) -> ClassLists:
    """Deal at least three classes 64 / 16 / 20 percent to train, validation and test."""
    count = len(names)
    validation, test = (max(1, round(s * count)) for s in (VALIDATION_SHARE, TEST_SHARE))
    sizes: dict[Split, int] = {
        "train": count - validation - test,
        "validation": validation,
        "test": test,
    }
    return seeded(names, sizes, DEALING_SEED)


def seeded(names: Iterable[str], sizes: Mapping[Split, int], seed: int) -> ClassLists:
    """Deal ``names`` at random to splits of ``sizes`` classes.

    Names are ordered by a hash of seed and name, so the result depends on nothing else: neither on
    the order of ``names`` nor on the version of a random number generator.
    """
    shuffled = iter(
        sorted(names, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
    )
    return {split: sorted(islice(shuffled, size)) for split, size in sizes.items()}
