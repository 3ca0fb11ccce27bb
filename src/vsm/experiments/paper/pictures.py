"""The pictures of a report: α, memory size, and prototype distributions. Needs matplotlib."""

from collections.abc import Mapping
from dataclasses import replace

from matplotlib.figure import Figure

from vsm.data import open_dataset
from vsm.experiments.comparison import evaluate_run
from vsm.experiments.document import Picture
from vsm.experiments.episode_plots import prototype_clouds
from vsm.experiments.execution import protocol_of
from vsm.experiments.measures import look_at_episodes
from vsm.experiments.paper.results import Results
from vsm.experiments.plots import color_of, png
from vsm.experiments.store import JobStore

CLOUD_QUERIES = 10
EVERY_SLOT = "capacity-all"
Curves = dict[str, list[tuple[float | str, float, float]]]
"""By label, the points of a curve: place, accuracy and its interval in percent."""


def pictures(results: Results, store: JobStore) -> list[Picture]:
    """Draw what a table is shown by, as far as it is measured."""
    name, budget = results.plan.table.name, results.plan.budget.name
    if name == "figure-2":
        return _prototypes(results, store)
    if name == "table-10":
        places = {
            row.name: float(row.name.removeprefix("alpha-")) for row in results.plan.table.rows
        }
        ours = _measured(results, places)
        share = "α of Eq. 13: share of old content that an update keeps"
        panels = {f"measured here ({budget} budget)": ours, "the paper": _printed(results, places)}
        caption = "Accuracy (%) against α, with 95% intervals. The panels may show different data."
        return _curves(results, ours, panels, share, caption)
    if name == "figure-3":
        bounded, cut = (_measured(results, _sizes(results, kind)) for kind in ("capacity", "slots"))
        panels = {
            "slots in training and test": bounded,
            "slots at test, of an unbounded memory": cut,
        }
        caption = f"Accuracy (%) against memory size ({budget} budget), with 95% intervals."
        return _curves(results, bounded | cut, panels, "slots", caption)
    return []


def _sizes(results: Results, kind: str) -> dict[str, str]:
    """Return the rows of one kind and how many slots each has; all of them come last."""
    named = {row.name: row.name.rpartition("-")[2] for row in results.plan.table.rows}
    sizes = {name: size for name, size in named.items() if name.startswith(kind)}
    return {name: size for name, size in sizes.items() if size != "all"} | {EVERY_SLOT: "all"}


def _measured(results: Results, places: Mapping[str, float | str]) -> Curves:
    """Return what was measured of rows, by column."""
    curves: Curves = {}
    for position, planned in enumerate(results.plan.columns):
        for name, place in places.items():
            cell = results.cells.get((name, position))
            found = cell.estimate() if cell else None
            if found is not None:
                point = (place, 100 * found.mean, 100 * found.ci95)
                curves.setdefault(str(planned.column), []).append(point)
    return curves


def _printed(results: Results, places: Mapping[str, float | str]) -> Curves:
    """Return what the paper prints of rows, by column."""
    table = results.plan.table
    return {
        str(column): [
            (places[row.name], cell.value, cell.interval or 0.0)
            for row in table.rows
            if (cell := row.cells[at]) is not None
        ]
        for at, column in enumerate(table.columns)
    }


def _curves(
    results: Results, measured: Curves, panels: Mapping[str, Curves], across: str, caption: str
) -> list[Picture]:
    """Draw curves side by side, if anything was measured."""
    if not measured:
        return []
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    figure.subplots(1, len(panels))
    for axes, (title, curves) in zip(figure.axes, panels.items(), strict=True):
        for position, (label, points) in enumerate(curves.items()):
            x, y, error = zip(*points, strict=True)
            color = color_of(position)
            axes.errorbar(x, y, error, label=label, color=color, capsize=2, marker="o", ms=3)
        axes.set_title(title, fontsize=10)
        axes.set(xlabel=across, ylabel="accuracy (%)")
        axes.grid(alpha=0.25)
        if curves:
            axes.legend(frameon=False, fontsize=8)
    return [_picture(results, figure, caption)]


def _prototypes(results: Results, store: JobStore) -> list[Picture]:
    """One episode's prototype samples without and with memory, of the first seed."""
    drawn = []
    for position, planned in enumerate(results.plan.columns):
        shown = {}
        for row in results.plan.table.rows:
            job = results.plan.cells.get((row.name, position, 0))
            if job is None or not store.is_done(job.after[0]):
                continue
            few = replace(protocol_of(job), episodes=2)
            measured = evaluate_run(store.run_folder(job.after[0]), few)
            queries = min(CLOUD_QUERIES, few.queries)
            [shown[row.title]] = look_at_episodes(measured, open_dataset(few.data), 1, queries)
        if shown:
            caption = (
                f"Prototype samples of one test episode of {planned.column} with their "
                "two-standard-deviation ellipses, and its queries, each panel on its own plane of "
                f"greatest variance ({results.plan.budget.name} budget, seed 0)."
            )
            drawn.append(_picture(results, prototype_clouds(shown), caption, position))
    return drawn


def _picture(results: Results, figure: Figure, caption: str, position: int = 0) -> Picture:
    plan = results.plan
    data = plan.columns[position].column.data.replace(":", "-").replace("/", "-")
    return Picture(f"{plan.table.name}-{plan.budget.name}-{data}", png(figure), caption)
