"""The page of a study of uncertainty, rendered from its result file alone."""

from typing import Any

from vsm.experiments.document import Block, Heading, Table, Text

COVERAGES = (0.8, 0.9, 0.95)
CHOSEN, DISTANCE, PROBABILITY = "distance against memory", "distance alone", "largest probability"
SCORES = (CHOSEN, DISTANCE, PROBABILITY)
"""What may detect OOD queries; the first is what the package uses."""
PARTS = ("total", "aleatoric", "epistemic")
Found = dict[str, Any]


def study_blocks(results: Found, with_heading: bool) -> list[Block]:
    """Return what the page says of one study."""
    protocol = results["protocol"]
    blocks: list[Block] = [Heading(2, results["study"]["title"])] if with_heading else []
    blocks.append(
        Text(
            f"{protocol['episodes']} episodes (seed {protocol['seed']}) of {protocol['way']} "
            f"classes with K examples each and {protocol['ood_classes']} out-of-distribution (OOD) "
            f"classes, {protocol['queries']} queries per class; the same episodes for every K. In "
            "percent, with 95% intervals over episodes: other classes of the kind would vary by "
            "more."
        )
    )
    for found in results["models"]:
        blocks += _model_blocks(found, 3 if with_heading else 2)
    return blocks


def _model_blocks(found: Found, level: int) -> list[Block]:
    validation, test = found["validation"], found["test"]["shots"]
    return [
        Heading(level, found["model"]),
        Text(
            f"Which score detects OOD queries, on validation classes of {found['data']}: area "
            f"under the ROC curve (50 is chance), and what {CHOSEN} has more than the others, "
            "paired."
        ),
        Table(
            ["K", *SCORES, *(f"− {other}" for other in SCORES[1:])],
            [
                [
                    shot,
                    *(_percent(of_shot[score]) for score in SCORES),
                    *(_percent(validation["paired"][shot][o], "+") for o in SCORES[1:]),
                ]
                for shot, of_shot in validation["shots"].items()
            ],
        ),
        Text(
            f"Test classes, by {CHOSEN} and the thresholds that are stored with the model: the "
            "share of queries of the classes that is answered, and of OOD queries that is "
            "rejected, when so much coverage is asked for."
        ),
        _rejection_table(test),
        Text(
            "Probabilities on test classes as computed, and calibrated by the card's temperature, "
            "which is the classifier's default: NLL in nats, calibration error (ECE, 15 bins)."
        ),
        _calibration_table(test),
        Text("Uncertainty on test classes in nats, and how it changes with more examples, paired:"),
        Table(
            ["K", *PARTS],
            [
                *([shot, *(_nats(of[part]) for part in PARTS)] for shot, of in test.items()),
                *(
                    [step, *(_nats(of[part], "+") for part in PARTS)]
                    for step, of in found["test"]["paired"].items()
                ),
            ],
        ),
    ]


def _rejection_table(test: Found) -> Table:
    columns = [f"{what} at {c}" for c in COVERAGES for what in ("answered", "rejected")]
    return Table(
        ["K", "AUROC", *columns],
        [
            [shot, *(_percent(of_shot[name]) for name in ("auroc", *columns))]
            for shot, of_shot in test.items()
        ],
    )


def _calibration_table(test: Found) -> Table:
    return Table(
        ["K", "accuracy", "NLL", "NLL calibrated", "ECE", "ECE calibrated"],
        [
            [
                shot,
                _percent(of_shot["accuracy"]),
                _nats(of_shot["nll"]),
                _nats(of_shot["nll calibrated"]),
                f"{100 * of_shot['ece']:.1f}",
                f"{100 * of_shot['ece calibrated']:.1f}",
            ]
            for shot, of_shot in test.items()
        ],
    )


def _percent(found: Found, sign: str = "") -> str:
    return f"{100 * found['mean']:{sign}.1f} ± {100 * found['ci95']:.1f}"


def _nats(found: Found, sign: str = "") -> str:
    return f"{found['mean']:{sign}.4f} ± {found['ci95']:.4f}"
