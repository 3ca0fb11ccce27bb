"""Why a picture was classified as it was."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsm.classifier import predictive
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
        spread: standard deviation of that probability over the sampled prototypes, each as it is
            before calibration.
        distances: from the picture to the prototype, averaged over its samples.
        recalled: what the memory was addressed with for each class, most weight first.
        memory_strength: support images that the memory counted for; nothing if that is not known.
        shots: examples of each class that were fitted.
        remembered: images that counted besides, since they were remembered under that very name.
        uncertainty: of the answer, before calibration: a temperature would hide what part of it the
            samples account for.
    """

    prediction: Any
    probabilities: dict[Any, float]
    spread: dict[Any, float]
    distances: dict[Any, float]
    recalled: dict[Any, list[Recalled]]
    memory_strength: dict[Any, float] | None
    shots: dict[Any, int]
    remembered: dict[Any, int]
    uncertainty: Uncertainty

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; classes become strings."""
        plain = {
            name: {str(label): item for label, item in value.items()}
            if isinstance(value, dict)
            else value
            for name, value in asdict(self).items()
        }
        plain["recalled"] = {
            label: [one._asdict() for one in found] for label, found in plain["recalled"].items()
        }
        return plain | {"uncertainty": self.uncertainty._asdict()}


def split_uncertainty(log_probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return total, aleatoric and epistemic uncertainty in nats, each ``[T, B]``.

    H[E p] = E H[p] + I(answer; prototypes), with the expectation over the L samples.

    Args:
        log_probabilities: ``[T, B, N, L]``.
    """
    total = entropy(predictive(log_probabilities).exp())
    aleatoric = entropy(log_probabilities.exp().mT).mean(-1)
    return total, aleatoric, (total - aleatoric).clamp_min(0)


def spread_of(log_probabilities: Tensor) -> Tensor:
    """Return the standard deviation of probabilities over the samples: ``[T, B, N]``."""
    return torch.std(log_probabilities.exp(), -1, correction=0)
