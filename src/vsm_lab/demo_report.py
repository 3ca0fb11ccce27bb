"""The demo's report: tables and plots about runs in one HTML file that needs no other."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from vsm.data import ImageDataset
from vsm.runs.directory import RunDirectory
from vsm.runs.trained_model import Comparison, Measurement
from vsm.system.files import write_text
from vsm_lab import episode_plots as plots
from vsm_lab.document import Block, Heading, Plot, Table, Text, to_html
from vsm_lab.measures import look_at_episodes
from vsm_lab.plots import png

NUM_EPISODES_SHOWN = 2
QUERIES_SHOWN = 3
CLOUD_QUERIES = 10


def write_report(measured: Sequence[Measurement], dataset: ImageDataset, output: Path) -> Path:
    """Write an HTML report about runs of different methods on identical episodes; return its path.

    The last run is a Gaussian memory that was learned from the features of the one before. Plots of
    single episodes are of it.
    """
    runs: dict[str, Measurement] = {Path(one.label).name: one for one in measured}
    protocol = measured[-1].protocol
    trained = [(name, one) for name, one in runs.items() if one.trained.step]  # not only learned
    metrics = {name: RunDirectory(Path(one.label)).read_metrics() for name, one in trained}
    blocks: list[Block] = [
        Heading(1, "Few-shot learning with a long-term memory"),
        Text(
            f"{dataset.name}: {len(dataset.classes(protocol.split))} {protocol.split} classes "
            f"never seen in training, {protocol.way}-way {protocol.shot}-shot, {protocol.queries} "
            f"queries per class, {protocol.episodes} identical episodes for every method (seed "
            f"{protocol.seed}, {protocol.batch_norm} batch norm)."
        ),
        Heading(2, "Accuracy"),
        *_scores(runs),
        *_episodes(measured[-1], dataset, list(runs)[-1]),
        Heading(2, "What the memory has learned"),
        *_directions(measured[-1], dataset),
        Heading(2, "Prototype distributions"),
        _prototypes(runs, dataset),
        Heading(2, "Training"),
        _plot(
            plots.learning_curves(metrics),
            "Training cross entropy (smoothed), and accuracy on the validation classes with 95% "
            "intervals.",
        ),
        Heading(2, "Calibration"),
        _plot(
            plots.reliability_diagram(measured, list(runs)),
            "Accuracy of predictions against their confidence; on the dashed line a model knows "
            "exactly how often it is right.",
        ),
    ]
    write_text(output, to_html("VSM report", blocks))
    return output


def _scores(runs: dict[str, Measurement]) -> list[Block]:
    columns = ["method", "accuracy, 95% interval", "NLL", "calibration error", "classes remembered"]
    rows = [
        [
            name,
            f"{one.evaluation.accuracy.mean:.2%} ± {one.evaluation.accuracy.ci95:.2%}",
            f"{one.evaluation.nll:.3f}",
            f"{one.evaluation.reliability.expected_calibration_error:.2%}",
            "–" if one.trained.memory is None else str(len(one.trained.memory.names)),
        ]
        for name, one in runs.items()
    ]
    named = {one.label: name for name, one in runs.items()}
    differences = [
        [
            f"{named[one.a]} − {named[one.b]}",
            f"{100 * one.estimate.mean:+.2f} ± {100 * one.estimate.ci95:.2f}",
            "clear of zero" if abs(one.estimate.mean) > one.estimate.ci95 else "not clear of zero",
        ]
        for one in Comparison(list(runs.values())).differences
    ]
    paired = Table(["paired difference", "points of accuracy", ""], differences)
    return [Table(columns, rows), paired]


def _episodes(chosen: Measurement, dataset: ImageDataset, name: str) -> list[Block]:
    """Show two episodes, and what the classes of the first one recalled."""
    episodes = look_at_episodes(chosen, dataset, NUM_EPISODES_SHOWN, QUERIES_SHOWN)
    assert chosen.trained.state is not None
    slot_ids = chosen.trained.state.slot_classes
    caption = (
        f"An episode of {name}. On top the labeled image of each new class (the first, if there "
        "are more), below it queries of that class with the predicted class, its probability, and "
        "the probability of every class."
    )
    return [
        Heading(2, "Episodes"),
        *(_plot(plots.episode_sheet(episode, dataset), caption) for episode in episodes),
        Heading(2, "Recalled classes"),
        _plot(
            plots.recall_sheet(episodes[0], dataset, slot_ids),
            "Each new class, and the remembered classes it recalled most strongly (Eq. 9). The "
            f"memory holds {len(slot_ids)} classes, none of which is in the test.",
        ),
    ]


def _directions(chosen: Measurement, dataset: ImageDataset) -> list[Block]:
    """Show what class statistics hold, how they move prototypes, and what more classes add."""
    captions = {
        "directions": "Left: how much classes differ along each learned direction, in the variance "
        "within them. Right: how much the examples count there against what the memory expects.",
        "moved": "One episode along two learned directions: the mean of the examples (circle), "
        "what is recalled (cross), and the prototype between them (star), with the queries.",
        "rising": "Accuracy of a memory that holds so many classes; 0: no memory.",
    }
    figures = plots.memory_figures(chosen, dataset, [chosen.protocol.shot])
    return [_plot(figures[name], caption) for name, caption in captions.items()]


def _prototypes(runs: dict[str, Measurement], dataset: ImageDataset) -> Block:
    clouds = {
        f"{name}: {'without' if one.trained.memory is None else 'with'} memory": (
            look_at_episodes(one, dataset, 1, CLOUD_QUERIES)[0]
        )
        for name, one in runs.items()
        if one.trained.settings.method != "protonet"
    }
    return _plot(
        plots.prototype_clouds(clouds),
        "The same episode under each method: samples of each class's prototype with their "
        "two-standard-deviation ellipse, and the queries, projected on the plane of greatest "
        "variance of that panel.",
    )


def _plot(figure: Figure, caption: str) -> Plot:
    return Plot("plot.png", png(figure), caption)
