"""Pictures out of nothing for a server and a classifier, as files, and the classifier's answers."""

from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import LoadWorkload
from vsm.classify import FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.data.dataset import Pixels
from vsm.data.glyphs import SIDE, draw_alphabet
from vsm.errors import BenchmarkError
from vsm.runs.trained_model import load

PHOTOGRAPH = (640, 480)
NUM_SHAPES = 12
GRAIN = 24  # gray levels
JPEG_QUALITY = 90
GLYPHS_SEED = 1  # other alphabets than those of the dataset
Images = Iterable[Image.Image]


def written(workload: LoadWorkload, folder: Path) -> Work:
    """Return the writing of ``examples/LABEL/*`` and ``asked/*``, as a model takes them."""
    trained = load(workload.model)
    if trained.preprocessing is None:
        raise BenchmarkError(f"model: {workload.model} takes features, not pictures")
    draw, ending = (_drawings, ".png") if trained.preprocessing.ink else (_photographs, ".jpg")

    def write() -> None:
        examples, asked = draw(workload.way, workload.shot)
        parts = {f"examples/class{number}": images for number, images in enumerate(examples)}
        parts["asked"] = islice(asked, workload.pictures)
        for part, images in parts.items():
            (folder / part).mkdir(parents=True)
            for number, image in enumerate(images):
                image.save(folder / part / f"{number:04}{ending}", quality=JPEG_QUALITY)

    return write


def answers_of_files(workload: LoadWorkload, folder: Path, times: int) -> Work:
    """Return classifying all ``asked`` files as one batch, so many times, after the fit."""
    classifier = FewShotClassifier(load(workload.model))
    examples, labels = _examples(folder)
    classifier.fit(examples, labels)
    asked = sorted((folder / "asked").iterdir())

    def classify() -> None:
        for _ in range(times):
            classifier.predict_proba(asked)

    return classify


def ranges_of_answers(workload: LoadWorkload, folder: Path) -> Work:
    """Return finding the probabilities that Python has for the ``asked`` files.

    The network rounds differently for another number of pictures, so there are several: with files
    classified together or one by one, and examples fitted together or class by class. For each
    file, in the order of names: the lowest and highest for each label.
    """
    trained = load(workload.model)
    examples, labels = _examples(folder)
    at_once = FewShotClassifier(trained).fit(examples, labels)
    by_class = FewShotClassifier(trained)
    for number in range(0, len(examples), workload.shot):
        part = slice(number, number + workload.shot)
        by_class.partial_fit(examples[part], labels[part])
    asked = sorted((folder / "asked").iterdir())

    def classify() -> list[dict[str, tuple[float, float]]]:
        one_by_one = [at_once.embed([path]).features for path in asked]
        embedded = at_once.embed(asked), Embedded(torch.cat(one_by_one))
        chances = np.stack(
            [one.predict_proba(rows) for one in (at_once, by_class) for rows in embedded]
        )
        ranges = np.stack([chances.min(0), chances.max(0)], -1).tolist()
        names = at_once.classes_.tolist()
        return [dict(zip(names, map(tuple, of_one), strict=True)) for of_one in ranges]

    return classify


def _examples(folder: Path) -> tuple[list[Path], list[str]]:
    examples = sorted((folder / "examples").glob("*/*"))
    return examples, [path.parent.name for path in examples]


def _drawings(way: int, shot: int) -> tuple[list[Images], Images]:
    """Draw characters with dark ink: examples of a few, and more of these and of others."""

    def scans(drawings: Pixels) -> Images:
        return (Image.fromarray(255 - one) for one in drawings.reshape(-1, SIDE, SIDE))

    first = draw_alphabet(GLYPHS_SEED, 0)
    alphabets = (draw_alphabet(GLYPHS_SEED, number) for number in count())
    asked = (image for drawn in alphabets for image in scans(drawn[:, shot:]))
    return [scans(first[number, :shot]) for number in range(way)], asked


def _photographs(way: int, shot: int) -> tuple[list[Images], Images]:
    """Make pictures as large as photographs, and as hard to decode: shapes, blurred and grainy."""
    random = np.random.default_rng(0)
    grounds = random.integers(0, 256, (way, 3))

    def picture(kind: int) -> Image.Image:
        width, height = PHOTOGRAPH
        image = Image.new("RGB", PHOTOGRAPH, tuple(grounds[kind].tolist()))
        draw = ImageDraw.Draw(image)
        shape = draw.ellipse if kind % 2 else draw.rectangle
        for _ in range(NUM_SHAPES):
            (x, y), (a, b) = random.integers(0, PHOTOGRAPH), random.integers(10, width // 4, 2)
            color = tuple(random.integers(0, 256, 3).tolist())
            shape((int(x - a), int(y - b), int(x + a), int(y + b)), fill=color)
        pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(2)), np.int16)
        grain = random.integers(-GRAIN, GRAIN + 1, (height, width, 1))
        return Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))

    examples: list[Images] = [[picture(kind) for _ in range(shot)] for kind in range(way)]
    return examples, (picture(number % way) for number in count())
