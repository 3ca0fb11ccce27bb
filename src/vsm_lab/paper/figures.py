"""Plots of the paper's figures: memory size, and prototype distributions. Needs matplotlib."""

from dataclasses import replace

from matplotlib.figure import Figure

from vsm.data import open_dataset
from vsm.runs.loading import load
from vsm_lab.document import Plot
from vsm_lab.episode_plots import prototype_clouds
from vsm_lab.execution import protocol_of
from vsm_lab.job_files import JobStore
from vsm_lab.measures import look_at_episodes
from vsm_lab.paper.report import Results
from vsm_lab.plots import color_of, png

CLOUD_QUERIES = 10


def plots(results: Results, store: JobStore) -> list[Plot]:
    """Return the plots of a figure, as far as it is measured."""
    if results.plan.table.name == "figure-2":
        return _prototypes(results, store)
    if results.plan.table.name == "figure-3" and any(c.seeds for c in results.cells.values()):
        return [_memory_size(results)]
    return []


def _memory_size(results: Results) -> Plot:
    """Memory size against accuracy: bounded in training, and cut at test."""
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    bounded = [row for row in results.plan.table.rows if row.slots is None]
    cut = [row for row in results.plan.table.rows if row.slots is not None]
    panels = {
        "slots in training and test": bounded,
        "slots at test, of a memory grown without bound": [*cut, bounded[-1]],
    }
    for axes, (title, rows) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for position, planned in enumerate(results.plan.columns):
            cells = [results.cells.get((row.name, position)) for row in rows]
            found = [(x, cell.estimate()) for x, cell in enumerate(cells) if cell]
            points = [(x, 100 * one.mean, 100 * one.ci95) for x, one in found if one]
            if points:
                axes.errorbar(
                    *zip(*points, strict=True),
                    label=str(planned.column),
                    color=color_of(position),
                    capsize=2,
                    marker="o",
                    ms=3,
                )
                axes.legend(frameon=False, fontsize=8, loc="best")
        axes.set_xticks(range(len(rows)), [row.name.split("-")[1] for row in rows])
        axes.set(xlabel=title, ylabel="accuracy (%)")
        axes.grid(alpha=0.25)
    caption = f"Accuracy (%) against memory size ({results.plan.budget.name} budget), with 95% "
    return _plot(results, figure, caption + "intervals.")


def _prototypes(results: Results, store: JobStore) -> list[Plot]:
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
            drawn.append(_plot(results, prototype_clouds(shown), caption, position))
    return drawn


def _plot(results: Results, figure: Figure, caption: str, position: int = 0) -> Plot:
    plan = results.plan
    data = plan.columns[position].column.data.replace(":", "-").replace("/", "-")
    file = f"figures/{plan.table.name}-{plan.budget.name}-{data}.png"
    return Plot(file, png(figure), caption)
