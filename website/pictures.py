"""The pictures of "How the memory works": python -m website.pictures [FOLDER].

The first and the fourth are drawings; the others show what the shipped model of glyphs computes.
"""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image
from torch import Tensor

import vsm
from vsm.data import ImageDataset
from vsm.evaluation.protocol import EpisodeProtocol
from vsm.evaluation.statistics import estimate
from vsm.experiments.comparison import ModelOnData, load_for, measure
from vsm.experiments.episode_plots import recall_sheet
from vsm.experiments.gaussian_plots import (
    directions,
    episode_of,
    moved_prototypes,
    rising_accuracy,
)
from vsm.experiments.measures import ShownEpisode, look_at_episodes
from vsm.experiments.plots import COLORS, show_image
from vsm.memory import GaussianMemory
from vsm.seeding import generator

MODEL = "glyphs-5w1s"
FOLDER = Path(__file__).parents[1] / "docs" / "images"
EPISODE = 3  # of the list that evaluation uses
REMEMBERED = (0, 1, 2, 4, 8)
TASKS, QUERIES = 100, 5
SIZES, EPISODES = (0, 4, 16, 64, 256), 1000
COLORS_KEPT = 64  # of a picture file


@dataclass(frozen=True)
class Shown:
    """The shipped model, its data, and one episode of five new characters."""

    run: ModelOnData
    dataset: ImageDataset
    episode: ShownEpisode

    @property
    def memory(self) -> GaussianMemory:
        """The class statistics."""
        memory = self.run.trained.state
        assert isinstance(memory, GaussianMemory)
        return memory

    @property
    def slots(self) -> Tensor:
        """Means of the remembered classes, where they are read ``[A, D]``."""
        return self.memory.reader.slots

    @property
    def slot_ids(self) -> list[int]:
        """The class of each slot."""
        names = {name: number for number, name in enumerate(self.dataset.class_names)}
        memory = self.run.trained.memory
        assert memory is not None
        return [names[name] for name in memory.names]


def look() -> Shown:
    """Load the model, and run one episode."""
    protocol = EpisodeProtocol("glyphs", "test", way=5, shot=1, queries=1, episodes=2, seed=0)
    run = load_for(Path(MODEL), protocol)
    assert isinstance(run.dataset, ImageDataset)
    *_, episode = look_at_episodes(measure(run, protocol), run.dataset, EPISODE + 1, queries=1)
    return Shown(run, run.dataset, episode)


def flow() -> Figure:
    """Show what depends on what, from pictures to answers and back into the memory."""
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 92), ylim=(4, 40))
    axes.axis("off")
    _box(axes, 1, 24, "examples\nof a new class", "#eeeeee")
    _box(axes, 20, 24, "features\nh", "#eeeeee")
    _box(axes, 39, 24, "recollection\nm", "#c9ebf7")
    _box(axes, 58, 24, "prototype\nz", "#f0e6b8")
    _box(axes, 77, 24, "answer\ny", "#bfe0c4")
    _box(axes, 39, 6, "memory\nM: class statistics", "#c3d6ea")
    _box(axes, 77, 6, "features of\na new picture", "#eeeeee")
    for start in (15, 34, 53, 72):
        _arrow(axes, (start, 28), (start + 4.6, 28))
    _arrow(axes, (46, 15), (46, 23.6), "classes like h,\nweighed by λ (Eq. 9)")
    _arrow(axes, (84, 15), (84, 23.6), "density about z", left=True)
    _arrow(axes, (27, 33), (64, 33), "what the examples say themselves", curve=-0.18)
    _arrow(axes, (27, 23.6), (38.6, 11), "counts, means,\nscatter, added\nafterwards", dashed=True)
    return figure


