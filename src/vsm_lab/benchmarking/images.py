"""Generated image files for a server and a classifier, and the classifier's answers."""

from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from vsm.classify import FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.data.dataset import Pixels
from vsm.data.glyphs import SIDE, draw_alphabet
from vsm.errors import BenchmarkError
from vsm.runs.trained_model import load
from vsm_lab.benchmarking.timing import Benchmark
from vsm_lab.benchmarking.workloads import LoadWorkload

PHOTO_SIZE = (640, 480)
NUM_SHAPES = 12
GRAIN = 24  # gray levels
JPEG_QUALITY = 90
GLYPHS_SEED = 1  # other alphabets than those of the dataset
Images = Iterable[Image.Image]


def write_images(workload: LoadWorkload, folder: Path) -> None:
    """Write ``support/LABEL/*`` and ``queries/*`` in the style the model expects."""
    trained = load(workload.model)
    if trained.preprocessing is None:
        raise BenchmarkError(f"model: {workload.model} takes features, not images")
    draw, suffix = (_characters, ".png") if trained.preprocessing.ink else (_photos, ".jpg")
    support, queries = draw(workload.way, workload.shot)
    parts = {f"support/class{number}": images for number, images in enumerate(support)}
    parts["queries"] = islice(queries, workload.pictures)
    for part, images in parts.items():
        (folder / part).mkdir(parents=True)
        for number, image in enumerate(images):
            image.save(folder / part / f"{number:04}{suffix}", quality=JPEG_QUALITY)


def classify_files(workload: LoadWorkload, folder: Path, times: int) -> Benchmark:
    """Classify all ``queries`` as one batch, ``times`` times, with a fitted classifier."""
    classifier = FewShotClassifier(load(workload.model)).fit(*_support(folder))
    queries = sorted((folder / "queries").iterdir())

    def classify() -> None:
        for _ in range(times):
            classifier.predict_proba(queries)

    return classify


def expected_answers(workload: LoadWorkload, folder: Path) -> list[dict[str, tuple[float, float]]]:
    """Return the lowest and highest probability of each label, for every file of ``queries``.

    Batches of different sizes are rounded differently, so there are several probabilities: queries
    together and one by one, each with examples fitted together and class by class.
    """
    trained = load(workload.model)
    examples, labels = _support(folder)
    together = FewShotClassifier(trained).fit(examples, labels)
    by_class = FewShotClassifier(trained)
    for first in range(0, len(examples), workload.shot):
        part = slice(first, first + workload.shot)
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


def _characters(way: int, shot: int) -> tuple[list[Images], Images]:
    """Draw examples of the first characters of an alphabet, and more characters as queries."""

    def scans(drawings: Pixels) -> Images:
        return (Image.fromarray(255 - one) for one in drawings.reshape(-1, SIDE, SIDE))

    first = draw_alphabet(GLYPHS_SEED, 0)
    alphabets = (draw_alphabet(GLYPHS_SEED, number) for number in count())
    queries = (image for drawn in alphabets for image in scans(drawn[:, shot:]))
    return [scans(first[number, :shot]) for number in range(way)], queries


def _photos(way: int, shot: int) -> tuple[list[Images], Images]:
    """Draw blurred, grainy shapes: as large as photos, and as slow to decode."""
    random = np.random.default_rng(0)
    backgrounds = random.integers(0, 256, (way, 3))

    def photo(class_number: int) -> Image.Image:
        width, height = PHOTO_SIZE
        image = Image.new("RGB", PHOTO_SIZE, tuple(backgrounds[class_number].tolist()))
        draw = ImageDraw.Draw(image)
        shape = draw.ellipse if class_number % 2 else draw.rectangle
        for _ in range(NUM_SHAPES):
            (x, y), (a, b) = random.integers(0, PHOTO_SIZE), random.integers(10, width // 4, 2)
            color = tuple(random.integers(0, 256, 3).tolist())
            shape((int(x - a), int(y - b), int(x + a), int(y + b)), fill=color)
        pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(2)), np.int16)
        grain = random.integers(-GRAIN, GRAIN + 1, (height, width, 1))
        return Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))

    support: list[Images] = [[photo(number) for _ in range(shot)] for number in range(way)]
    return support, (photo(number % way) for number in count())
