"""What was measured on validation classes and is stored with a model: ``calibration.json``."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from vsm.errors import DocumentError, RunError
from vsm.evaluation.rejection import Thresholds
from vsm.memory.named import NamedMemory
from vsm.system.documents import read_object, shortened, write_json


@dataclass(frozen=True)
class Calibration:
    """Temperatures of the probabilities, and when to answer "none of these".

    Attributes:
        temperatures: T by the number of support images per class; empty if none was fitted.
        thresholds: rejection thresholds; None if they were not measured.
        memory_digest: of the trained classes in the memory that the thresholds were measured with.
    """

    temperatures: Mapping[int, float] = field(default_factory=dict)
    thresholds: Thresholds | None = None
    memory_digest: str | None = None

    def temperature(self, shot: float) -> float | None:
        """Return T for a number of support images per class; None if none was fitted.

        Between two fitted ones log T is linear in log K; beyond the last it is that of the last.
        """
        if not self.temperatures:
            return None
        shots = sorted(self.temperatures)
        for fewer, more in pairwise(shots):
            if fewer < shot < more:
                share = math.log(shot / fewer) / math.log(more / fewer)
                low, high = (math.log(self.temperatures[known]) for known in (fewer, more))
                return math.exp(low + share * (high - low))
        return self.temperatures[min(shots, key=lambda known: abs(known - shot))]

    def as_dict(self) -> dict[str, Any]:
        """Return what is stored; ready for JSON."""
        return {
            "temperatures": {str(shot): value for shot, value in self.temperatures.items()},
            "thresholds": None if self.thresholds is None else self.thresholds.as_dict(),
            "memory_digest": self.memory_digest,
        }

    @staticmethod
    def from_dict(stored: dict[str, Any]) -> "Calibration":
        """Return what :meth:`as_dict` described, or raise a ``ValueError``."""
        thresholds, digest = stored["thresholds"], stored["memory_digest"]
        temperatures = {int(shot): value for shot, value in stored["temperatures"].items()}
        for shot, value in temperatures.items():
            if type(value) not in (int, float) or not 0 < value < math.inf or shot < 1:
                raise ValueError(
                    f"expected temperatures above 0 of at least 1 shot, got {shortened(value)}"
                )
        if not isinstance(digest, str | None):
            raise TypeError(f"expected a text as memory_digest, got {shortened(digest)}")
        found = None if thresholds is None else Thresholds.from_dict(thresholds)
        return Calibration(temperatures, found, digest)

    def write(self, path: Path, fingerprint: str) -> None:
        """Store it with the model whose encoder has this fingerprint."""
        write_json(path, {"encoder": fingerprint, **self.as_dict()})

    @staticmethod
    def read(path: Path, fingerprint: str) -> "Calibration":
        """Read what is stored with a model; an empty one if there is no file."""
        if not path.is_file():
            return NO_CALIBRATION
        try:
            stored = read_object(path)
            measured_with, found = str(stored["encoder"]), Calibration.from_dict(stored)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = error.reason if isinstance(error, DocumentError) else shortened(repr(error))
            raise RunError(
                f"{path} is damaged: {reason}; delete it, and measure it again with vsm models "
                f"calibrate {path.parent}"
            ) from error
        if measured_with != fingerprint:
            raise RunError(
                f"{path} was measured with the encoder {measured_with[:12]}, but model.safetensors "
                f"beside it holds {fingerprint[:12]}; was one of the two exchanged?"
            )
        return found


NO_CALIBRATION = Calibration()


def memory_digest(memory: NamedMemory | None) -> str:
    """Identify what training left in a memory; what people added to it does not count."""
    trained = [] if memory is None else sorted(set(memory.names) - memory.added)
    return hashlib.sha256("\x1f".join(trained).encode()).hexdigest()[:16]
