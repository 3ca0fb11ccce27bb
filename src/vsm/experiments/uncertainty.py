"""How reliable a model's uncertainty is: coverage, OOD detection, calibration, and its causes.

An episode has N classes that are fitted with K examples each, and others that are not: their
queries are out-of-distribution (OOD). The same episodes serve every K, with the first K of ten
examples. Which score detects OOD queries best is asked of validation classes; test classes are
measured once, with the score that the package uses.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from vsm import __version__
from vsm.classify.explanation import split_uncertainty
from vsm.data import Split
from vsm.evaluation.calibration import scale_by_temperature
from vsm.evaluation.protocol import EpisodeProtocol
from vsm.evaluation.rejection import SHOTS, class_scores, slots_of
from vsm.evaluation.statistics import auroc, estimate, reliability
from vsm.experiments.comparison import ModelOnData
from vsm.experiments.jobs import Job, given_job, in_order
from vsm.experiments.store import JobStore
from vsm.experiments.study.definition import Study, UncertaintySettings
from vsm.experiments.study.uncertainty_page import (
    CHOSEN,
    COVERAGES,
    DISTANCE,
    PARTS,
    PROBABILITY,
    SCORES,
)
from vsm.memory import SupportSet
from vsm.nn.prototype_classifier import predictive
from vsm.runs.directory import RunDirectory
from vsm.runs.shipped import find_run
from vsm.runs.trained_model import TrainedModel
from vsm.seeding import Randomness, task_generators
from vsm.system.files import write_text

SPLITS: tuple[Split, ...] = ("validation", "test")
WAY, OOD_CLASSES, QUERIES, SEED = 5, 5, 10, 0
AT_ONCE = 10  # episodes

Found = dict[str, Any]
Values = dict[str, list[Tensor]]


@dataclass(frozen=True)
class FewShotTasks:
    """T tasks: what is fitted, and what is asked.

    Attributes:
        support: features ``[T, N, K, D]``.
        queries: features of the N classes and of OOD classes ``[T, N + O, Q, D]``.
        random: draws of the prototypes.
    """

    support: Tensor
    queries: Tensor
    random: Randomness

    @property
    def rows(self) -> Tensor:
        """Queries, class after class ``[T, (N + O)·Q, D]``."""
        return self.queries.flatten(1, 2)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split what belongs to queries ``[T, B, ...]`` into those of the classes and OOD ones."""
        known = self.support.shape[1] * self.queries.shape[2]
        return values[:, :known], values[:, known:]


def measure_uncertainty(subject: ModelOnData, protocol: EpisodeProtocol, way: int) -> Found:
    """Measure one model on one split, for every number K of examples, and paired between them.

    Args:
        subject: the model and its data.
        protocol: episodes of the classes that are fitted, and after them of OOD classes.
        way: how many of the classes are fitted.
    """
    about = detection if protocol.split == "validation" else certainty
    values: dict[int, Values] = {shot: defaultdict(list) for shot in SHOTS}
    for support, queries, tasks in _episodes(subject, protocol):
        for shot in SHOTS:
            random = task_generators(protocol.seed, "uncertainty-noise", 0, tasks)
            given = FewShotTasks(support[:, :way, :shot], queries, random)
            for key, value in about(subject.trained, given).items():
                values[shot][key].append(value)
    joined = {
        shot: {key: torch.cat(parts) for key, parts in of_shot.items()}
        for shot, of_shot in values.items()
    }
    summaries = {str(shot): _summary(of_shot) for shot, of_shot in joined.items()}
    paired = _paired_scores(joined) if protocol.split == "validation" else _paired_shots(joined)
    return {"shots": summaries, "paired": paired}


def _episodes(
    subject: ModelOnData, protocol: EpisodeProtocol
) -> Iterator[tuple[Tensor, Tensor, range]]:
    """Yield support ``[T, N + O, 10, D]``, queries ``[T, N + O, Q, D]``, and their places."""
    sampler = protocol.sampler(subject.dataset)
    embed, done = subject.embedder(sampler), 0
    for block in sampler.evaluation_episodes(protocol.episodes, protocol.seed):
        for image_ids in block.image_ids.split(AT_ONCE):
            support, queries = embed(image_ids).split([protocol.shot, protocol.queries], 2)
            yield support, queries, range(done, done + len(image_ids))
            done += len(image_ids)


@torch.no_grad()
def detection(trained: TrainedModel, tasks: FewShotTasks) -> dict[str, Tensor]:
    """Return the area under the ROC curve of OOD queries against those of the classes ``[T]``."""
    model, memory = trained.model, trained.state
    prototypes = model.infer(SupportSet.of(tasks.support), memory, tasks.random).prototypes
    probabilities = predictive(model.classifier(tasks.rows, prototypes)).exp()
    scores = {
        CHOSEN: _nearest(trained, prototypes, tasks.rows, slots_of(memory)),
        DISTANCE: _nearest(trained, prototypes, tasks.rows, None),
        PROBABILITY: -probabilities.amax(-1),
    }
    return {name: auroc(*tasks.split(score)) for name, score in scores.items()}