def _box(axes: Axes, left: float, bottom: float, text: str, color: str) -> None:
    shape = FancyBboxPatch(
        (left, bottom), 14, 9, boxstyle="round,pad=0,rounding_size=1.4", fc=color, ec="#333333"
    )
    axes.add_patch(shape)
    axes.text(left + 7, bottom + 4.5, text, ha="center", va="center", fontsize=9)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    curve: float = 0.0,
    dashed: bool = False,
    left: bool = False,
) -> None:
    style = {
        "arrowstyle": "-|>",
        "color": "#333333",
        "linestyle": "--" if dashed else "-",
        "connectionstyle": f"arc3,rad={curve}",
    }
    axes.annotate("", end, start, arrowprops=style)
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    if curve:
        axes.text(middle[0], middle[1] + 4, text, ha="center", fontsize=8)
    elif dashed:
        axes.text(middle[0] - 1.5, middle[1] - 2, text, ha="right", va="center", fontsize=8)
    else:
        side, alignment = (-1.2, "right") if left else (1.2, "left")
        axes.text(middle[0] + side, middle[1], text, ha=alignment, va="center", fontsize=8)


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
    slots = shown.slots[:, :2].numpy()
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
        show_image(inset, shown.dataset, int(shown.episode.support_ids[n, 0]))
        for spine in inset.spines.values():
            spine.set(color=COLORS[n], linewidth=2.5)
    axes.set(xticks=[], yticks=[])
    axes.margins(y=0.16)
    return figure


def remembering(shown: Shown) -> tuple[Figure, list[str]]:
    """Measure one-shot accuracy when more or fewer other images of the classes are remembered.

    Returns:
        The picture, and a line for each of its points.
    """
    trained = vsm.load(MODEL)
    means, intervals, told = [], [], []
    for count in REMEMBERED:
        accuracy = estimate(
            torch.tensor([_accuracy(trained, shown.dataset, task, count) for task in range(TASKS)])
        )
        means.append(100 * accuracy.mean)
        intervals.append(100 * accuracy.ci95)
        told.append(f"{count} remembered: {accuracy.mean:.1%} ± {accuracy.ci95:.1%}")
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(REMEMBERED, means, intervals, marker="o", capsize=3, color=COLORS[0])
    axes.set(
        xlabel="other images of each class that the memory holds",
        ylabel="accuracy with one example (%)",
        xticks=REMEMBERED,
    )
    axes.grid(alpha=0.25)
    return figure, told


def rising(shown: Shown) -> tuple[Figure, list[str]]:
    """Measure accuracy when the memory is learned of more or fewer classes."""
    told, found = [], {}
    sizes = [*SIZES, len(shown.memory)]
    for shot in (1, 5):
        protocol = EpisodeProtocol("glyphs", "test", 5, shot, 15, EPISODES, seed=0)
        measured = [measure(shown.run.first_slots(size), protocol) for size in sizes]
        found[shot] = [one.evaluation.accuracy for one in measured]
        pairs = zip(sizes, found[shot], strict=True)
        told += [
            f"{size} classes, {shot}-shot: {100 * one.mean:.2f} ± {100 * one.ci95:.2f}"
            for size, one in pairs
        ]
    return rising_accuracy(sizes, found), told


def moving(shown: Shown) -> Figure:
    """Show where the memory moves the prototypes of one episode."""
    protocol = EpisodeProtocol("glyphs", "test", way=5, shot=1, queries=15, episodes=2, seed=0)
    inferred, queries = episode_of(shown.run, protocol.sampler(shown.dataset))
    names = [f"class {n + 1}" for n in range(5)]
    return moved_prototypes(inferred, queries, names, shown.memory.reader.ratios)


def _accuracy(trained: vsm.TrainedModel, dataset: ImageDataset, task: int, count: int) -> float:
    """Return how many of five new classes' pictures are told apart, ``count`` images later."""
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
    pictures = [
        dataset.images[image_id] for _, ids in chosen for image_id in ids[first : first + count]
    ]
    return pictures, [name for name, _ in chosen for _ in range(count)]


def main(folder: Path = FOLDER) -> None:
    """Draw all pictures."""
    shown = look()
    remembered, told = remembering(shown)
    risen, also_told = rising(shown)
    figures = {
        "flow": flow(),
        "recall": recall_sheet(shown.episode, shown.dataset, shown.slot_ids),
        "map": memory_map(shown),
        "bayes": bayes(),
        "remembering": remembered,
        "directions": directions(shown.memory),
        "moved": moving(shown),
        "rising": risen,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"savefig.facecolor": "white"}):
        for name, figure in figures.items():
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png", dpi=90)
            small = Image.open(drawn).convert("RGB").quantize(COLORS_KEPT)
            small.save(folder / f"memory-{name}.png", optimize=True)
    print("\n".join([*told, *also_told]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
