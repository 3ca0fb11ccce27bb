"""Charts of what a memory gives: accuracy against its size, gain against nearness.

They show figures of a result file and no image of any dataset. Needs matplotlib.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vsm.colors import COLORS, RIGHT, WRONG
from vsm.system.files import atomic_path

FEWEST_SIZES = 3  # two points make no curve
MOST_CLASSES_NAMED = 40


def draw_chart(found: Mapping[str, Any], path: Path) -> bool:
    """Draw what a condition of a result file has to show as SVG; tell whether it has anything."""
    sizes = found.get("memory_sizes") or []
    gains = (found.get("gains") or {}).get("classes", [])
    panels: list[Callable[[Axes], None]] = [
        *([lambda axes: _accuracy_against_size(axes, sizes)] if len(sizes) >= FEWEST_SIZES else []),
        *([lambda axes: _gain_against_nearness(axes, gains)] if gains else []),
    ]
    if not panels:
        return False
    figure = Figure(figsize=(5.2 * len(panels), 4), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    with atomic_path(path) as temporary, rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    return True


def _accuracy_against_size(axes: Axes, sizes: list[dict[str, Any]]) -> None:
    """One point a size, with its interval."""
    slots = [sum(one["slots"]) / len(one["slots"]) for one in sizes]
    means = [100 * one["mean"] for one in sizes]
    widths = [100 * (one["ci95"] or 0.0) for one in sizes]
    axes.errorbar(slots, means, widths, marker="o", capsize=3, color=COLORS[0])
    axes.set_xscale("symlog" if min(slots) == 0 else "log")
    axes.set_xticks(slots, [f"{size:g}" for size in slots])
    axes.minorticks_off()
    axes.set_xlabel("slots of the memory")
    axes.set_ylabel("accuracy, %")


def _gain_against_nearness(axes: Axes, classes: list[dict[str, Any]]) -> None:
    """One point a class, named where there is room."""
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
