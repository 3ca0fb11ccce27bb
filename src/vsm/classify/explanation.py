"""Why an image was classified as it was."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Recalled(NamedTuple):
    """A remembered class, and its weight λ (Eq. 9) in the prior of a fitted class."""

    name: str
    weight: float


class Direction(NamedTuple):
    """A learned direction, numbered from the most discriminative one, and its share."""

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
        aleatoric: mean entropy over the posterior of the prototypes, which more examples cannot
            reduce: the image itself is ambiguous.
        epistemic: the rest, the mutual information of answer and prototypes, which more examples
            can reduce.
    """

    total: float
    aleatoric: float
    epistemic: float


@dataclass(frozen=True)
class Explanation:
    """An answer and what it rests on; dictionaries are by class.

    Attributes:
        prediction: the answer.
        probabilities: of each class, averaged over the sampled prototypes, and calibrated.
        std: standard deviation of that probability over the sampled prototypes, each as it is
            before calibration.
        distances: from the image to the prototype, averaged over its samples.
        recalled: remembered classes that each class recalled, most weight first.
        moved: how the Gaussian memory moved each prototype; None for other memories.
        memory_strength: number of examples that the memory counted for; None if not known.
        shots: examples of each class that were fitted.
        remembered: images remembered under the same name, which count as examples.
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
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
