"""Generated image files for a server and a classifier, and the classifier's answers."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vsm.classify import FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.data.glyphs import SIDE
from vsm.errors import BenchmarkError
from vsm.runs.loading import load
from vsm_lab.benchmarking.timing import Benchmark

PHOTO_SIZE = (640, 480)
GRAIN = 24  # gray levels; makes photos as large and as slow to decode as real ones
Answer = dict[str, tuple[float, float]]
"""The lowest and highest probability of each label."""


def write_images(model: str, folder: Path, way: int, shot: int, num_queries: int) -> None:
    """Write ``support/LABEL/*`` and ``queries/*``: blurred patterns, one per class, with noise.

    They are JPEGs of 640×480, or small gray PNGs for models of characters.
    """
    trained = load(model)
    if trained.preprocessing is None:
        raise BenchmarkError(f"model: {model} takes features, not images")
    ink, random = trained.preprocessing.ink, np.random.default_rng(0)
    width, height = (SIDE, SIDE) if ink else PHOTO_SIZE
    patterns = random.integers(0, 192, (way, 6, 8, 3))
    names = [f"support/class{number}/{k:04}" for number in range(way) for k in range(shot)]
    names += [f"queries/{number:04}" for number in range(num_queries)]
    for position, name in enumerate(names):
        number = position // shot if position < way * shot else position % way
        coarse = (patterns[number] + random.integers(0, 64, (6, 8, 3))).astype(np.uint8)
        blurred = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(blurred, np.int16)
        pixels = pixels + random.integers(-GRAIN, GRAIN + 1, (height, width, 1))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        path = folder / f"{name}{'.png' if ink else '.jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        (image.convert("L") if ink else image).save(path, quality=90)


def classify_files(model: str, folder: Path, times: int) -> Benchmark:
    """Classify all ``queries`` as one batch, ``times`` times, with a fitted classifier."""
    classifier = FewShotClassifier(load(model)).fit(*_support(folder))
    queries = sorted((folder / "queries").iterdir())

    def classify() -> None:
        for _ in range(times):
            classifier.predict_proba(queries)

    return classify


def expected_answers(model: str, folder: Path) -> list[Answer]:
    """Return the range of Python's probabilities for every file of ``queries``.

    Batches of different sizes are rounded differently, so there are several probabilities: queries
    together and one by one, each with examples fitted together and class by class.
    """
    trained = load(model)
    examples, labels = _support(folder)
    together = FewShotClassifier(trained).fit(examples, labels)
    by_class = FewShotClassifier(trained)
    shot = labels.count(labels[0])
    for first in range(0, len(examples), shot):
        part = slice(first, first + shot)
        by_class.partial_fit(examples[part], labels[part])
    queries = sorted((folder / "queries").iterdir())
    one_by_one = Embedded(torch.cat([together.embed([path]).features for path in queries]))
    probabilities = np.stack(
        [
            classifier.predict_proba(embedded)
            for classifier in (together, by_class)
            for embedded in (together.embed(queries), one_by_one)
        ]
    )
    ranges = np.stack([probabilities.min(0), probabilities.max(0)], -1).tolist()
    names = together.classes_.tolist()
    return [dict(zip(names, map(tuple, of_query), strict=True)) for of_query in ranges]


def _support(folder: Path) -> tuple[list[Path], list[str]]:
    examples = sorted((folder / "support").glob("*/*"))
    return examples, [path.parent.name for path in examples]
