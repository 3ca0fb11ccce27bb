"""The page of a study of pre-trainings, rendered from its result file alone."""

from vsm.experiments.document import Block, Heading, Table, Text
from vsm.experiments.study.definition import Found


def pretraining_blocks(results: Found, with_heading: bool) -> list[Block]:
    """Return what the page says of one study: a table with a row for every pre-training."""
    asked, rows = results["study"], results["pretrainings"]
    first = rows[0]["validation"]
    shots = list(first["shots"])
    listed = [
        [
            row["row"],
            str(row["seed"]),
            *(percent(row["validation"]["shots"][shot]) for shot in shots),
            str(row["best_epoch"]),
            "" if row["seconds"] is None else f"{row['seconds'] / 60:.1f}",
        ]
        for row in rows
    ]
    return [
        *([Heading(2, asked["title"])] if with_heading else []),
        Text(
            f"{asked['data']}, nearest prototype by cosine on validation classes, {first['way']}-"
            f"way, {first['episodes']} episodes of {first['queries']} queries per class, the same "
            "for all rows; accuracy in percent of the best epoch, with 95% intervals over episodes."
        ),
        Table(["", "seed", *(f"{shot}-shot" for shot in shots), "epoch", "minutes"], listed),
    ]


def percent(score: Found) -> str:
    """Return accuracy and interval in percent."""
    return f"{100 * score['accuracy']:.2f} ± {100 * score['ci95']:.2f}"
