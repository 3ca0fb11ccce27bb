"""When to answer "none of these": conformal thresholds from classes that are known.

The score of a query for a class is its distance to the class's prototype, averaged over the samples
of it. Of n scores of queries for their own classes, the ⌈(n + 1)·c⌉-th smallest is not exceeded by
that of a new query with probability c, if the new one comes about as those did. So a query whose
score exceeds that threshold for every class is none of them, and at most 1 − c of the queries of
fitted classes are turned away. Scores shrink as prototypes become better known, so there is a
threshold for each number of support images.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vsm.classifier import pairwise_distance
from vsm.errors import ClassifierError
from vsm.memory import Memory, SupportSet
from vsm.model import FewShotModel
from vsm.seeding import generator

SHOTS = (1, 2, 5, 10)
LEVELS = 200
"""Thresholds are kept for 1/200, 2/200, … of the scores."""


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


def conformal(scores: Tensor) -> tuple[float, ...]:
    """Return the ⌈(n + 1)·c⌉-th smallest of n scores for each coverage c; ∞ where n is too few."""
    ordered = scores.flatten().sort().values.tolist()
    count = len(ordered)
    ranks = (math.ceil((count + 1) * level / LEVELS - 1e-9) for level in range(1, LEVELS))
    return tuple(ordered[rank - 1] if rank <= count else math.inf for rank in ranks)


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
        ``[T, N, Q]``.
    """
    random = generator(seed, "rejection-noise", support.shape[2])
    prototypes = model.infer(SupportSet.of(support), memory, random, hidden).prototypes
    by_class = prototypes.flatten(0, 1).unsqueeze(1)  # [T·N, 1, L, D]
    scores = pairwise_distance(queries.flatten(0, 1), by_class, model.classifier.distance)
    return scores.mean((-1, -2)).view(queries.shape[:3])


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
