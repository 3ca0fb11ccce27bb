"""The images of "How the memory works": python -m website.plots [FOLDER].

Two are diagrams; the others show what the shipped model of glyphs computes.
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

import vsm
from vsm.data import ImageDataset
from vsm.evaluation.protocol import EpisodeProtocol
from vsm.evaluation.statistics import estimate
from vsm.memory import GaussianMemory
from vsm.runs.comparison import ModelOnData, load_for, measure
from vsm.seeding import generator
from vsm.system.colors import COLORS
from vsm_lab.episode_plots import recall_sheet
from vsm_lab.gaussian_plots import (
    directions,
    episode_of,
    moved_prototypes,
    rising_accuracy,
)
from vsm_lab.measures import ShownEpisode, look_at_episodes
from vsm_lab.plots import show_image

MODEL = "glyphs-5w1s"
FOLDER = Path(__file__).parents[1] / "docs" / "images"
EPISODE = 3  # of the list that evaluation uses
REMEMBERED = (0, 1, 2, 4, 8)
TASKS, QUERIES = 100, 5
SIZES, EPISODES = (0, 4, 16, 64, 256), 1000
NUM_COLORS = 64  # of a PNG


class Shown(NamedTuple):
    """The shipped model, its data and class statistics, and one episode of five characters."""

    run: ModelOnData
    dataset: ImageDataset
    memory: GaussianMemory
    episode: ShownEpisode


def run_episode() -> Shown:
    """Load the model and run one episode."""
    protocol = EpisodeProtocol("glyphs", "test", way=5, shot=1, queries=1, episodes=2, seed=0)
    run = load_for(Path(MODEL), protocol)
    memory = run.trained.state
    assert isinstance(run.dataset, ImageDataset)
    assert memory is not None
    assert memory.statistics is not None
    *_, episode = look_at_episodes(measure(run, protocol), run.dataset, EPISODE + 1, queries=1)
    return Shown(run, run.dataset, memory.statistics, episode)


def recall(shown: Shown) -> Figure:
    """Show the classes that are recalled for each example."""
    named = shown.run.trained.memory
    assert named is not None
    ids = {name: number for number, name in enumerate(shown.dataset.class_names)}
    return recall_sheet(shown.episode, shown.dataset, [ids[name] for name in named.names])


def flow() -> Figure:
    """Draw the computation from images to answers and back into the memory."""
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 92), ylim=(4, 40))
    axes.axis("off")
    for left, bottom, text, color in (
        (1, 24, "examples\nof a new class", "#eeeeee"),
        (20, 24, "features\nh", "#eeeeee"),
        (39, 24, "recollection\nm", "#c9ebf7"),
        (58, 24, "prototype\nz", "#f0e6b8"),
        (77, 24, "answer\ny", "#bfe0c4"),
        (39, 6, "memory\nM: class statistics", "#c3d6ea"),
        (77, 6, "features of\na new image", "#eeeeee"),
    ):
        round_box = "round,pad=0,rounding_size=1.4"
        box = FancyBboxPatch((left, bottom), 14, 9, boxstyle=round_box, fc=color, ec="#333333")
        axes.add_patch(box)
        axes.text(left + 7, bottom + 4.5, text, ha="center", va="center", fontsize=9)
    for start, end, style in (
        *(((x, 28), (x + 4.6, 28), {}) for x in (15, 34, 53, 72)),
        ((46, 15), (46, 23.6), {}),
        ((84, 15), (84, 23.6), {}),
        ((27, 33), (64, 33), {"connectionstyle": "arc3,rad=-0.18"}),
        ((27, 23.6), (38.6, 11), {"linestyle": "--"}),
    ):
        arrow = {"arrowstyle": "-|>", "color": "#333333", **style}
        axes.annotate("", end, start, arrowprops=arrow)
    for x, y, side, text in (
        (47.2, 19.3, "left", "classes like h,\nweighed by λ (Eq. 9)"),
        (82.8, 19.3, "right", "density about z"),
        (45.5, 37.5, "center", "what the examples say themselves"),
        (31.3, 15.3, "right", "counts, means,\nscatter, added\nafterwards"),
    ):
        axes.text(x, y, text, ha=side, va="center", fontsize=8)
    return figure


def bayes() -> Figure:
    """Draw Bayes' rule for one feature: a recollection worth two examples, and one to five."""
    recalled, mean, noise, strength = 0.0, 3.0, 1.0, 2.0
    at = np.linspace(-3, 5.5, 400)
    figure = Figure(figsize=(9.2, 2.8), layout="constrained")
    for column, shot in enumerate((1, 5)):
        axes = figure.add_subplot(1, 2, column + 1)
        middle = (strength * recalled + shot * mean) / (strength + shot)
        for name, center, variance, color in (
            ("what was recalled", recalled, noise / strength, COLORS[0]),
            ("what the examples say", mean, noise / shot, COLORS[6]),
            ("both: the prototype", middle, noise / (strength + shot), COLORS[1]),
        ):
            density = np.exp(-((at - center) ** 2) / (2 * variance)) / np.sqrt(variance)
            axes.fill_between(at, density, color=color, alpha=0.35, lw=0)
            axes.plot(at, density, color=color, label=name)
        axes.set_title(f"{shot} example{'s' if shot > 1 else ''}", fontsize=10)
        axes.set(xticks=[], yticks=[], xlabel="one feature of the class")
        if column == 0:
            axes.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def memory_map(shown: Shown) -> Figure:
    """Show all classes on the two directions that tell them apart best, and what is recalled."""
    weights = shown.episode.weights
    assert weights is not None
    slots = shown.memory.reader.slots[:, :2].numpy()
    model = shown.run.trained.model
    images = shown.dataset.normalize(shown.dataset.load(shown.episode.support_ids[:, 0]))
    with torch.no_grad():
        new = model.project(model.eval().embed(images), shown.memory)[:, :2].numpy()

    figure = Figure(figsize=(8.2, 5.4), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(slots[:, 0], slots[:, 1], s=9, color="#bbbbbb", linewidths=0, label="classes")
    for n, point in enumerate(new):
        best = weights[n].topk(5)
        for weight, slot in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            ends = np.stack([point, slots[slot]])
            axes.plot(ends[:, 0], ends[:, 1], color=COLORS[n], lw=5 * weight + 0.3, alpha=0.6)
        axes.scatter(
            point[0], point[1], marker="*", s=150, color=COLORS[n], ec="black", lw=0.6, zorder=3
        )
    for n in range(len(new)):
        inset = axes.inset_axes((0.01 + 0.11 * n, 0.88, 0.1, 0.11))
        show_image(inset, shown.dataset, int(shown.episode.support_ids[n, 0]), COLORS[n])
    axes.set(xticks=[], yticks=[])
    axes.margins(y=0.16)
    return figure


def remembering(shown: Shown) -> tuple[Figure, list[str]]:
    """Plot one-shot accuracy against the number of remembered images; return also its values."""
    trained = vsm.load(MODEL)
    means, intervals, values = [], [], []
    for count in REMEMBERED:
        accuracy = estimate(
            torch.tensor([_accuracy(trained, shown.dataset, task, count) for task in range(TASKS)])
        )
        means.append(100 * accuracy.mean)
        intervals.append(100 * accuracy.ci95)
        values.append(f"{count} remembered: {accuracy.mean:.1%} ± {accuracy.ci95:.1%}")
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(REMEMBERED, means, intervals, marker="o", capsize=3, color=COLORS[0])
    axes.set(
        xlabel="other images of each class that the memory holds",
        ylabel="accuracy with one example (%)",
        xticks=REMEMBERED,
    )
    axes.grid(alpha=0.25)
    return figure, values


def rising(shown: Shown) -> tuple[Figure, list[str]]:
    """Plot accuracy against the number of remembered classes; return also its values."""
    values, found = [], {}
    sizes = [*SIZES, len(shown.memory)]
    for shot in (1, 5):
        protocol = EpisodeProtocol("glyphs", "test", 5, shot, 15, EPISODES, seed=0)
        measured = [measure(shown.run.first_slots(size), protocol) for size in sizes]
        found[shot] = [one.evaluation.accuracy for one in measured]
        pairs = zip(sizes, found[shot], strict=True)
        values += [
            f"{size} classes, {shot}-shot: {100 * one.mean:.2f} ± {100 * one.ci95:.2f}"
            for size, one in pairs
        ]
    return rising_accuracy(sizes, found), values


def moving(shown: Shown) -> Figure:
    """Show where the memory moves the prototypes of one episode."""
    protocol = EpisodeProtocol("glyphs", "test", way=5, shot=1, queries=15, episodes=2, seed=0)
    inferred, queries = episode_of(shown.run, protocol.sampler(shown.dataset))
    names = [f"class {n + 1}" for n in range(5)]
    return moved_prototypes(inferred, queries, names, shown.memory.reader.ratios)


def _accuracy(trained: vsm.TrainedModel, dataset: ImageDataset, task: int, count: int) -> float:
    """Return the accuracy on five new classes after ``count`` images of each are remembered."""
    random = generator(0, "pictures", task)
    drawn = torch.randperm(len(dataset.classes("test")), generator=random)[:5].tolist()
    chosen = [(f"new {c}", dataset.image_ids(dataset.classes("test")[c])) for c in drawn]
    classifier = vsm.FewShotClassifier(trained)
    if count:
        classifier.fit(*_labeled(dataset, chosen, 1 + QUERIES, count))
        classifier.remember()
    classifier.fit(*_labeled(dataset, chosen, 0, 1))
    return float(classifier.score(*_labeled(dataset, chosen, 1, QUERIES)))


def _labeled(
    dataset: ImageDataset,
    chosen: Sequence[tuple[str, npt.NDArray[np.int64]]],
    first: int,
    count: int,
) -> tuple[list[npt.NDArray[np.uint8]], list[str]]:
    images = [dataset.images[one] for _, ids in chosen for one in ids[first : first + count]]
    return images, [name for name, _ in chosen for _ in range(count)]


def main(folder: Path = FOLDER) -> None:
    """Draw all images."""
    shown = run_episode()
    remembered, remembered_values = remembering(shown)
    risen, risen_values = rising(shown)
    figures = {
        "flow": flow(),
        "recall": recall(shown),
        "map": memory_map(shown),
        "bayes": bayes(),
        "remembering": remembered,
        "directions": directions(shown.memory),
        "moved": moving(shown),
        "rising": risen,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save(figure, folder / f"memory-{name}.png")
    print("\n".join([*remembered_values, *risen_values]))


def save(figure: Figure, path: Path) -> None:
    """Write a small PNG."""
    buffer = io.BytesIO()
    with mpl.rc_context({"savefig.facecolor": "white"}):
        figure.savefig(buffer, format="png", dpi=90)
    Image.open(buffer).convert("RGB").quantize(NUM_COLORS).save(path, optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
