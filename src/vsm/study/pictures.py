"""Pictures of answers that the memory changed. Needs matplotlib."""

from typing import Any

from matplotlib.figure import Figure

from vsm.colors import COLORS, RIGHT, WRONG
from vsm.data import ImageDataset
from vsm.report.figures import show_image
from vsm.study.plan import MOST_CLASSES_DRAWN, Condition, Study, picture_name
from vsm.system.files import atomic_path

MOST_SUPPORT_DRAWN = 5


def draw_pictures(study: Study, results: dict[str, Any], dataset: ImageDataset) -> int:
    """Draw every answer that a result file shows, as PNG, and return how many there are."""
    count = 0
    for condition in results["conditions"]:
        shape = Condition(condition["way"], condition["shot"], condition["batch_norm"])
        shown = (condition.get("changes") or {"shown": []})["shown"]
        for position, change in enumerate(shown if shape.way <= MOST_CLASSES_DRAWN else []):
            name = picture_name(shape, position, change["kind"])
            with atomic_path(study.figures / f"{name}.png") as temporary:
                draw_change(change, dataset).savefig(temporary, format="png", dpi=130)
            count += 1
    return count


def draw_change(change: dict[str, Any], dataset: ImageDataset) -> Figure:
    """Show the classes with what each recalled, the query, and its probabilities.

    One row a class: its support images, and the remembered classes it recalled, each by an image
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
            show_image(axes, dataset, image)
            title = "" if place else f"{n + 1}: {_short(name)}"
            axes.set_title(title, fontsize=8, color=_color(n), weight="bold")
            for spine in axes.spines.values():
                spine.set_color(_color(n))
                spine.set_linewidth(2.5)
        for rank, slot in enumerate(recalled[n] if recalled else []):
            axes = left.add_subplot(grid[n, len(support[n]) + rank])
            show_image(axes, dataset, slot["image"])
            axes.set_title(f"λ = {slot['weight']:.2f}", fontsize=8)
            axes.set_xlabel(_short(slot["class"]), fontsize=7, color="#666666")
    query, before, after = right.subplots(3, 1, height_ratios=[1.5, 1, 1])
    show_image(query, dataset, change["query"])
    query.set_title(f"query of class {change['true'] + 1}", fontsize=10, weight="bold")
    for axes, title, key in ((before, "without", "before"), (after, "with", "after")):
        probabilities = change[key]
        best = probabilities.index(max(probabilities))
        axes.bar(range(1, way + 1), probabilities, color=[_color(n) for n in range(way)])
        axes.set_ylim(0, 1)
        axes.set_xticks(range(1, way + 1))
        axes.tick_params(labelsize=8, length=0)
        axes.set_title(
            f"{title} memory: class {best + 1}, {probabilities[best]:.0%}",
            fontsize=9,
            color=RIGHT if best == change["true"] else WRONG,
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure


def _color(position: int) -> str:
    return COLORS[position % len(COLORS)]


def _short(name: str) -> str:
    return name.replace("_", " ").split("/")[-1]
