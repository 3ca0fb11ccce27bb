"""The pictures of a study: what a memory gives, and single answers that it changed.

Charts show figures of a result file; pictures of answers show images of the dataset. Needs
matplotlib.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from vsm.system.colors import COLORS
from vsm.system.files import atomic_path
from vsm_lab.plots import (
    RIGHT,
    WRONG,
    color_of,
    draw_probabilities,
    hide_spines,
    png,
    show_image,
    svg,
)
from vsm_lab.study.definition import Found, Study, condition_of

if TYPE_CHECKING:
    from vsm.data import ImageDataset

FEWEST_SIZES = 3  # two points make no curve
MOST_CLASSES_NAMED = 40
MOST_CLASSES_DRAWN = 10  # an episode of more does not fit a picture
MOST_SUPPORT_DRAWN = 5


def chart(found: Found, name: str) -> bytes | None:
    """Draw accuracy against memory size and gain against nearness as SVG, if there are any."""
    sizes = found.get("memory_sizes") or []
    gains = (found.get("gains") or {}).get("classes", [])
    panels: list[Callable[[Axes], None]] = []
    if len(sizes) >= FEWEST_SIZES:
        panels.append(lambda axes: _accuracy_against_size(axes, sizes))
    if gains:
        panels.append(lambda axes: _gain_against_nearness(axes, gains))
    if not panels:
        return None
    figure = Figure(figsize=(5.2 * len(panels), 4), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
        hide_spines(axes, "top", "right")
    return svg(figure, name)


def curves(runs: Sequence[Found], name: str) -> bytes:
    """Return accuracy on validation classes against steps as SVG: a line for every run."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    labels = list(dict.fromkeys(run["row"] for run in runs))
    for run in runs:
        steps, means, widths = zip(*run["validations"], strict=True)
        axes.errorbar(
            steps,
            [100 * mean for mean in means],
            [100 * width for width in widths],
            label=f"{run['row']}, seed {run['seed']}",
            color=color_of(labels.index(run["row"])),
            linewidth=1,
            capsize=2,
        )
    axes.set_xlabel("training steps")
    axes.set_ylabel("accuracy on validation classes, %")
    axes.legend(fontsize=7, loc="best")
    hide_spines(axes, "top", "right")
    return svg(figure, name)


def _accuracy_against_size(axes: Axes, sizes: list[Found]) -> None:
    """One point per size, with its interval."""
    slots = [sum(one["slots"]) / len(one["slots"]) for one in sizes]
    means = [100 * one["mean"] for one in sizes]
    widths = [100 * (one["ci95"] or 0.0) for one in sizes]
    axes.errorbar(slots, means, widths, marker="o", capsize=3, color=COLORS[0])
    axes.set_xscale("symlog" if min(slots) == 0 else "log")
    axes.set_xticks(slots, [f"{size:g}" for size in slots])
    axes.minorticks_off()
    axes.set_xlabel("slots of the memory")
    axes.set_ylabel("accuracy, %")


def _gain_against_nearness(axes: Axes, classes: list[Found]) -> None:
    """One point per class, named where they fit."""
    near = [one["nearness"] for one in classes]
    gain = [100 * one["gain"] for one in classes]
    axes.axhline(0, color="#999999", linewidth=1)
    axes.scatter(near, gain, s=18, color=[RIGHT if value > 0 else WRONG for value in gain])
    if len(classes) <= MOST_CLASSES_NAMED:
        for one, x, y in zip(classes, near, gain, strict=True):
            axes.annotate(
                one["class"], (x, y), (3, 3), textcoords="offset points", fontsize=7, color="#444"
            )
    axes.set_xlabel("cosine of the class to the nearest remembered one")
    axes.set_ylabel("gain by memory, points")


def draw_pictures(study: Study, results: Found, dataset: "ImageDataset") -> int:
    """Draw every answer that a result file shows, as PNG, and return how many there are."""
    count = 0
    for found in results["conditions"]:
        shown = (found.get("changes") or {"shown": []})["shown"]
        for position, change in enumerate(shown if found["way"] <= MOST_CLASSES_DRAWN else []):
            name = condition_of(found).picture_name(position, change["kind"])
            with atomic_path(study.figures / f"{name}.png") as temporary:
                temporary.write_bytes(png(draw_change(change, dataset)))
            count += 1
    return count


def draw_change(change: Found, dataset: "ImageDataset") -> Figure:
    """Show the classes with what each recalled, the query, and its probabilities.

    One row per class: its support images, and the remembered classes it recalled, each by an image
    of that class and λ. To the right the query, and below it the probability of every class without
    and with memory.
    """
    way, recalled = len(change["classes"]), change["recalled"]
    support = [images[:MOST_SUPPORT_DRAWN] for images in change["support"]]
    columns = len(support[0]) + max((len(row) for row in recalled), default=0)
    figure = Figure(figsize=(1.25 * columns + 4.2, 1.35 * way), layout="constrained")
    halves = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.25 * columns, 4.2])
    left, right = halves[0]
    grid = left.add_gridspec(way, columns)
    for n, name in enumerate(change["classes"]):
        for place, image in enumerate(support[n]):
            axes = left.add_subplot(grid[n, place])
            show_image(axes, dataset, image, color_of(n))
            title = "" if place else f"{n + 1}: {_short(name)}"
            axes.set_title(title, fontsize=8, color=color_of(n), weight="bold")
        for rank, slot in enumerate(recalled[n] if recalled else []):
            axes = left.add_subplot(grid[n, len(support[n]) + rank])
            show_image(axes, dataset, slot["image"])
            axes.set_title(f"λ = {slot['weight']:.2f}", fontsize=8)
            axes.set_xlabel(_short(slot["class"]), fontsize=7, color="#666666")
    _draw_query(right, change, dataset)
    return figure


def _draw_query(part: SubFigure, change: Found, dataset: "ImageDataset") -> None:
    query, before, after = part.subplots(3, 1, height_ratios=[1.5, 1, 1])
    show_image(query, dataset, change["query"])
    query.set_title(f"query of class {change['true'] + 1}", fontsize=10, weight="bold")
    for axes, title, key in ((before, "without", "before"), (after, "with", "after")):
        probabilities = change[key]
        best = probabilities.index(max(probabilities))
        draw_probabilities(axes, probabilities)
        axes.set_xticks(range(1, len(probabilities) + 1))
        axes.tick_params(labelsize=8, length=0)
        color = RIGHT if best == change["true"] else WRONG
        text = f"{title} memory: class {best + 1}, {probabilities[best]:.0%}"
        axes.set_title(text, fontsize=9, color=color)
        hide_spines(axes, "top", "right")


def _short(name: str) -> str:
    return name.replace("_", " ").split("/")[-1]
