"""When to answer "none of these": conformal thresholds from classes that are known.

The score of a query x for class n is its distance to the class's prototype, averaged over the
samples of it, against its distances to all that is remembered and is none of the classes:

    s_n(x) = D(x, z_n) / τ + log Σ_a exp(−D(x, M_a) / τ).

Without a memory of slots the second part is nothing. Of n scores of queries for their own classes,
the ⌈(n + 1)·c⌉-th smallest is not exceeded by that of a new query with probability c, if the new
one comes about as those did. So a query whose score exceeds that threshold for every class is none
of them, and at most 1 − c of the queries of fitted classes are turned away, however many classes
there are. Scores shrink as prototypes become better known, so there is a threshold for each number
of support images.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsm.classifier import pairwise_distance
from vsm.data import Dataset, EpisodeSampler
from vsm.errors import ClassifierError, RunError
from vsm.evaluation import Embedder, cached_embedder
from vsm.files import write_text
from vsm.memory import Memory, SlotMemory, SupportSet
from vsm.model import FewShotModel
from vsm.seeding import generator
from vsm.shipped_models import REJECTION_NAME

SHOTS = (1, 2, 5, 10)
LEVELS = 200
"""Thresholds are kept for 1/200, 2/200, … of the scores."""
MOST_WAY, MOST_QUERIES, EPISODES = 5, 10, 200
SIGNIFICANT_DIGITS = 7  # of a stored threshold, as many as float32 has


@dataclass(frozen=True)
class Thresholds:
    """Largest scores that are accepted.

    Attributes:
        by_shot: for each number of support images, that for a coverage of 1/L, 2/L, … (L − 1)/L.
    """

    by_shot: dict[int, tuple[float, ...]]

    def at(self, coverage: float, shots: Sequence[int]) -> Tensor:
        """Return the threshold of each class ``[N]`` by its number of images.

        It is that of the largest number that is known and not above it, which turns away too few
        rather than too many.
        """
        if not 0 < coverage < 1:
            raise ClassifierError(f"reject: expected a coverage between 0 and 1, got {coverage}")
        level = min(math.ceil(coverage * LEVELS - 1e-9), LEVELS - 1) - 1
        known = sorted(self.by_shot)
        chosen = [max([k for k in known if k <= shot], default=known[0]) for shot in shots]
        return torch.tensor([self.by_shot[k][level] for k in chosen])

    def write(self, folder: Path, fingerprint: str) -> None:
        """Store them with the model in ``folder``, whose encoder has this fingerprint."""
        rounded = {
            str(shot): [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values]
            for shot, values in self.by_shot.items()
        }
        facts = {"encoder": fingerprint, "thresholds": rounded}
        write_text(folder / REJECTION_NAME, json.dumps(facts) + "\n")

    @staticmethod
    def read(folder: Path, fingerprint: str) -> "Thresholds | None":
        """Read what is stored with a model; nothing where nothing is."""
        path = folder / REJECTION_NAME
        if not path.is_file():
            return None
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            known = Thresholds.of(facts["thresholds"])
            if not known.by_shot or {len(v) for v in known.by_shot.values()} != {LEVELS - 1}:
                raise ValueError(f"expected {LEVELS - 1} thresholds a shot")
            measured_with = facts["encoder"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path} is damaged: {error!r}; take it away, or ship again") from error
        if measured_with != fingerprint:
            raise RunError(
                f"{path} was measured with the encoder {measured_with[:12]}, but model.safetensors "
                f"beside it holds {fingerprint[:12]}; was one of the two exchanged?"
            )
        return known

    @staticmethod
    def of(stored: dict[str, Any]) -> "Thresholds":
        """Make them from what JSON holds: lists by the number of images as a string."""
        return Thresholds({int(k): tuple(map(float, values)) for k, values in stored.items()})


def conformal(scores: Tensor) -> tuple[float, ...]:
    """Return the ⌈(n + 1)·c⌉-th smallest of n scores for each coverage c; ∞ where n is too few."""
    ordered = scores.flatten().sort().values.tolist()
    count = len(ordered)
    ranks = (math.ceil((count + 1) * level / LEVELS - 1e-9) for level in range(1, LEVELS))
    return tuple(ordered[rank - 1] if rank <= count else math.inf for rank in ranks)


def slots_of(memory: Memory | None) -> Tensor | None:
    """Return what the slots of a memory hold, where each stands for a class: ``[A, D]``."""
    return memory.content if isinstance(memory, SlotMemory) and len(memory) else None


def class_scores(
    model: FewShotModel,
    prototypes: Tensor,
    queries: Tensor,
    slots: Tensor | None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Score every query for every class.

    Args:
        model: gives distance and temperature.
        prototypes: ``[T, N, L, D]``.
        queries: features ``[T, B, D]``.
        slots: what is remembered of other classes ``[A, D]``; nothing: distances alone count.
        hidden: boolean ``[T, A]``, slots that are of the classes themselves.

    Returns:
        ``[T, B, N]``.
    """
    temperature = model.classifier.log_temperature.exp()
    distances = pairwise_distance(queries, prototypes, model.classifier.distance).mean(-1)
    scores: Tensor = distances / temperature
    if slots is None:
        return scores
    rows, others = queries.flatten(0, 1).unsqueeze(0), slots.view(1, len(slots), 1, -1)
    to_slots = pairwise_distance(rows, others, model.classifier.distance)
    logits = -to_slots.view(*queries.shape[:2], len(slots)) / temperature  # [T, B, A]
    if hidden is not None:
        logits = logits.masked_fill(hidden.unsqueeze(1), -math.inf)
    return scores + torch.logsumexp(logits, -1, keepdim=True)


