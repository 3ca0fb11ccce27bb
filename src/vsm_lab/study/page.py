"""The page of a study, rendered from its result file alone."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from vsm.errors import RunError, VsmError
from vsm.system.files import shortened
from vsm_lab.document import Block, Heading, Plot, Table, Text, grouped_table, write_markdown
from vsm_lab.study.charts import chart, curves
from vsm_lab.study.definition import Found, Study, StudySettings, condition_of

QUARTERS = ("nearest", "second", "third", "farthest")
INTRODUCTION = (
    "Accuracy in percent, with 95% intervals over training seeds and episodes; of a single seed, "
    "over episodes. NLL in nats; ECE in 15 bins; T is a temperature fitted on validation classes. "
    "Differences are reference minus row, paired by episode, in points; the interval over classes "
    "resamples the test classes: what other classes of the kind would give."
)


def write_page(study: Study, page: Path | None = None) -> Path:
    """Render the result file of a study as Markdown, beside its YAML file unless told otherwise.

    Charts go into the folder of the study's name beside the page.
    """
    page = study.page if page is None else page
    results = study.read_results()
    try:
        blocks = _blocks(study, results)
    except VsmError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{study.results}: does not fit {study.path} ({shortened(error)}); run vsm study "
            f"{study.path} again"
        ) from error
    command = f"`vsm study {study.path.as_posix()} --render`"
    source = f"{study.path.stem}/results.json"
    texts = [f"Rendered from `{source}` by {command}.", *filter(None, [study.settings.remark])]
    write_markdown(page, [Heading(1, results["study"]["title"]), *map(Text, texts), *blocks])
    return page


def _blocks(study: Study, results: Found) -> list[Block]:
    """Return the content of a page; only pages of runs do without torch."""
    if isinstance(study.settings, StudySettings):
        return [Text(INTRODUCTION), *run_blocks(study, results)]
    if study.settings.kind == "pretraining":
        from vsm_lab.study.pretraining import pretraining_blocks  # noqa: PLC0415

        return pretraining_blocks(results)
    if study.settings.kind == "transductive":
        from vsm_lab.study.transductive import transductive_blocks  # noqa: PLC0415

        return transductive_blocks(results)
    from vsm_lab.study.uncertainty import uncertainty_blocks  # noqa: PLC0415

    return uncertainty_blocks(results)


def run_blocks(study: Study, results: Found) -> list[Block]:
    """Return the page of a study of runs: each table covers all conditions."""
    asked, runs, folder = results["study"], results["runs"], study.path.stem
    conditions = {str(condition_of(found)): found for found in results["conditions"]}
    seeds = ", ".join(map(str, asked["seeds"]))
    blocks: list[Block] = [
        Text(
            f"{asked['data']}, {asked['episodes']} episodes of {asked['split']} classes (seed "
            f"{asked['episode_seed']}) with {asked['queries']} queries per class, the same for all "
            f"rows; training seeds {seeds}. {_lengths(runs)}"
        ),
        grouped_table(
            ["", "", "accuracy", "NLL", "ECE", "T", "NLL at T", "ECE at T"],
            {name: _scores(found) for name, found in conditions.items()},
        ),
    ]
    for heading, rows in (
        (f"{asked['reference']} minus each other row:", _differences),
        ("Differences between other pairs of rows:", _pairs),
    ):
        groups = {name: rows(found) for name, found in conditions.items()}
        if any(groups.values()):
            columns = ["", "", "difference", "± over classes", "each seed"]
            blocks += [Text(heading), grouped_table(columns, groups)]
    blocks += _memory_sizes(asked, conditions) + _effects(conditions)
    for condition, found in conditions.items():
        name = f"{found['way']}way-{found['shot']}shot-{found['batch_norm']}"
        drawn = chart(found, f"{folder}-{name}")
        if drawn is not None:
            caption = f"{condition}: what the memory adds"
            blocks.append(Plot(f"{folder}/{name}.svg", drawn, caption))
    validated = [run for run in runs if len(run.get("validations", [])) > 1]
    if validated:
        drawn = curves(validated, f"{folder}-curves")
        blocks.append(Plot(f"{folder}/curves.svg", drawn, "Validation classes while training"))
    return blocks + _runs(runs, asked["rows"])


def _scores(found: Found) -> list[list[str]]:
    """Return accuracy and calibration of every row and baseline under one condition."""
    baselines = {f"{name} (baseline)": row for name, row in found["baselines"].items()}
    rows = []
    for label, row in (found["rows"] | baselines).items():
        calibrated = ["–"] * 3
        if "temperature" in row:
            nll, ece = row["calibrated_nll"], row["calibrated_ece"]
            calibrated = [f"{row['temperature']:.2f}", f"{nll:.3f}", f"{ece:.2%}"]
        rows.append([label, _percent(row), f"{row['nll']:.3f}", f"{row['ece']:.2%}", *calibrated])
    return rows


def _differences(found: Found) -> list[list[str]]:
    return [_difference(f"− {label}", row) for label, row in found["differences"].items()]


def _pairs(found: Found) -> list[list[str]]:
    return [_difference(f"{one['row']} − {one['minus']}", one) for one in found.get("pairs", [])]


def _difference(name: str, row: Found) -> list[str]:
    """Return a difference: over all seeds, the interval over classes, and of each seed."""
    by_seed = ", ".join(f"{100 * one['mean']:+.2f}" for one in row["seeds"])
    return [name, _percent(row, "+"), _half_width(row["ci95_classes"]), by_seed]


def _memory_sizes(asked: Found, conditions: Mapping[str, Found]) -> list[Block]:
    """Show the reference with part of its memory, if any was measured."""

    def cell(one: Found) -> str:
        apart = one.get("ci95_subsets")
        return _percent(one) + ("" if apart is None else f" ({100 * apart:.2f})")

    cells = {
        name: {"–".join(map(str, one["slots"])): cell(one) for one in found["memory_sizes"]}
        for name, found in conditions.items()
        if len(found.get("memory_sizes") or []) > 1
    }
    if not cells:
        return []
    slots = list(dict.fromkeys(size for row in cells.values() for size in row))
    rows = [[name, *(row.get(size, "–") for size in slots)] for name, row in cells.items()]
    text = f"{asked['reference']} with part of its slots"
    if (several := asked["memory_subsets"]) > 1:
        text += f", the mean of {several} subsets (± over subsets in parentheses)"
    return [Text(f"{text}:"), Table(["slots", *slots], rows)]


def _effects(conditions: Mapping[str, Found]) -> list[Block]:
    """Summarize what classes gain from memory, and how many answers it changes."""
    rows = []
    for name, found in conditions.items():
        gains, changes = found.get("gains"), found.get("changes")
        if gains or changes:
            turned = [f"{changes[k]:.2%}" for k in ("turned_right", "misled")] if changes else []
            rows.append([name, *(_gains(gains) if gains else ["–"] * 5), *(turned or ["–"] * 2)])
    if not rows:
        return []
    columns = [*(f"{quarter} quarter" for quarter in QUARTERS), "Spearman"]
    return [
        Text(
            "Mean gain from memory by class, in quarters ranked by the cosine of a class's mean "
            "feature to the nearest slot (mean cosine in parentheses); Spearman's correlation of "
            "the two; and the answers of the first seed that memory turned right and wrong:"
        ),
        Table(["", *columns, "turned right", "turned wrong"], rows),
    ]


def _gains(gains: Found) -> list[str]:
    """Return the mean gain and cosine of every quarter, and Spearman's correlation."""
    classes, correlation = gains["classes"], gains["spearman"]
    cells = []
    for start, end in pairwise(len(classes) * n // 4 for n in range(5)):
        quarter = classes[start:end]
        means = [fmean(one[key] for one in quarter) for key in ("gain", "nearness") if quarter]
        cells.append(f"{100 * means[0]:+.2f} ({means[1]:.2f})" if means else "–")
    return [*cells, "–" if correlation is None else f"{correlation:+.2f}"]


def _lengths(runs: Sequence[Found]) -> str:
    """Say how long rows were trained, and whether that is unequal."""
    rows = [
        (one["row"], f"{one['steps']} steps of {one['tasks']} episode{'s' * (one['tasks'] > 1)}")
        for one in runs
        if one["steps"]
    ]
    if not rows:
        return "Nothing was trained: the memories were learned in one pass."
    lengths = list(dict.fromkeys(length for _, length in rows))
    if len(lengths) == 1:
        return f"Trained for {lengths[0]}."
    told = dict.fromkeys(f"{row} for {length}" for row, length in rows)
    return f"Runs were trained for different lengths: {', '.join(told)}."


def _runs(runs: Sequence[Found], rows: Mapping[str, str | Found]) -> list[Block]:
    """List the trainings: the options that all share once, and each row's own."""
    learned = dict.fromkeys(_learned(one, rows) for one in runs if not one["steps"])
    blocks: list[Block] = []
    if learned:
        blocks.append(Text(f"Memories were learned by: {'; '.join(learned)}."))
    runs = [one for one in runs if one["steps"]]
    if not runs:
        return blocks
    groups: dict[tuple[str, str], list[Found]] = {}
    for one in runs:
        groups.setdefault((one["row"], one["command"]), []).append(one)
    options = {command: _options(command) for _, command in groups}
    shared = [
        option
        for option in _options(runs[0]["command"])
        if all(option in other for other in options.values())
    ]
    seeds = "|".join(dict.fromkeys(str(one["seed"]) for one in runs))
    text = f"Trained with `vsm train {' '.join(shared)} --seed {seeds}` and the options below."
    backbones = {one["init"]: one["init_seconds"] for one in runs if one["init"]}
    for init, seconds in backbones.items():
        if seconds is not None:
            text += f" The backbone of `{init}` was trained for {_minutes(seconds)} minutes."
    trainings = [
        [
            label,
            ", ".join(_minutes(one["seconds"]) for one in of_row),
            " ".join(f"`{option}`" for option in options[command] if option not in shared) or "–",
        ]
        for (label, command), of_row in groups.items()
    ]
    return [*blocks, Text(text), Table(["row", "minutes of training", "options"], trainings)]


def _learned(one: Found, rows: Mapping[str, str | Found]) -> str:
    """Return the command that learned a memory; RUN is a training of the study itself."""
    asked = rows[one["row"]]
    encoder = None if isinstance(asked, str) else asked["encoder"]
    if encoder not in rows:
        return f"{one['row']}: `{one['command']}`"
    command = one["command"].replace(one["init"], "RUN")
    return f"{one['row']}: `{command}` (RUN: the run of {encoder})"


def _options(command: str) -> list[str]:
    """Return the options of a command with their values, as a shell reads them."""
    words = shlex.split(command)[2:]
    return [shlex.join(pair) for pair in zip(words[::2], words[1::2], strict=True)]


def _minutes(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds / 60:.1f}"


def _percent(row: Found, sign: str = "") -> str:
    return f"{100 * row['mean']:{sign}.2f} ± {_half_width(row['ci95'])}"


def _half_width(ci95: float | None) -> str:
    return "–" if ci95 is None else f"{100 * ci95:.2f}"