def _nearest(
    trained: TrainedModel, prototypes: Tensor, rows: Tensor, slots: Tensor | None
) -> Tensor:
    """Return the lowest score of each row over the classes ``[T, B]``."""
    return class_scores(trained.model, prototypes, rows, slots).amin(-1)


@torch.no_grad()
def certainty(trained: TrainedModel, tasks: FewShotTasks) -> dict[str, Tensor]:
    """Return what is told of test classes, one number per episode ``[T]`` or query ``[T, B]``."""
    model, memory = trained.model, trained.state
    way, shot = tasks.support.shape[1:3]
    prototypes = model.infer(SupportSet.of(tasks.support), memory, tasks.random).prototypes
    known, ood = tasks.split(_nearest(trained, prototypes, tasks.rows, slots_of(memory)))
    found = {"auroc": auroc(known, ood)}
    for coverage in COVERAGES:
        limit = trained.thresholds().at(coverage, [shot] * way)[0]
        found[f"answered at {coverage}"] = (known <= limit).double().mean(1)
        found[f"rejected at {coverage}"] = (ood > limit).double().mean(1)
    rows, _ = tasks.split(tasks.rows)
    log_probabilities = model.classifier(rows, prototypes)
    for part, nats in zip(PARTS, split_uncertainty(log_probabilities), strict=True):
        found[part] = nats.double().mean(1)
    labels = torch.arange(way).repeat_interleave(rows.shape[1] // way).expand(len(rows), -1)
    for name, temperature in (("", 1.0), (" calibrated", trained.temperature(shot))):
        answers = scale_by_temperature(predictive(log_probabilities), temperature)
        found[f"nll{name}"] = -answers.gather(-1, labels.unsqueeze(-1))[..., 0].double().mean(1)
        found[f"confidence{name}"] = answers.amax(-1).exp()  # [T, B]
        found["correct"] = answers.argmax(-1) == labels
    return found


def _summary(values: dict[str, Tensor]) -> Found:
    """Return means with intervals over episodes, and calibration errors over all queries."""
    found: Found = {name: asdict(estimate(v)) for name, v in values.items() if v.ndim == 1}
    if "correct" in values:
        correct = values["correct"]
        found["accuracy"] = asdict(estimate(correct.double().mean(1)))
        for name in ("", " calibrated"):
            bins = reliability(values[f"confidence{name}"].flatten(), correct.flatten())
            found[f"ece{name}"] = bins.expected_calibration_error
    return found


Joined = dict[int, dict[str, Tensor]]


def _paired_scores(values: Joined) -> Found:
    """Return, for every K, how much better the chosen score is than each other."""
    return {
        str(shot): {
            other: asdict(estimate(of_shot[CHOSEN] - of_shot[other])) for other in SCORES[1:]
        }
        for shot, of_shot in values.items()
    }


def _paired_shots(values: Joined) -> Found:
    """Return by how much each part of the uncertainty changes from one K to the next."""
    return {
        f"{fewer} to {more}": {
            part: asdict(estimate(values[more][part] - values[fewer][part])) for part in PARTS
        }
        for fewer, more in pairwise(SHOTS)
    }


@dataclass(frozen=True)
class UncertaintyPlan:
    """The jobs of a study of uncertainty, by (model, split)."""

    study: Study
    cells: Mapping[tuple[str, Split], Job]

    @property
    def jobs(self) -> list[Job]:
        """Every job, those of one model together."""
        return in_order(self.cells.values())


def make_plan(study: Study, backbones: Sequence[str] = (), **options: Any) -> UncertaintyPlan:
    """Return the plan of a study, see :func:`vsm.experiments.study.plan.make_plan`."""
    asked = study.settings
    assert isinstance(asked, UncertaintySettings)
    return UncertaintyPlan(
        study,
        {
            (name, split): _job(name, split, asked.episodes, backbones, options)
            for name, split in product(asked.models, SPLITS)
        },
    )


def _job(
    name: str, split: Split, episodes: int, backbones: Sequence[str], options: Mapping[str, Any]
) -> Job:
    path = find_run(name)
    settings = RunDirectory(path).settings()
    own = settings.model.own_backbone
    model = given_job(path, backbone=own if own in backbones else None, **options)
    shape = (WAY + OOD_CLASSES, SHOTS[-1], QUERIES)
    protocol = EpisodeProtocol(settings.data, split, *shape, episodes, SEED)
    title = f"uncertainty of {name}, {split} classes"
    return Job("uncertainty", title, {"protocol": asdict(protocol), "way": WAY}, (model,))


def write_results(plan: UncertaintyPlan, store: JobStore) -> Found:
    """Sum up the finished jobs of a study, and write the result file."""
    asked = plan.study.settings
    assert isinstance(asked, UncertaintySettings)
    sizes = {"way": WAY, "ood_classes": OOD_CLASSES, "queries": QUERIES}
    found = {
        "package": __version__,
        "study": asdict(asked),
        "protocol": {**sizes, "episodes": asked.episodes, "seed": SEED},
        "models": [
            {
                "model": name,
                "data": plan.cells[name, "test"].recipe["protocol"]["data"],
                **{split: store.outcome(plan.cells[name, split]) for split in SPLITS},
            }
            for name in asked.models
        ],
    }
    write_text(plan.study.results, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    return found