@torch.no_grad()
def own_scores(
    model: FewShotModel,
    memory: Memory | None,
    support: Tensor,
    queries: Tensor,
    seed: int,
    hidden: Tensor | None = None,
) -> Tensor:
    """Score queries for their own classes.

    Args:
        model: in evaluation mode.
        memory: read, never written.
        support: features ``[T, N, K, D]``.
        queries: features ``[T, N, Q, D]``.
        seed: of the sampled prototypes.
        hidden: boolean ``[T, N, A]``, slots that may not be addressed.

    Returns:
        ``[T, Q, N]``.
    """
    random = generator(seed, "rejection-noise", support.shape[2])
    prototypes = model.infer(SupportSet.of(support), memory, random, hidden).prototypes
    own_slots = None if hidden is None else hidden.any(1)
    scores = class_scores(
        model, prototypes, queries.flatten(1, 2), slots_of(memory), own_slots
    )  # [T, N·Q, N]
    return scores.unflatten(1, queries.shape[1:3]).diagonal(dim1=1, dim2=3)


def calibrate(
    model: FewShotModel,
    memory: Memory | None,
    episodes: Callable[[int], Iterator[tuple[Tensor, Tensor, Tensor | None]]],
    shots: Sequence[int],
    seed: int,
) -> Thresholds:
    """Measure thresholds on episodes of known classes.

    Args:
        model: in evaluation mode.
        memory: read, never written.
        episodes: given K, yields support, queries and hidden slots, as :func:`own_scores` takes.
        shots: every K to measure.
        seed: of the sampled prototypes.
    """
    return Thresholds(
        {
            shot: conformal(
                torch.cat(
                    [own_scores(model, memory, *part[:2], seed, part[2]) for part in episodes(shot)]
                )
            )
            for shot in shots
        }
    )


def calibrate_on_validation(
    model: FewShotModel, memory: Memory | None, dataset: Dataset, embed: Embedder | None = None
) -> Thresholds:
    """Measure thresholds on episodes of the validation classes, which nothing was trained on.

    Args:
        model: in evaluation mode.
        memory: read, never written.
        dataset: what the model was trained on.
        embed: features of the validation images, if they are known; else they are computed once.
    """
    sizes = dataset.class_sizes[dataset.classes("validation")]
    smallest, way = int(sizes.min()), min(MOST_WAY, len(sizes))

    def sampler(shot: int) -> EpisodeSampler:
        return EpisodeSampler(dataset, "validation", way, shot, min(MOST_QUERIES, smallest - shot))

    look_up = embed or cached_embedder(model, sampler(1))

    def episodes(shot: int) -> Iterator[tuple[Tensor, Tensor, None]]:
        chosen = sampler(shot)
        for block in chosen.evaluation_episodes(EPISODES, 0):
            support, queries = look_up(block.image_ids).split([shot, chosen.queries], 2)
            yield support, queries, None

    return calibrate(model, memory, episodes, [shot for shot in SHOTS if shot < smallest], 0)
