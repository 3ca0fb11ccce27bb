"""Studies of uncertainty: coverage, OOD detection, calibration, and its sources.

An episode has N classes that are fitted with K examples each, and others that are not: their
queries are out-of-distribution (OOD). The same episodes serve every K, with the first K of ten
examples. Which score detects OOD queries best is asked of validation classes; test classes are
measured once, with the score that the package uses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from vsm.data import Split
from vsm.evaluation.calibration import SHOTS
from vsm.evaluation.evaluator import EpisodeProtocol, scale_by_temperature, split_embedder
from vsm.evaluation.intervals import auroc, estimate, reliability
from vsm.memory import Posterior, SampledPosterior, SupportSet
from vsm.nn.layers import predictive
from vsm.runs.directory import RunDirectory, find_run
from vsm.runs.trained_model import ModelOnData, TrainedModel
from vsm.seeding import Randomness, generator, task_generators
from vsm_lab.document import Block, Table, Text, grouped_table
from vsm_lab.job_files import JobStore
from vsm_lab.jobs import Job, in_order
from vsm_lab.study.definition import Found, Study, UncertaintySettings
from vsm_lab.study.runs import run_job

COVERAGES = (0.8, 0.9, 0.95)
CHOSEN, DISTANCE, PROBABILITY = "rejection score", "distance alone", "largest probability"
SCORES = (CHOSEN, DISTANCE, PROBABILITY)
"""What may detect OOD queries; the first is what the package uses."""
PARTS = ("total", "aleatoric", "epistemic")
SHARES = [f"{what} at {c}" for c in COVERAGES for what in ("answered", "rejected")]
SPLITS: tuple[Split, ...] = ("validation", "test")
WAY, OOD_CLASSES, QUERIES, SEED = 5, 5, 10, 0
AT_ONCE = 10  # episodes


def measure_uncertainty(subject: ModelOnData, protocol: EpisodeProtocol, way: int) -> Found:
    """Measure one model on one split, for every number K of examples, and paired between them.

    The first ``way`` classes of an episode are fitted, the others are OOD.
    """
    is_validation = protocol.split == "validation"
    about = detection if is_validation else certainty
    parts: dict[int, dict[str, list[Tensor]]] = {shot: defaultdict(list) for shot in SHOTS}
    for support, queries, tasks in _episodes(subject, protocol):
        for shot in SHOTS:
            random = task_generators(protocol.seed, "uncertainty-noise", 0, tasks)
            found = about(subject.trained, support[:, :way, :shot], queries, random)
            for key, value in found.items():
                parts[shot][key].append(value)
    values = {
        shot: {key: torch.cat(blocks) for key, blocks in of_shot.items()}
        for shot, of_shot in parts.items()
    }
    return {
        "shots": {str(shot): _summary(of_shot) for shot, of_shot in values.items()},
        "paired": _paired_scores(values) if is_validation else _paired_shots(values),
    }


def _episodes(
    subject: ModelOnData, protocol: EpisodeProtocol
) -> Iterator[tuple[Tensor, Tensor, range]]:
    """Yield support ``[T, N + O, 10, D]``, queries ``[T, N + O, Q, D]``, and their places."""
    sampler = protocol.sampler(subject.dataset)
    embed, done = split_embedder(subject.trained.encoder, sampler), 0
    for block in sampler.evaluation_episodes(protocol.episodes, protocol.seed):
        for image_ids in block.image_ids.split(AT_ONCE):
            support, queries = embed(image_ids).split([protocol.shot, protocol.queries], 2)
            yield support, queries, range(done, done + len(image_ids))
            done += len(image_ids)


@torch.no_grad()
def detection(
    trained: TrainedModel, support: Tensor, queries: Tensor, random: Randomness
) -> dict[str, Tensor]:
    """Return the area under the ROC curve of OOD queries against those of the classes ``[T]``.

    Args:
        trained: the model.
        support: features ``[T, N, K, D]``.
        queries: features of the N classes and of OOD classes ``[T, N + O, Q, D]``.
        random: draws of the prototypes.
    """
    posterior, rows, rejection = _infer(trained, support, queries, random)
    by_distance = SampledPosterior(posterior.prototypes, trained.model.classifier)
    scores = {
        CHOSEN: rejection,
        DISTANCE: by_distance.rejection_scores(rows, None).amin(-1),
        PROBABILITY: -predictive(posterior.log_probabilities(rows)).exp().amax(-1),
    }
    known = support.shape[1] * queries.shape[2]
    return {name: auroc(score[:, :known], score[:, known:]) for name, score in scores.items()}


def _infer(
    trained: TrainedModel, support: Tensor, queries: Tensor, random: Randomness
) -> tuple[Posterior, Tensor, Tensor]:
    """Return the posterior, projected queries ``[T, B, D]`` and their rejection scores."""
    model, memory = trained.model, trained.state
    support, queries = (model.project(part, memory) for part in (support, queries))
    rows, posterior = queries.flatten(1, 2), model.infer(SupportSet.of(support), memory, random)
    slots = None if memory is None else memory.rejection_slots
    return posterior, rows, posterior.rejection_scores(rows, slots).amin(-1)


@torch.no_grad()
def certainty(
    trained: TrainedModel, support: Tensor, queries: Tensor, random: Randomness
) -> dict[str, Tensor]:
    """Return measures of test classes, one number per episode ``[T]`` or query ``[T, N·Q]``.

    The arguments are those of :func:`detection`.
    """
    (way, shot), per_class = support.shape[1:3], queries.shape[2]
    posterior, rows, scores = _infer(trained, support, queries, random)
    known, ood = scores[:, : way * per_class], scores[:, way * per_class :]
    found = {"auroc": auroc(known, ood)}
    for coverage in COVERAGES:
        limit = trained.thresholds().at(coverage, [shot] * way)[0]
        found[f"answered at {coverage}"] = (known <= limit).double().mean(1)
        found[f"rejected at {coverage}"] = (ood > limit).double().mean(1)
    rows = rows[:, : way * per_class]
    log_probabilities = posterior.log_probabilities(rows)
    _, *split = posterior.uncertainty(rows, generator(0, "uncertainty"))
    for part, nats in zip(PARTS, split, strict=True):
        found[part] = nats.double().mean(1)
    labels = torch.arange(way).repeat_interleave(per_class).expand(len(rows), -1)
    for name, temperature in (("", 1.0), (" calibrated", trained.temperature(shot))):
        answers = scale_by_temperature(predictive(log_probabilities), temperature)
        found[f"nll{name}"] = -answers.gather(-1, labels.unsqueeze(-1))[..., 0].double().mean(1)
        found[f"confidence{name}"] = answers.amax(-1).exp()
        found["correct"] = answers.argmax(-1) == labels
    return found


def _summary(values: Mapping[str, Tensor]) -> Found:
    """Return means with intervals over episodes, and calibration errors over all queries."""
    found: Found = {name: asdict(estimate(v)) for name, v in values.items() if v.ndim == 1}
    if "correct" in values:
        correct = values["correct"]
        found["accuracy"] = asdict(estimate(correct.double().mean(1)))
        for name in ("", " calibrated"):
            bins = reliability(values[f"confidence{name}"].flatten(), correct.flatten())
            found[f"ece{name}"] = bins.expected_calibration_error
    return found


def _paired_scores(values: Mapping[int, Mapping[str, Tensor]]) -> Found:
    """Return, for every K, how much better the chosen score is than each other."""
    return {
        str(shot): {other: asdict(estimate(of[CHOSEN] - of[other])) for other in SCORES[1:]}
        for shot, of in values.items()
    }


def _paired_shots(values: Mapping[int, Mapping[str, Tensor]]) -> Found:
    """Return by how much each part of the uncertainty changes from one K to the next."""
    return {
        f"{fewer} to {more}": {
            part: asdict(estimate(values[more][part] - values[fewer][part])) for part in PARTS
        }
        for fewer, more in pairwise(SHOTS)
    }


class UncertaintyPlan:
    """The jobs of a study of uncertainty; takes what :class:`.runs.StudyPlan` takes."""

    def __init__(self, study: Study, backbones: Sequence[str] = (), **options: Any) -> None:
        assert isinstance(study.settings, UncertaintySettings)
        self.study, self.asked = study, study.settings
        self.cells: dict[tuple[str, Split], Job] = {}
        for name, split in product(self.asked.models, SPLITS):
            path = find_run(name)
            settings = RunDirectory(path).settings()
            model = run_job(path, settings, backbones, options)
            shape = (WAY + OOD_CLASSES, SHOTS[-1], QUERIES)
            protocol = EpisodeProtocol(settings.data, split, *shape, self.asked.episodes, SEED)
            recipe = {"protocol": asdict(protocol), "way": WAY}
            title = f"uncertainty of {name}, {split} classes"
            self.cells[name, split] = Job("uncertainty", title, recipe, (model,))
        self.jobs = in_order(self.cells.values())

    def write_results(self, store: JobStore) -> Found:
        """Summarize the finished jobs, and write the result file."""
        sizes = {"way": WAY, "ood_classes": OOD_CLASSES, "queries": QUERIES}
        found = {
            "protocol": {**sizes, "episodes": self.asked.episodes, "seed": SEED},
            "models": [
                {
                    "model": name,
                    "data": self.cells[name, "test"].recipe["protocol"]["data"],
                    **{split: store.outcome(self.cells[name, split]) for split in SPLITS},
                }
                for name in self.asked.models
            ],
        }
        return self.study.write_results(found)


def uncertainty_blocks(results: Found) -> list[Block]:
    """Return the content of the page: each table covers all models."""
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
    rows = []
    for shot, of in found["validation"]["shots"].items():
        paired = found["validation"]["paired"][shot]
        differences = [_percent(paired[other], "+") for other in SCORES[1:]]
        rows.append([shot, _percent(of[CHOSEN]), *differences])
    return rows


def _rejection(found: Found) -> list[list[str]]:
    shots = found["test"]["shots"].items()
    return [[shot, *(_percent(of[name]) for name in ("auroc", *SHARES))] for shot, of in shots]


def _calibration(found: Found) -> list[list[str]]:
    rows = []
    for shot, of in found["test"]["shots"].items():
        nll = [_nats(of[name]) for name in ("nll", "nll calibrated")]
        ece = [f"{100 * of[name]:.1f}" for name in ("ece", "ece calibrated")]
        rows.append([shot, _percent(of["accuracy"]), *nll, *ece])
    return rows


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
