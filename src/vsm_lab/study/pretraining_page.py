"""The page of a study of pre-trainings, rendered from its result file alone."""

from math import sqrt
from statistics import fmean, stdev

from vsm_lab.document import Block, Table, Text
from vsm_lab.study.definition import Found


def pretraining_blocks(results: Found, remark: str | None) -> list[Block]:
    """Return what the page says of one study: a table with a row for every pre-training."""
    asked, rows = results["study"], results["pretrainings"]
    first = rows[0]["validation"]
    shots = list(first["shots"])
    controls = {row["seed"]: row for row in rows if row["row"] == rows[0]["row"]}
    heads = ["", "seed", *(head for shot in shots for head in (f"{shot}-shot", "difference"))]
    listed = [
        [
            row["row"],
            str(row["seed"]),
            *(cell for shot in shots for cell in _cells(row, controls[row["seed"]], shot)),
            str(row["best_epoch"]),
            "" if row["seconds"] is None else f"{row['seconds'] / 60:.1f}",
        ]
        for row in rows
    ]
    return [
        Text(
            f"{asked['data']}, nearest prototype by cosine on validation classes, {first['way']}-"
            f"way, {first['episodes']} episodes of {first['queries']} queries per class, the same "
            "for all rows. Accuracy in percent at the best epoch, and its paired difference to "
            f"'{rows[0]['row']}' with the same seed; 95% intervals over episodes."
        ),
        Table([*heads, "epoch", "minutes"], listed),
        *([Text(remark)] if remark else []),
    ]


def _cells(row: Found, control: Found, shot: str) -> list[str]:
    """Return accuracy and how much more it is than that of the control, both in percent."""
    validation = row["validation"]
    accuracy = percent(validation["shots"][shot])
    if row is control:
        return [accuracy, ""]
    questions = validation["way"] * validation["queries"]
    pairs = zip(row["answers"][shot], control["answers"][shot], strict=True)
    more = [100 * (ours - theirs) / questions for ours, theirs in pairs]
    return [accuracy, f"{fmean(more):+.2f} ± {1.96 * stdev(more) / sqrt(len(more)):.2f}"]


def percent(score: Found) -> str:
    """Return accuracy and interval in percent."""
    return f"{100 * score['accuracy']:.2f} ± {100 * score['ci95']:.2f}"
