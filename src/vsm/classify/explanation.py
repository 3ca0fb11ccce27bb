"""Why a picture was classified as it was."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsm.memory.addressing import entropy


class Recalled(NamedTuple):
    """A remembered class, and its weight λ (Eq. 9) in what a new class was told by the memory."""

    name: str
    weight: float


class Uncertainty(NamedTuple):
    """How unsure an answer is, in nats.

    Attributes:
        total: entropy of the averaged probabilities.
        aleatoric: mean entropy over the sampled prototypes: what stays however many examples there
            are, since the picture itself could be either.
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
    shots: dict[Any, int]
    remembered: dict[Any, int]
    uncertainty: Uncertainty

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; classes become strings."""
        plain = vars(self) | {
            "recalled": {k: [one._asdict() for one in found] for k, found in self.recalled.items()},
            "uncertainty": self.uncertainty._asdict(),
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
