"""The page of studies, rendered from result files alone."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vsm.errors import RunError
from vsm.experiments.document import Block, Heading, Picture, Table, Text, write_markdown
from vsm.experiments.study import uncertainty_page
from vsm.experiments.study.definition import (
    Condition,
    Study,
    StudySettings,
    UncertaintySettings,
    picture_name,
)

MOST_CLASSES_LISTED = 40
CHARTS = "charts"  # folder beside the page
Found = dict[str, Any]
PARTS = {"runs": {"study", "runs", "conditions"}, "uncertainty": {"study", "models"}}
"""Keys of a result file, by the kind of study."""
INTRODUCTION = (
    "Accuracy in percent, with 95% intervals. Over several training seeds the interval counts "
    "seeds and episodes as samples; a single seed's counts its episodes. NLL is the mean negative "
    "log-likelihood in nats, ECE the expected calibration error in 15 bins. T is one temperature, "
    "fitted on validation classes; NLL and ECE after it stand to its right. A difference is "
    "reference minus row, episode by episode, in points; its first interval is as above, its "
    "second resamples the test classes, and tells what other classes of the kind would give."
)


def read_results(study: Study) -> Found:
    """Read a result file, or say how to fix it."""
    again = f"run vsm study {study.path}"
    if not study.results.is_file():
        raise RunError(f"{study.results} is not there yet; {again} first")
    try:
        found: Found = json.loads(study.results.read_text(encoding="utf-8"))
        if not PARTS[study.settings.kind] <= found.keys():
            raise ValueError("parts are missing")
    except (ValueError, AttributeError) as error:
        raise RunError(f"{study.results} is half-written or damaged; {again} again") from error
    return found


def write_page(studies: Sequence[Study], page: Path) -> None:
    """Render the results of all studies into one Markdown file."""
    found = [(study, read_results(study)) for study in studies]
    files = " ".join(study.path.as_posix() for study in studies)
    command = f"`vsm study {files} --render {page.as_posix()}`"
    alone = studies[0].settings if len(studies) == 1 else None
    title = alone.title if isinstance(alone, UncertaintySettings) else "Results"
    blocks: list[Block] = [
        Heading(1, title),
        Text(f"Rendered from result files by {command}: no figure is typed by hand."),
    ]
    if any(isinstance(study.settings, StudySettings) for study in studies):
        blocks.append(Text(INTRODUCTION))
    for study, results in found:
        if isinstance(study.settings, StudySettings):
            blocks += study_blocks(study, results, page)
        else:
            blocks += uncertainty_page.study_blocks(results, alone is None)
    write_markdown(page, blocks)


def study_blocks(study: Study, results: Found, page: Path) -> list[Block]:
    """Return the page's part about one study of runs."""
    asked = results["study"]
    seeds = ", ".join(map(str, asked["seeds"]))
    split = asked.get("split", "test")  # files of version 0.1.0 did not say
    blocks: list[Block] = [
        Heading(2, asked["title"]),
        Text(
            f"{asked['data']}, {asked['episodes']} episodes of {split} classes (seed "
            f"{asked['episode_seed']}) with {asked['queries']} queries per class, the same for all "
            f"rows; training seeds {seeds}; reference: {asked['reference']}."
        ),
        *_inequality(results),
    ]
    for found in results["conditions"]:
        condition = Condition(found["way"], found["shot"], found["batch_norm"])
        blocks += [Heading(3, f"{asked['title']}: {condition}"), score_table(found)]
        if len(asked["seeds"]) > 1:
            blocks += [Text("Each seed by itself:"), _seed_table(found)]
        if found["differences"]:
            blocks += [Text(f"{asked['reference']} minus each other:"), difference_table(found)]
        blocks += _memory_sizes(found) + _gains(found) + _chart(study, condition, found)
        blocks += _changes(study, condition, found, page)
    return [*blocks, Heading(3, f"{asked['title']}: runs"), *_runs(results)]


def score_table(found: Found) -> Table:
    """Accuracy and calibration of every row and baseline under one condition."""
    return Table(
        ["", "accuracy", "NLL", "ECE", "T", "NLL at T", "ECE at T"],
        [
            [
                label,
                _percent(row),
                f"{row['nll']:.3f}",
                f"{row['ece']:.2%}",
                *(
                    (
                        f"{row['temperature']:.2f}",
                        f"{row['calibrated_nll']:.3f}",
                        f"{row['calibrated_ece']:.2%}",
                    )
                    if "temperature" in row
                    else ("–", "–", "–")
                ),
            ]
            for label, row in _all_rows(found)
        ],
    )


def difference_table(found: Found) -> Table:
    """Paired differences under one condition: over all seeds, and of each."""
    differences = found["differences"]
    seeds = [one["seed"] for one in next(iter(differences.values()), {"seeds": []})["seeds"]]
    several = seeds if len(seeds) > 1 else []
    return Table(
        ["", "difference", "± over classes", *(f"seed {seed} (± classes)" for seed in several)],
        [
            [
                f"− {label}",
                _points(row),
                _half_width(row["ci95_classes"]),
                *(
                    f"{_points(one)} ({_half_width(one['ci95_classes'])})"
                    for one in (row["seeds"] if several else [])
                ),
            ]
            for label, row in differences.items()
        ],
    )


def _seed_table(found: Found) -> Table:
    rows = _all_rows(found)
    seeds = [one["seed"] for one in rows[0][1]["seeds"]]
    return Table(
        ["", *(f"seed {seed}" for seed in seeds)],
        [[label, *map(_percent, row["seeds"])] for label, row in rows],
    )


