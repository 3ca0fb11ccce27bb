"""The page of a study of uncertainty, rendered from its result file alone."""

from collections.abc import Callable, Mapping, Sequence

from vsm_lab.document import Block, Table, Text
from vsm_lab.study.definition import Found

COVERAGES = (0.8, 0.9, 0.95)
CHOSEN, DISTANCE, PROBABILITY = "rejection score", "distance alone", "largest probability"
SCORES = (CHOSEN, DISTANCE, PROBABILITY)
"""What may detect OOD queries; the first is what the package uses."""
PARTS = ("total", "aleatoric", "epistemic")
SHARES = [f"{what} at {c}" for c in COVERAGES for what in ("answered", "rejected")]


def grouped_table(columns: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]]) -> Table:
    """Return a table of groups of rows; the name of a group stands before its first row."""
    named = [
        ["" if position else name, *row]
        for name, rows in groups.items()
        for position, row in enumerate(rows)
    ]
    return Table(columns, named)


def uncertainty_blocks(results: Found) -> list[Block]:
    """Return what the page says of one study: one table for all models each."""
    protocol = results["protocol"]

    def table(columns: Sequence[str], rows: Callable[[Found], list[list[str]]]) -> Table:
        groups = {found["model"]: rows(found) for found in results["models"]}
        return grouped_table(["model", "K", *columns], groups)

    return [
        Text(
            f"{protocol['episodes']} episodes (seed {protocol['seed']}) of {protocol['way']} "
            f"classes with K examples each and {protocol['ood_classes']} out-of-distribution (OOD) "
            f"classes, {protocol['queries']} queries per class; the same for every K. In percent, "
            "with 95% intervals over episodes; other classes would vary by more."
        ),
        Text(
            "Detection of OOD queries on validation classes: area under the ROC curve (AUROC) of "
            f"{CHOSEN}, and its paired difference to other scores."
        ),
        table([CHOSEN, *(f"− {other}" for other in SCORES[1:])], _detection),
        Text(
            "Rejection on test classes by the stored thresholds: queries of the classes that are "
            "answered, and OOD queries that are rejected, at the coverage asked for."
        ),
        table(["AUROC", *SHARES], _rejection),
        Text(
            "Probabilities on test classes, as computed and calibrated by the card's temperature "
            "(the classifier's default): NLL in nats, ECE in 15 bins."
        ),
        table(["accuracy", "NLL", "calibrated", "ECE", "calibrated"], _calibration),
        Text(
            "Uncertainty on test classes in nats, which adds up to the total, and its paired "
            "changes with more examples."
        ),
        table(PARTS[1:], _parts),
    ]


def _detection(found: Found) -> list[list[str]]:
    validation = found["validation"]
    return [
        [
            shot,
            _percent(of[CHOSEN]),
            *(_percent(validation["paired"][shot][o], "+") for o in SCORES[1:]),
        ]
        for shot, of in validation["shots"].items()
    ]


def _rejection(found: Found) -> list[list[str]]:
    shots = found["test"]["shots"].items()
    return [[shot, *(_percent(of[name]) for name in ("auroc", *SHARES))] for shot, of in shots]


def _calibration(found: Found) -> list[list[str]]:
    return [
        [
            shot,
            _percent(of["accuracy"]),
            *(_nats(of[name]) for name in ("nll", "nll calibrated")),
            *(f"{100 * of[name]:.1f}" for name in ("ece", "ece calibrated")),
        ]
        for shot, of in found["test"]["shots"].items()
    ]


def _parts(found: Found) -> list[list[str]]:
    test = found["test"]
    return [
        [label, *(_nats(of[part], sign) for part in PARTS[1:])]
        for rows, sign in ((test["shots"], ""), (test["paired"], "+"))
        for label, of in rows.items()
    ]


def _percent(found: Found, sign: str = "") -> str:
    return f"{100 * found['mean']:{sign}.1f} ± {100 * found['ci95']:.1f}"


def _nats(found: Found, sign: str = "") -> str:
    return f"{found['mean']:{sign}.4f} ± {found['ci95']:.4f}"
