"""Plots of a report: α, memory size, and prototype distributions. Needs matplotlib."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vsm.data import open_dataset
from vsm.runs.loading import load
from vsm_lab.document import Picture
from vsm_lab.episode_plots import prototype_clouds
from vsm_lab.execution import protocol_of
from vsm_lab.measures import look_at_episodes
from vsm_lab.paper.catalog import Column, Row
from vsm_lab.paper.report import Results
from vsm_lab.plots import color_of, png
from vsm_lab.store import JobStore

CLOUD_QUERIES = 10
Point = tuple[float, float, float]
"""A place, an accuracy in percent, and its interval."""


def plots(results: Results, store: JobStore) -> list[Picture]:
    """Return the plots of a table, as far as it is measured."""
    if results.plan.table.name == "figure-2":
        return _prototypes(results, store)
    draw = {"table-10": _retention, "figure-3": _memory_size}.get(results.plan.table.name)
    if draw is None or not any(cell.seeds for cell in results.cells.values()):
        return []
    return [draw(results)]


def _retention(results: Results) -> Picture:
    """α against accuracy: measured here, and in the paper."""
    plan, rows = results.plan, results.plan.table.measured_rows
    places = [float((row.changes or {})["memory.retention"]) for row in rows]
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    ours, paper = figure.subplots(1, 2)
    ours.set_title(f"measured here ({plan.budget.name} budget)", fontsize=10)
    paper.set_title("the paper", fontsize=10)
    for position, planned in enumerate(plan.columns):
        _curve(ours, position, planned.column, _measured(results, rows, places, position))
    for at, column in enumerate(plan.table.columns):
        cells = [(x, row.cells[at]) for x, row in zip(places, rows, strict=True)]
        printed = [(x, cell.value, cell.interval or 0.0) for x, cell in cells if cell]
        _curve(paper, at, column, printed)
    for axes in (ours, paper):
        _label(axes, "α of Eq. 13: share of old content that an update keeps")
    caption = "Accuracy (%) against α, with 95% intervals. The panels may show different data."
    return _picture(results, figure, caption)


def _memory_size(results: Results) -> Picture:
    """Memory size against accuracy: bounded in training, and cut at test."""
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    bounded = [row for row in results.plan.table.rows if row.slots is None]
    cut = [row for row in results.plan.table.rows if row.slots is not None]
    panels = {
        "slots in training and test": bounded,
        "slots at test, of a memory grown without bound": [*cut, bounded[-1]],
    }
    for axes, (title, rows) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        places = range(len(rows))
        for position, planned in enumerate(results.plan.columns):
            _curve(axes, position, planned.column, _measured(results, rows, places, position))
        axes.set_xticks(places, [row.name.split("-")[1] for row in rows])
        _label(axes, title)
    caption = f"Accuracy (%) against memory size ({results.plan.budget.name} budget), with 95% "
    return _picture(results, figure, caption + "intervals.")


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
            measured = load(store.run_folder(job.after[0])).on(few).measure(few)
            queries = min(CLOUD_QUERIES, few.queries)
            [shown[row.title]] = look_at_episodes(measured, dataset, 1, queries)
        if shown:
            caption = (
                f"Prototype samples of one test episode of {planned.column} with their "
                "two-standard-deviation ellipses, and its queries, each panel on its own plane of "
                f"greatest variance ({results.plan.budget.name} budget, seed 0)."
            )
            drawn.append(_picture(results, prototype_clouds(shown), caption, position))
    return drawn


def _measured(
    results: Results, rows: Sequence[Row], places: Sequence[float], position: int
) -> list[Point]:
    """Return the rows that are measured in one column."""
    cells = [
        (x, results.cells.get((row.name, position))) for x, row in zip(places, rows, strict=True)
    ]
    estimates = [(x, cell.estimate()) for x, cell in cells if cell]
    return [(x, 100 * found.mean, 100 * found.ci95) for x, found in estimates if found]


def _curve(axes: Axes, position: int, column: Column, points: Sequence[Point]) -> None:
    if points:
        x, y, error = zip(*points, strict=True)
        color = color_of(position)
        axes.errorbar(x, y, error, label=str(column), color=color, capsize=2, marker="o", ms=3)


def _label(axes: Axes, title: str) -> None:
    axes.set_xlabel(title)
    axes.set_ylabel("accuracy (%)")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="best")


def _picture(results: Results, figure: Figure, caption: str, position: int = 0) -> Picture:
    plan = results.plan
    data = plan.columns[position].column.data.replace(":", "-").replace("/", "-")
    return Picture(f"{plan.table.name}-{plan.budget.name}-{data}", png(figure), caption)
