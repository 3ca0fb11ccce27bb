"""The images of "How the memory works": python -m website.plots [FOLDER].

They show what the shipped model of glyphs computes.
"""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from PIL import Image

import vsm
from vsm.data import ImageDataset
from vsm.evaluation.protocol import EpisodeProtocol
from vsm.evaluation.statistics import estimate
from vsm.memory import GaussianMemory
from vsm.runs.measurement import ModelOnData
from vsm.seeding import generator
from vsm.system.colors import COLORS
from vsm_lab.episode_plots import (
    directions,
    episode_of,
    moved_prototypes,
    recall_sheet,
    rising_accuracy,
)
from vsm_lab.measures import look_at_episodes

MODEL = "glyphs-5w1s"
FOLDER = Path(__file__).parents[1] / "docs" / "images"
EPISODE = 3  # of the list that evaluation uses
REMEMBERED = (0, 1, 2, 4, 8)
TASKS, QUERIES = 100, 5
SIZES, EPISODES = (0, 4, 16, 64, 256), 1000
NUM_COLORS = 64  # of a PNG


class Subject(NamedTuple):
    """The shipped model, its data and its class statistics."""

    run: ModelOnData
    dataset: ImageDataset
    memory: GaussianMemory


def load_subject() -> Subject:
    """Load the model and its data."""
    run = vsm.load(MODEL).on(_protocol(1, 1, 2))
    assert isinstance(run.dataset, ImageDataset)
    assert run.trained.state is not None
    assert run.trained.state.statistics is not None
    return Subject(run, run.dataset, run.trained.state.statistics)


def _protocol(shot: int, queries: int, episodes: int) -> EpisodeProtocol:
    return EpisodeProtocol("glyphs", "test", 5, shot, queries, episodes, seed=0)


def recall(subject: Subject) -> Figure:
    """Show the classes that are recalled for each example of an episode."""
    measured = subject.run.measure(_protocol(shot=1, queries=1, episodes=2))
    *_, episode = look_at_episodes(measured, subject.dataset, EPISODE + 1, queries=1)
    named = subject.run.trained.memory
    assert named is not None
    ids = {name: number for number, name in enumerate(subject.dataset.class_names)}
    return recall_sheet(episode, subject.dataset, [ids[name] for name in named.names])


def remembering(subject: Subject) -> Figure:
    """Plot one-shot accuracy against the number of remembered images; print the values."""
    means, intervals = [], []
    for count in REMEMBERED:
        accuracies = [_accuracy(subject, task, count) for task in range(TASKS)]
        accuracy = estimate(torch.tensor(accuracies))
        means.append(100 * accuracy.mean)
        intervals.append(100 * accuracy.ci95)
        print(f"{count} remembered: {accuracy.mean:.1%} ± {accuracy.ci95:.1%}")
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(REMEMBERED, means, intervals, marker="o", capsize=3, color=COLORS[0])
    axes.set(
        xlabel="other images of each class that the memory holds",
        ylabel="accuracy with one example (%)",
        xticks=REMEMBERED,
    )
    axes.grid(alpha=0.25)
    return figure


def rising(subject: Subject) -> Figure:
    """Plot accuracy against the number of remembered classes; print the values."""
    found, sizes = {}, [*SIZES, len(subject.memory)]
    for shot in (1, 5):
        protocol = _protocol(shot, 15, EPISODES)
        measured = [subject.run.first_slots(size).measure(protocol) for size in sizes]
        found[shot] = [one.evaluation.accuracy for one in measured]
        for size, one in zip(sizes, found[shot], strict=True):
            print(f"{size} classes, {shot}-shot: {100 * one.mean:.2f} ± {100 * one.ci95:.2f}")
    return rising_accuracy(sizes, found)


def moved(subject: Subject) -> Figure:
    """Show where the memory moves the prototypes of one episode."""
    sampler = _protocol(shot=1, queries=15, episodes=2).sampler(subject.dataset)
    inferred, queries = episode_of(subject.run, sampler)
    names = [f"class {n + 1}" for n in range(5)]
    return moved_prototypes(inferred, queries, names, subject.memory.reader.ratios)


def _accuracy(subject: Subject, task: int, count: int) -> float:
    """Return the accuracy on five new classes after ``count`` images of each are remembered."""
    dataset, random = subject.dataset, generator(0, "pictures", task)
    drawn = torch.randperm(len(dataset.classes("test")), generator=random)[:5].tolist()
    class_ids = dataset.classes("test")[drawn].tolist()
    classifier = vsm.FewShotClassifier(subject.run.trained)
    if count:
        classifier.fit(*_labeled(dataset, class_ids, 1 + QUERIES, count))
        classifier.remember()
    classifier.fit(*_labeled(dataset, class_ids, 0, 1))
    return float(classifier.score(*_labeled(dataset, class_ids, 1, QUERIES)))


def _labeled(
    dataset: ImageDataset, class_ids: Sequence[int], first: int, count: int
) -> tuple[list[npt.NDArray[np.uint8]], list[str]]:
    ids = np.concatenate([dataset.image_ids(one)[first : first + count] for one in class_ids])
    names = [f"new {position}" for position in range(len(class_ids)) for _ in range(count)]
    return list(dataset.images[ids]), names


FIGURES: dict[str, Callable[[Subject], Figure]] = {
    "recall": recall,
    "remembering": remembering,
    "directions": lambda subject: directions(subject.memory),
    "moved": moved,
    "rising": rising,
}


def main(folder: Path = FOLDER) -> None:
    """Draw all images as small PNGs."""
    subject = load_subject()
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        buffer = io.BytesIO()
        with mpl.rc_context({"savefig.facecolor": "white"}):
            draw(subject).savefig(buffer, format="png", dpi=90)
        image = Image.open(buffer).convert("RGB").quantize(NUM_COLORS)
        image.save(folder / f"memory-{name}.png", optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
