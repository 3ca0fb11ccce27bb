"""Which episodes a model is measured on, and how."""

from dataclasses import dataclass

from vsm.data import Dataset, EpisodeSampler, Split
from vsm.errors import EpisodeError
from vsm.evaluation.evaluator import BatchNormMode


@dataclass(frozen=True)
class EpisodeProtocol:
    """A seeded list of episodes, the batch norm mode, and how much of the memory is used."""

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
            unusual += f", memory cut to its first {self.memory_slots} classes"
        return (
            f"{self.data}, {self.split} classes, {self.way}-way {self.shot}-shot, {self.queries} "
            f"queries per class, {self.episodes} episodes, seed {self.seed}{unusual}"
        )

    def sampler(self, dataset: Dataset) -> EpisodeSampler:
        """Return the sampler of these episodes."""
        return EpisodeSampler(dataset, self.split, self.way, self.shot, self.queries)
