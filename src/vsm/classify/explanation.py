"""Why an image was classified as it was."""

from dataclasses import dataclass
from typing import Any, NamedTuple


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
            there are, since the image itself could be either.
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
        distances: from the image to the prototype, averaged over its samples.
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
