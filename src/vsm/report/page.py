"""The page: tables and pictures in one HTML file that needs nothing else."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from vsm.data import Dataset, ImageDataset
from vsm.errors import DataError
from vsm.evaluation.comparison import MeasuredRun, paired_differences
from vsm.report import figures
from vsm.report.showcase import look_at_episodes
from vsm.runs.trained_model import RunDirectory
from vsm.system.files import write_text

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
h1 { margin-bottom: 0 } h2 { margin-top: 2.6rem; border-bottom: 1px solid #ddd }
.sub, figcaption { color: #555 } figure { margin: 1rem 0 } img { max-width: 100% }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .35rem .9rem; text-align: right }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 2px solid #444 }
tbody tr:nth-child(even) { background: #f5f7fa }
.clear { font-weight: 600 }
"""
NUM_EPISODES_SHOWN = 2
QUERIES_SHOWN = 3
CLOUD_QUERIES = 10


def write_report(measured: Sequence[MeasuredRun], dataset: Dataset, output: Path) -> Path:
    """Write an HTML report about runs measured on identical episodes and return its path.

    Pictures of single episodes are of the last run that remembers classes, else of the last run.
    """
    if not isinstance(dataset, ImageDataset):
        raise DataError(f"report: its pictures need images, but {dataset.name} holds features")
    names = unique_names(measured)
    chosen = next((one for one in reversed(measured) if one.trained.slot_names), measured[-1])
    episodes = look_at_episodes(chosen, dataset, NUM_EPISODES_SHOWN, QUERIES_SHOWN)
    sections = [
        _heading(chosen, dataset),
        "<h2>How well</h2>",
        _scores(measured, names),
        _differences(measured, names),
        "<h2>Episodes</h2>",
        *(
            _figure(
                figures.episode_sheet(episode, dataset),
                f"An episode of {names[measured.index(chosen)]}. On top the labeled image of each "
                "new class (the first, if there are more), below it queries of that class with the "
                "predicted class, its probability, and the probability of every class.",
            )
            for episode in episodes
        ),
    ]
    if chosen.trained.memory is not None and chosen.trained.slot_names:
        slot_ids = chosen.trained.memory.slot_classes
        sections += [
            "<h2>What was recalled</h2>",
            _figure(
                figures.recall_sheet(episodes[0], dataset, slot_ids),
                "Each new class, and the remembered classes it recalled most strongly (Eq. 9). "
                f"The memory holds {len(slot_ids)} classes, none of which is in the test.",
            ),
        ]
    sections += [
        "<h2>Prototype distributions</h2>",
        _figure(
            figures.prototype_clouds(
                {
                    _cloud_title(one, name): look_at_episodes(one, dataset, 1, CLOUD_QUERIES)[0]
                    for one, name in zip(measured, names, strict=True)
                    if one.trained.settings.method != "protonet"
                }
            ),
            "The same episode under each method: samples of each class's prototype with their "
            "two-standard-deviation ellipse, and the queries, projected on the plane of greatest "
            "variance of that panel.",
        ),
        "<h2>Learning</h2>",
        _figure(
            figures.learning_curves(
                {
                    name: RunDirectory(one.path).read_metrics()
                    for one, name in zip(measured, names, strict=True)
                }
            ),
            "Training cross entropy (smoothed), and accuracy on the validation classes with 95% "
            "intervals.",
        ),
    ]
    if chosen.trained.slot_names:
        sections.append(
            _figure(
                figures.memory_growth(RunDirectory(chosen.path).read_metrics()),
                "The memory while it was built: classes remembered, how sharply it is addressed, "
                "and the gradient that teaches the attention vector.",
            )
        )
    sections += [
        "<h2>Calibration</h2>",
        _figure(
            figures.reliability_diagram(measured, names),
            "Accuracy of predictions against their confidence; on the dashed line a model knows "
            "exactly how often it is right.",
        ),
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>VSM report</title>'
        f"<style>{STYLE}</style>\n" + "\n".join(sections) + "\n</html>\n"
    )
    write_text(output, page)
    return output


def unique_names(measured: Sequence[MeasuredRun]) -> list[str]:
    """Name runs by their method; where two share one, by their directory too."""
    methods = [one.trained.settings.method for one in measured]
    return [
        method if methods.count(method) == 1 else f"{method} ({one.path.name})"
        for method, one in zip(methods, measured, strict=True)
    ]


def _cloud_title(measured: MeasuredRun, name: str) -> str:
    return f"{name}: {'without' if measured.trained.model.recall is None else 'with'} memory"


def _heading(measured: MeasuredRun, dataset: ImageDataset) -> str:
    protocol = measured.protocol
    return (
        "<h1>Few-shot learning with a long-term memory</h1>"
        f'<p class="sub">{html.escape(dataset.name)}: {len(dataset.classes(protocol.split))} '
        f"{protocol.split} classes never seen in training, {protocol.way}-way "
        f"{protocol.shot}-shot, {protocol.queries} queries a class, {protocol.episodes} identical "
        f"episodes for every method (seed {protocol.seed}, {protocol.batch_norm} batch norm).</p>"
    )


def _scores(measured: Sequence[MeasuredRun], names: Sequence[str]) -> str:
    rows = []
    for one, name in zip(measured, names, strict=True):
        result = one.as_dict()
        rows.append(
            [
                name,
                f"{result['accuracy']:.2%} ± {result['ci95']:.2%}",
                f"{result['nll']:.3f}",
                f"{result['ece']:.2%}",
                str(len(one.trained.slot_names)) if one.trained.slot_names else "–",
            ]
        )
    return _table(
        ["method", "accuracy, 95% interval", "NLL", "calibration error", "classes remembered"], rows
    )


def _differences(measured: Sequence[MeasuredRun], names: Sequence[str]) -> str:
    named = {one.label: name for one, name in zip(measured, names, strict=True)}
    rows = []
    for difference in paired_differences(measured):
        mean, ci95 = difference.estimate.mean, difference.estimate.ci95
        rows.append(
            [
                f"{named[difference.a]} − {named[difference.b]}",
                f"{100 * mean:+.2f} ± {100 * ci95:.2f}",
                "clear of zero" if abs(mean) > ci95 else "not clear of zero",
            ]
        )
    return _table(["paired difference", "points of accuracy", ""], rows) if rows else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure(figure: Figure, caption: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    text = html.escape(caption)
    return (
        f'<figure><img alt="{text}" src="data:image/png;base64,{encoded}">'
        f"<figcaption>{text}</figcaption></figure>"
    )
