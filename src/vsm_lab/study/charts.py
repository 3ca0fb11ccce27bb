"""Charts of a study: what the memory gives, and validation accuracy while training."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vsm.system.colors import COLORS
from vsm_lab.plots import RIGHT, WRONG, color_of, hide_spines, svg
from vsm_lab.study.definition import Found

FEWEST_SIZES = 3  # two points make no curve
MOST_CLASSES_NAMED = 40


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
