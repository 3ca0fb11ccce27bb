"""Several runs on identical episodes, and the paired differences between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from vsm.data import EpisodeSampler, Split, open_dataset
from vsm.devices import Placement, choose_placement
from vsm.errors import EpisodeError, RunError
from vsm.evaluation import Advance, BatchNormMode, Evaluation, evaluate, unwatched
from vsm.runs import Checkpoint, RunDirectory, TrainedModel, load_run
from vsm.statistics import Estimate, estimate


@dataclass(frozen=True)
class EpisodeProtocol:
    """Which episodes a model is measured on, and how."""

    data: str
    split: Split
    way: int
    shot: int
    queries: int
    episodes: int
    seed: int
    batch_norm: BatchNormMode = "inductive"
    memory_slots: int | None = None

    def __post_init__(self) -> None:
        if self.episodes < 2:
            raise EpisodeError(f"episodes: an interval needs at least 2, got {self.episodes}")
        if self.memory_slots is not None and self.memory_slots < 0:
            raise EpisodeError(f"memory_slots: must not be negative, got {self.memory_slots}")

    def describe(self) -> str:
        """Return the protocol in one line for people."""
        unusual = ", transductive batch norm" if self.batch_norm == "transductive" else ""
        if self.memory_slots is not None:
            unusual += f", memory cut to its first {self.memory_slots} slots"
        return (
            f"{self.data}, {self.split} classes, {self.way}-way {self.shot}-shot, {self.queries} "
            f"queries a class, {self.episodes} episodes, seed {self.seed}{unusual}"
        )

    @staticmethod
    def of(run: Path, options: Any) -> "EpisodeProtocol":
        """Take the episodes from the command line's options; what is unset comes from ``run``."""
        settings = RunDirectory(run).settings()
        return EpisodeProtocol(
            data=settings.data,
            split=options.split,
            way=settings.way if options.way is None else options.way,
            shot=settings.shot if options.shot is None else options.shot,
            queries=options.queries,
            episodes=options.episodes,
            seed=options.seed,
            batch_norm=options.batch_norm,
            memory_slots=options.memory_slots,
        )


@dataclass(frozen=True)
class MeasuredRun:
    """A run and how it did."""

    path: Path
    trained: TrainedModel
    protocol: EpisodeProtocol
    evaluation: Evaluation

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints; accuracies are fractions."""
        accuracy = self.evaluation.accuracy
        return {
            "method": self.trained.settings.method,
            "data": self.protocol.data,
            "split": self.protocol.split,
            "way": self.protocol.way,
            "shot": self.protocol.shot,
            "queries": self.protocol.queries,
            "episodes": self.protocol.episodes,
            "seed": self.protocol.seed,
            "batch_norm": self.protocol.batch_norm,
            "memory_slots": None if self.trained.memory is None else len(self.trained.memory),
            "accuracy": accuracy.mean,
            "ci95": accuracy.ci95,
            "nll": self.evaluation.nll,
            "ece": self.evaluation.reliability.expected_calibration_error,
        }


@dataclass(frozen=True)
class Difference:
    """How much more accurate ``a`` is than ``b``, over episodes that both saw."""

    a: Path
    b: Path
    estimate: Estimate

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "difference": self.estimate.mean,
            "ci95": self.estimate.ci95,
        }


def evaluate_run(
    path: Path,
    protocol: EpisodeProtocol,
    checkpoint: Checkpoint = "best",
    advance: Advance = unwatched,
    backbone: str | None = None,
    placement: Placement | None = None,
) -> MeasuredRun:
    """Measure one run under ``protocol``; ``backbone`` is as in :func:`vsm.runs.load_run`.

    Where it computes is chosen if no placement is given.
    """
    trained_on = RunDirectory(path).settings().data
    if trained_on != protocol.data:
        raise RunError(
            f"{path} was trained on {trained_on}, but the episodes are of {protocol.data}; "
            "compare runs of one dataset"
        )
    dataset = open_dataset(protocol.data)
    sampler = EpisodeSampler(dataset, protocol.split, protocol.way, protocol.shot, protocol.queries)
    trained = load_run(path, dataset, checkpoint, backbone, placement or choose_placement())
    if protocol.memory_slots is not None:
        trained = trained.with_slots(protocol.memory_slots)
    evaluation = evaluate(
        trained.model,
        trained.memory,
        sampler,
        protocol.episodes,
        protocol.seed,
        protocol.batch_norm,
        advance,
    )
    return MeasuredRun(path, trained, protocol, evaluation)


def paired_differences(measured: Sequence[MeasuredRun]) -> list[Difference]:
    """Return every pair's difference, later run minus earlier one, episode by episode."""
    return [
        Difference(
            later.path,
            earlier.path,
            estimate(later.evaluation.episode_accuracies - earlier.evaluation.episode_accuracies),
        )
        for earlier, later in combinations(measured, 2)
    ]
