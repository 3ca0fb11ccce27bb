"""The pictures of a report: α, memory size, and prototype distributions. Needs matplotlib."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vsm.data import open_dataset
from vsm.experiments.comparison import evaluate_run
from vsm.experiments.document import Picture
from vsm.experiments.episode_plots import prototype_clouds
from vsm.experiments.execution import protocol_of
from vsm.experiments.measures import look_at_episodes
from vsm.experiments.paper.catalog import MEMORY_SIZES, RETENTIONS
from vsm.experiments.paper.results import Results
from vsm.experiments.plots import color_of, png
from vsm.experiments.store import JobStore

CLOUD_QUERIES = 10
EVERY_CLASS = "all"


def pictures(results: Results, store: JobStore) -> list[Picture]:
    """Draw what a table is shown by, as far as it is measured."""
    draw = {
        "table-10": _retention,
        "figure-2": _prototypes,
        "figure-3": _memory_size,
    }.get(results.plan.table.name)
    return draw(results, store) if draw else []


def _retention(results: Results, _: JobStore) -> list[Picture]:
    """α against accuracy: measured here, and in the paper."""
    names = [f"alpha-{alpha:.1f}" for alpha in RETENTIONS]
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    ours, paper = figure.subplots(1, 2)
    ours.set_title(f"measured here ({results.plan.budget.name} budget)", fontsize=10)
    paper.set_title("the paper", fontsize=10)
    drawn = 0
    for position, planned in enumerate(results.plan.columns):
        label = str(planned.column)
        drawn += _curve(ours, results, names, list(RETENTIONS), position, label)
    for at, column in enumerate(results.plan.table.columns):
        cells = [row.cells[at] for row in results.plan.table.rows]
        shown = [(x, c) for x, c in zip(RETENTIONS, cells, strict=True) if c is not None]
        values = [cell.value for _, cell in shown]
        intervals = [cell.interval or 0.0 for _, cell in shown]
        _error_bars(paper, [x for x, _ in shown], values, intervals, str(column), at)
    for axes in (ours, paper):
        _dress(axes, "α of Eq. 13: share of old content that an update keeps")
    caption = "Accuracy (%) against α, with 95% intervals. The panels may show different data."
    return [_picture(results, figure, caption)] if drawn else []


def _memory_size(results: Results, _: JobStore) -> list[Picture]:
    """Memory size against accuracy: bounded in training, and cut at test."""
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    sizes = [str(size) for size in MEMORY_SIZES]
    bounded = [(size, f"capacity-{size}") for size in (*sizes, EVERY_CLASS)]
    cut = [(size, f"slots-{size}") for size in ("0", *sizes)] + [(EVERY_CLASS, "capacity-all")]
    titles = ("slots in training and test", "slots at test, of a memory grown without bound")
    drawn = 0
    for panel, (points, title) in enumerate(zip((bounded, cut), titles, strict=True)):
        axes = figure.add_subplot(1, 2, panel + 1)
        for position, planned in enumerate(results.plan.columns):
            names = [name for _, name in points]
            places = list(map(float, range(len(points))))
            drawn += _curve(axes, results, names, places, position, str(planned.column))
        axes.set_xticks(range(len(points)), [size for size, _ in points])
        _dress(axes, title)
    caption = f"Accuracy (%) against memory size ({results.plan.budget.name} budget), with 95% "
    return [_picture(results, figure, caption + "intervals.")] if drawn else []


def _prototypes(results: Results, store: JobStore) -> list[Picture]:
    """One episode's prototype samples without and with memory, of the first seed."""
    drawn = []
    for position, planned in enumerate(results.plan.columns):
        dataset = open_dataset(planned.column.data)
        shown = {}
        for row in results.plan.table.rows:
            job = results.plan.cells.get((row.name, position, 0))
            if job is None or not store.is_done(job.after[0]):
                continue
            few = replace(protocol_of(job), episodes=2)
            measured = evaluate_run(store.run_folder(job.after[0]), few)
            queries = min(CLOUD_QUERIES, few.queries)
            [episode] = look_at_episodes(measured, dataset, 1, queries)
            shown[row.title] = episode
        if shown:
            caption = (
                f"Prototype samples of one test episode of {planned.column} with their "
                "two-standard-deviation ellipses, and its queries, each panel on its own plane of "
                f"greatest variance ({results.plan.budget.name} budget, seed 0)."
            )
            drawn.append(_picture(results, prototype_clouds(shown), caption, position))
    return drawn


def _curve(
    axes: Axes,
    results: Results,
    names: Sequence[str],
    places: Sequence[float],
    position: int,
    label: str,
) -> int:
    """Draw the rows that are measured, and return how many there are."""
    points = []
    for place, name in zip(places, names, strict=True):
        cell = results.cells.get((name, position))
        found = cell.estimate("accuracy") if cell else None
        if found is not None:
            points.append((place, 100 * found.mean, 100 * found.ci95))
    if points:
        x, y, error = zip(*points, strict=True)
        _error_bars(axes, x, y, error, label, position)
    return len(points)


def _error_bars(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    error: Sequence[float],
    label: str,
    position: int,
) -> None:
    axes.errorbar(x, y, error, label=label, color=color_of(position), capsize=2, marker="o", ms=3)


def _dress(axes: Axes, title: str) -> None:
    axes.set_xlabel(title)
    axes.set_ylabel("accuracy (%)")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def _picture(results: Results, figure: Figure, caption: str, position: int = 0) -> Picture:
    plan = results.plan
    data = plan.columns[position].column.data.replace(":", "-").replace("/", "-")
    name = f"{plan.table.name}-{plan.budget.name}-{data}"
    return Picture(name, png(figure), caption)