def _all_rows(found: Found) -> list[tuple[str, Found]]:
    baselines = [(f"{name} (baseline)", row) for name, row in found["baselines"].items()]
    return [*found["rows"].items(), *baselines]


def _memory_sizes(found: Found) -> list[Block]:
    if not found.get("memory_sizes"):
        return []
    rows = [
        ["–".join(map(str, one["slots"])), _percent(one), str(one["subsets"])]
        for one in found["memory_sizes"]
    ]
    return [
        Text("The reference with part of its memory, the mean over choices of slots:"),
        Table(["slots", "accuracy", "choices"], rows),
    ]


def _gains(found: Found) -> list[Block]:
    if not found.get("gains"):
        return []
    classes, correlation = found["gains"]["classes"], found["gains"]["spearman"]
    text = "–" if correlation is None else f"{correlation:+.2f}"
    heading = Text(
        f"What each of {len(classes)} test classes gains by memory, and the cosine of its mean "
        f"feature to the nearest slot; Spearman's correlation {text}:"
    )
    if len(classes) <= MOST_CLASSES_LISTED:
        rows = [
            [one["class"], f"{one['nearness']:.2f}", f"{100 * one['gain']:+.2f}"] for one in classes
        ]
        return [heading, Table(["class", "cosine", "gain"], rows)]
    rows = [
        [
            f"{title} quarter",
            f"{_mean(part, 'nearness'):.2f}",
            f"{100 * _mean(part, 'gain'):+.2f}",
        ]
        for title, part in zip(
            ("nearest", "second", "third", "farthest"), _quarters(classes), strict=True
        )
    ]
    return [heading, Table(["classes", "mean cosine", "mean gain"], rows)]


def _chart(study: Study, condition: Condition, found: Found) -> list[Block]:
    """Draw both of the above, where matplotlib is installed."""
    try:
        from vsm.experiments.study.pictures import chart  # noqa: PLC0415 - an extra
    except ImportError:
        return []
    name = f"{study.path.stem}-{condition.way}way-{condition.shot}shot-{condition.batch_norm}"
    drawn = chart(found, name)
    caption = f"{study.settings.title}, {condition}: what the memory gives"
    return [] if drawn is None else [Picture(name, drawn, caption, CHARTS, ".svg")]


def _quarters(classes: Sequence[Found]) -> list[Sequence[Found]]:
    ends = [len(classes) * part // 4 for part in range(5)]
    return [classes[start:end] for start, end in pairwise(ends)]


def _mean(found: Sequence[Found], name: str) -> float:
    return sum(float(one[name]) for one in found) / len(found)


def _changes(study: Study, condition: Condition, found: Found, page: Path) -> list[Block]:
    changes = found.get("changes")
    if not changes:
        return []
    blocks: list[Block] = [
        Text(
            f"Of all answers of the first seed, memory turned {changes['turned_right']:.2%} from "
            f"wrong to right and {changes['misled']:.2%} from right to wrong."
        )
    ]
    folder = study.figures.resolve()
    if not folder.is_relative_to(page.parent.resolve()):
        return blocks  # a page that is shared must not lead to pictures that are not
    relative = folder.relative_to(page.parent.resolve()).as_posix()
    for position, change in enumerate(changes["shown"]):
        name = picture_name(condition, position, change["kind"])
        if (folder / f"{name}.png").is_file():
            blocks.append(Picture(name, None, _caption(change), relative))
    return blocks


def _caption(change: Found) -> str:
    true = change["true"]
    before, after = change["before"][true], change["after"][true]
    return (
        f"{change['kind'].capitalize()} (episode {change['episode']}, chosen for how much changed):"
        f" the probability of {change['classes'][true]} went from {before:.0%} to {after:.0%}. Each"
        " class is shown with what it recalled."
    )


def _inequality(results: Found) -> list[Block]:
    """Say so if rows were not trained equally long."""
    lengths = {(one["steps"], one["tasks"]) for one in results["runs"]}
    if len(lengths) == 1:
        [(steps, tasks)] = lengths
        return [Text(f"Every run was trained for {steps} steps of {tasks} episodes.")]
    return [Text("Not all runs were trained equally long; see the list of runs.")]


def _runs(results: Found) -> list[Block]:
    """List the trainings: those of one command together, whatever their seed."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for one in results["runs"]:
        groups.setdefault((one["row"], one["command"]), []).append(one)
    rows = [
        [
            label,
            f"{runs[0]['steps']} × {runs[0]['tasks']}",
            ", ".join(_minutes(one["seconds"]) for one in runs),
            f"`{command} --seed {'|'.join(str(one['seed']) for one in runs)}`",
        ]
        for (label, command), runs in groups.items()
    ]
    blocks: list[Block] = [Table(["row", "steps × tasks", "minutes of training", "command"], rows)]
    backbones = {one["init"]: one["init_seconds"] for one in results["runs"] if one["init"]}
    for init, seconds in backbones.items():
        blocks.append(
            Text(f"The backbone of `{init}` was trained for {_minutes(seconds)} minutes.")
        )
    return blocks


def _minutes(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds / 60:.1f}"


def _percent(row: Found) -> str:
    return f"{100 * row['mean']:.2f} ± {_half_width(row['ci95'])}"


def _points(row: Found) -> str:
    return f"{100 * row['mean']:+.2f} ± {_half_width(row['ci95'])}"


def _half_width(ci95: float | None) -> str:
    return "–" if ci95 is None else f"{100 * ci95:.2f}"
