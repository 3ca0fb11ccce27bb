"""Data and settings so small that a run takes seconds, for tests and the processes they start."""

from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np

from vsm.data import SPLITS, ImageDataset, PixelNormalization, glyphs
from vsm.data.dataset import ClassLists
from vsm.data.prepared import Preparation
from vsm.settings import (
    ModelSettings,
    RunSettings,
    SamplingSettings,
    ValidationSettings,
    effective_settings,
    flatten_parts,
)
from vsm.system.progress import Progress


def make_dataset() -> ImageDataset:
    """30/8/8 classes of 12 noisy copies of a random 28×28 pattern; easy to tell apart."""
    rng = np.random.default_rng(0)
    num_classes, per_class = 46, 12
    patterns = rng.integers(0, 200, (num_classes, 1, 28, 28, 1))
    noise = rng.integers(0, 55, (num_classes, per_class, 28, 28, 1))
    images = (patterns + noise).astype(np.uint8).reshape(-1, 28, 28, 1)
    return ImageDataset(
        name="tiny",
        images=images,
        class_names=tuple(f"pattern{i:02d}" for i in range(num_classes)),
        class_starts=np.arange(0, num_classes * per_class + 1, per_class),
        splits={
            "train": np.arange(30),
            "validation": np.arange(30, 38),
            "test": np.arange(38, 46),
        },
        normalization=PixelNormalization((0.5,), (0.25,)),
    )


def prepare_few_glyphs() -> None:
    """Prepare the dataset ``glyphs`` with eight of its alphabets, a fifth of the classes."""
    alphabets = {"train": range(4), "validation": range(28, 30), "test": range(34, 36)}
    drawn = {n: glyphs.draw_alphabet(glyphs.SEED, n) for n in chain(*alphabets.values())}
    names = {
        n: [f"alphabet{n:02}/character{i:02}" for i in range(len(images))]
        for n, images in drawn.items()
    }
    lists: ClassLists = {
        split: [name for n in alphabets[split] for name in names[n]] for split in SPLITS
    }
    few = Preparation(
        image_shape=(28, 28, 1),
        class_lists=lists,
        class_sizes=dict.fromkeys(chain(*lists.values()), glyphs.NUM_DRAWINGS),
        batches=[images.reshape(-1, 28, 28, 1) for images in drawn.values()],
        origin="a part of glyphs",
    )
    with patch.object(glyphs, "_draw_all", return_value=few):
        assert len(glyphs.open_glyphs().class_names) == len(few.class_sizes)


def make_settings() -> RunSettings:
    """A run of seconds: narrow network, few samples, few steps; all of the paper's parts."""
    return RunSettings(
        data="tiny",
        method="vsm",
        way=3,
        shot=1,
        queries=2,
        tasks=2,
        steps=6,
        checkpoint_every=2,
        model=ModelSettings(inference="network", channels=4, hidden_units=8),
        sampling=SamplingSettings(5, 4, 5, 4),
        validation=ValidationSettings(every=3, episodes=5),
    )


def variant(settings: RunSettings, **parts: Any) -> RunSettings:
    """As ``dataclasses.replace``, where settings that then have no effect get their defaults."""
    return effective_settings(RunSettings, flatten_parts(vars(settings) | parts))


class RecordedProgress(Progress):
    """Keeps what a bar would show: title, steps done, and their total, after every advance."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, int, int | None]] = []
        self.messages: list[str] = []
        self._stage: tuple[str, int | None] = ("", None)
        self._done = 0

    def start(self, title: str, total: int | None) -> None:
        self._stage, self._done = (title, total), 0

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count
        self.shown.append((self._stage[0], self._done, self._stage[1]))

    def message(self, text: str) -> None:
        self.messages.append(text)
