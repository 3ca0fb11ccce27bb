"""Why a picture was classified as it was."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsm.memory import GaussianPrototypes
from vsm.memory.addressing import entropy
from vsm.seeding import Randomness, normal

PROTOTYPE_SAMPLES = 64


class Recalled(NamedTuple):
    """A remembered class, and its weight λ (Eq. 9) in what a new class was told by the memory."""

    name: str
    weight: float


class Direction(NamedTuple):
    """A learned direction, counted from the one that tells classes apart best, and its share."""

    number: int
    share: float


class Moved(NamedTuple):
    """How the memory moved a prototype away from the mean of the examples.

    Attributes:
        length: of the move, in the distance of the examples' mean from the mean of all classes,
            in units of the scatter within classes.
        directions: along which it went for the most part, largest share first.
    """

    length: float
    directions: tuple[Direction, ...]


class Uncertainty(NamedTuple):
    """How unsure an answer is, in nats.

    Attributes:
        total: entropy of the probabilities.
        aleatoric: mean entropy over what the prototypes may be: what stays however many examples
            there are, since the picture itself could be either.
        epistemic: the rest, which is the mutual information of answer and prototypes: what more
            examples could remove.
    """

    total: float
    aleatoric: float
    epistemic: float


@dataclass(frozen=True)
class Explanation:
    """An answer and what it rests on; by class where it says so.

    Attributes:
        prediction: the answer.
        probabilities: of each class, averaged over the sampled prototypes, and calibrated.
        std: standard deviation of that probability over the sampled prototypes, each as it is
            before calibration.
        distances: from the picture to the prototype, averaged over its samples.
        recalled: what the memory was addressed with for each class, most weight first.
        moved: how the Gaussian memory moved each prototype; None for other memories.
        memory_strength: support images that the memory counted for; None if that is not known.
        shots: examples of each class that were fitted.
        remembered: images that counted besides, since they were remembered under that very name.
        uncertainty: of the answer, before calibration: a temperature would hide what part of it the
            samples account for.
    """

    prediction: Any
    probabilities: dict[Any, float]
    std: dict[Any, float]
    distances: dict[Any, float]
    recalled: dict[Any, list[Recalled]]
    memory_strength: dict[Any, float] | None
    moved: dict[Any, Moved] | None
    shots: dict[Any, int]
    remembered: dict[Any, int]
    uncertainty: Uncertainty

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; classes become strings."""
        plain = vars(self) | {
            "recalled": {k: [one._asdict() for one in found] for k, found in self.recalled.items()},
            "uncertainty": self.uncertainty._asdict(),
        }
        if self.moved is not None:
            plain["moved"] = {
                label: {"length": far, "directions": [one._asdict() for one in directions]}
                for label, (far, directions) in self.moved.items()
            }
        return {
            name: {str(k): item for k, item in value.items()} if isinstance(value, dict) else value
            for name, value in plain.items()
        }


def split_uncertainty(log_probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return total, aleatoric and epistemic uncertainty in nats, each ``[T, B]``.

    H[E p] = E H[p] + I(answer; prototypes), with the expectation over the L samples.

    Args:
        log_probabilities: ``[T, B, N, L]``, none of them infinite.
    """
    probabilities = log_probabilities.exp()
    total = entropy(probabilities.mean(-1))
    samples = log_probabilities.shape[-1]
    aleatoric = -(probabilities.mul_(log_probabilities)).sum((-1, -2)) / samples
    return total, aleatoric, (total - aleatoric).clamp_min(0)


def probability_std(log_probabilities: Tensor) -> Tensor:
    """Return the standard deviation of probabilities over the samples: ``[T, B, N]``."""
    probabilities = log_probabilities.exp()
    apart = probabilities.sub_(probabilities.mean(-1, keepdim=True))
    norms: Tensor = torch.linalg.vector_norm(apart, dim=-1)
    return norms / math.sqrt(log_probabilities.shape[-1])


def split_gaussian_uncertainty(
    queries: Tensor,
    prototypes: GaussianPrototypes,
    random: Randomness,
    samples: int = PROTOTYPE_SAMPLES,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Split the entropy of answers in closed form: H[y | x] = E H[y | x, z] + I(y; z | x).

    The expectation is over the prototypes z given the examples *and* the picture x. It may be of
    class y with probability p(y | x), and is then one more member of it:

        E H[y | x, z] = Σ_y p(y | x) E[H | z_y ~ q(z_y | x), z_c ~ q(z_c) for the others c].

    The distances |x − z_c|² that H depends on are drawn with the same noise for all pictures, which
    makes them matrix products.

    Args:
        queries: projected ``[T, B, D]``.
        prototypes: of T tasks with N classes.
        random: source of the noise.
        samples: L draws of the prototypes.

    Returns:
        The standard deviation of p(y | x, z) ``[T, B, N]``; total, aleatoric and epistemic
        uncertainty in nats, each ``[T, B]``.
    """
    mean, variance = prototypes.gaussian.mean, prototypes.gaussian.variance  # [T, N, D]
    way = mean.shape[1]
    noise = normal(random, samples, *mean.shape[1:]).to(mean)  # [L, N, D]
    precision = (1 + variance).reciprocal()
    # x − z_c is N(x − m, v); if x is counted for c, it is N((x − m)/(1 + v), v/(1 + v)).
    without = _squared_distances(queries, mean, torch.ones_like(mean), variance, noise)
    counted = _squared_distances(queries, mean, precision, variance * precision, noise)
    own = torch.eye(way, dtype=torch.bool, device=mean.device)  # the y that x is counted for
    distances = torch.where(own, counted.unsqueeze(3), without.unsqueeze(3))  # [T, B, L, y, N]
    answers = (-0.5 * distances).softmax(-1)
    probabilities = prototypes.scores(queries).softmax(-1)  # [T, B, N]
    weights = probabilities.unsqueeze(2)  # [T, B, 1, y]
    total = entropy(probabilities)
    aleatoric = torch.minimum((entropy(answers) * weights).sum(-1).mean(-1), total)
    first, second = (
        (power * weights.unsqueeze(-1)).sum(3).mean(2) for power in (answers, answers.square())
    )
    std = (second - first.square()).clamp_min(0).sqrt()
    return std, (total, aleatoric, total - aleatoric)


def _squared_distances(
    queries: Tensor, mean: Tensor, scale: Tensor, variance: Tensor, noise: Tensor
) -> Tensor:
    """|scale·(x − m) − √v·ξ|² by matrix products: ``[T, B, L, N]``.

    ``queries`` are ``[T, B, D]``, the others ``[T, N, D]``, the noise ξ ``[L, N, D]``.
    """
    drawn = variance.sqrt().unsqueeze(1) * noise  # [T, L, N, D]
    apart = (queries.unsqueeze(2) - mean.unsqueeze(1)) * scale.unsqueeze(1)  # [T, B, N, D]
    products = torch.einsum("tbnd,tlnd->tbln", apart, drawn)
    return apart.square().sum(-1).unsqueeze(2) - 2 * products + drawn.square().sum(-1).unsqueeze(1)
