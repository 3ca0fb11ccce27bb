"""What is measured on validation classes and stored with a model: ``calibration.json``.

It holds temperatures, and conformal thresholds that say when to answer "none of these".

With the Gaussian memory the score of a query x for class n is how much nearer x lies to n than to a
class never met, in squared Mahalanobis distances (Ren et al. 2021 call it relative):

    s_n(x) = ½ [ |x − m_n|² in units of W + P_n − |x − g|² in units of W + B ].

That is a log ratio of densities without determinants, which are the same for all queries and all
classes of one K, but depend on what is remembered: thresholds are measured with fewer classes.

With other memories it is the distance to the class's prototype, averaged over its samples, against
the distances to all that is remembered and is none of the classes:

    s_n(x) = D(x, z_n) / τ + log Σ_a exp(−D(x, M_a) / τ).

Without a memory of slots the second part is zero. A query is answered if s_n(x) is at most the
threshold for some n. Of the lowest scores min_n s_n of k queries of known classes, the
⌈(k + 1)·c⌉-th smallest is not exceeded by that of a new query with probability c, if the new one
comes about as those did: so many queries of fitted classes are answered. Scores shrink as
prototypes become better known, and their minimum as there are more classes, so there is a
threshold for each number of support images and of classes.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsm.data import Dataset, EpisodeSampler
from vsm.errors import ClassifierError, DocumentError, RunError
from vsm.evaluation.evaluator import split_embedder
from vsm.evaluation.memory_choice import ClassFeatures
from vsm.evaluation.transduction_choice import MOST_WAY, Trial, choose_transduction
from vsm.memory import Memory, SupportSet, Transduction
from vsm.memory.named import NamedMemory
from vsm.memory.transduction import COVERAGE, at_shot, read_temperatures
from vsm.model import FewShotModel
from vsm.seeding import generator
from vsm.system.files import read_object, shortened, write_json

SHOTS = (1, 2, 5, 10)
WAYS = (1, 2, 5, 10, 20)
LEVELS = 200
"""Thresholds are kept for 1/200, 2/200, … of the scores."""
MOST_QUERIES, EPISODES, AT_ONCE = 10, 50, 10
SIGNIFICANT_DIGITS = 5  # of a stored threshold


@dataclass(frozen=True)
class Thresholds:
    """Largest scores that are accepted."""

    by_shot: dict[int, dict[int, tuple[float, ...]]]
    """By the number of support images, and of classes: for a coverage of 1/L, 2/L, … (L − 1)/L."""

    def at(self, coverage: float, shots: Sequence[int]) -> Tensor:
        """Return the threshold of each of N classes ``[N]`` by its number of images.

        It is that of the largest numbers, of images and of classes, that are known and not above
        them, which turns away too few rather than too many.
        """
        if not 0 < coverage < 1:
            raise ClassifierError(f"reject: expected a coverage between 0 and 1, got {coverage}")
        level = math.ceil(coverage * LEVELS - 1e-9) - 1
        if level >= LEVELS - 1:
            return torch.full((len(shots),), math.inf)  # more than any threshold can promise
        chosen = [self.by_shot[_not_above(shot, self.by_shot)] for shot in shots]
        return torch.tensor([ways[_not_above(len(shots), ways)][level] for ways in chosen])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, rounded."""
        return {
            str(shot): {
                str(way): [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values]
                for way, values in ways.items()
            }
            for shot, ways in self.by_shot.items()
        }

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> "Thresholds":
        """Restore them from :meth:`as_dict`; a ``ValueError`` if there are not enough."""
        by_shot = {
            int(shot): {int(way): tuple(values) for way, values in ways.items()}
            for shot, ways in stored.items()
        }
        numbers = [one for ways in by_shot.values() for values in ways.values() for one in values]
        if any(type(one) not in (int, float) or math.isnan(one) for one in numbers):
            raise ValueError("expected numbers as thresholds")
        if any(number < 1 for shot, ways in by_shot.items() for number in (shot, *ways)):
            raise ValueError("expected thresholds of at least 1 image and class")
        if {len(values) for ways in by_shot.values() for values in ways.values()} != {LEVELS - 1}:
            raise ValueError(f"expected {LEVELS - 1} thresholds each")
        return Thresholds(by_shot)


def _not_above(number: int, known: Collection[int]) -> int:
    """Return the largest of the known numbers that is not above one, or else the smallest."""
    return max((one for one in known if one <= number), default=min(known))


def conformal(scores: Tensor) -> tuple[float, ...]:
    """Return the ⌈(n + 1)·c⌉-th smallest of n scores for each coverage c; ∞ where n is too few."""
    ordered = scores.flatten().sort().values.tolist()
    count = len(ordered)
    ranks = (math.ceil((count + 1) * level / LEVELS - 1e-9) for level in range(1, LEVELS))
    return tuple(ordered[rank - 1] if rank <= count else math.inf for rank in ranks)


@torch.no_grad()
def lowest_scores(
    model: FewShotModel, memory: Memory | None, support: Tensor, queries: Tensor, seed: int
) -> dict[int, Tensor]:
    """Score queries of known classes as if so many of these had been fitted, and no others.

    The N classes of a task are taken in groups of w, the rest being left out, and the score of a
    query is its lowest for the classes of its group: ``[T, w, Q, N // w]`` for each w of ``WAYS``
    up to N. Support is ``[T, N, K, D]``, queries ``[T, N, Q, D]``; ``seed`` is of the prototypes.
    """
    random = generator(seed, "rejection-noise", support.shape[2])
    support, queries = (model.project(part, memory) for part in (support, queries))
    posterior = model.infer(SupportSet.of(support), memory, random)
    slots = None if memory is None else memory.rejection_slots
    scores = posterior.rejection_scores(queries.flatten(1, 2), slots)
    tasks, way, num_queries, _ = queries.shape
    scores = scores.view(tasks, way, num_queries, way)
    lowest = {}
    for size in (size for size in WAYS if size <= way):
        groups = way // size
        kept = scores[:, : groups * size, :, : groups * size]
        shape = (tasks, groups, size, num_queries, groups, size)
        lowest[size] = kept.reshape(shape).diagonal(dim1=1, dim2=4).amin(3)
    return lowest


@dataclass(frozen=True)
class Calibration:
    """What was measured: temperatures, thresholds, and how unlabeled images are used."""

    temperatures: Mapping[int, float] = field(default_factory=dict)  # by support images per class
    thresholds: Thresholds | None = None
    memory_digest: str | None = None  # of the memory that the thresholds were measured with
    transduction: Transduction | None = None

    def temperature(self, shot: float) -> float | None:
        """Return T for a number of support images per class; None if none was fitted."""
        return at_shot(self.temperatures, shot) if self.temperatures else None

    def as_dict(self) -> dict[str, Any]:
        """Return what is stored; ready for JSON."""
        return {
            "temperatures": {str(shot): value for shot, value in self.temperatures.items()},
            "thresholds": None if self.thresholds is None else self.thresholds.as_dict(),
            "memory_digest": self.memory_digest,
            "transduction": None if self.transduction is None else self.transduction.as_dict(),
        }

    @staticmethod
    def from_dict(stored: dict[str, Any]) -> "Calibration":
        """Return what :meth:`as_dict` described, or raise a ``ValueError``."""
        thresholds, digest = stored["thresholds"], stored["memory_digest"]
        temperatures = read_temperatures(stored["temperatures"])
        if not isinstance(digest, str | None):
            raise TypeError(f"expected a text as memory_digest, got {shortened(digest)}")
        found = None if thresholds is None else Thresholds.from_dict(thresholds)
        used = stored.get("transduction")
        transduction = None if used is None else Transduction.from_dict(used)
        return Calibration(temperatures, found, digest, transduction)

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


def calibrate(
    model: FewShotModel,
    episodes: Callable[[int], Iterable[tuple[Memory | None, Tensor, Tensor]]],
    shots: Sequence[int],
    trials: Sequence[Trial],
    seed: int,
) -> Calibration:
    """Measure thresholds on episodes of known classes, for every K of ``shots``.

    ``episodes(K)`` gives memory, support and queries as :func:`lowest_scores` takes them. On
    ``trials`` it is chosen how unlabeled images are used.
    """
    by_shot = {}
    for shot in shots:
        found = [
            lowest_scores(model, memory, support, queries, seed)
            for memory, support, queries in episodes(shot)
        ]
        by_shot[shot] = {
            way: conformal(torch.cat([one[way].flatten() for one in found])) for way in found[0]
        }
    thresholds = Thresholds.from_dict(Thresholds(by_shot).as_dict())  # rounded, as they are stored
    way = min(MOST_WAY, *(len(trial.others.sizes) for trial in trials))
    limits = {shot: thresholds.at(COVERAGE, [shot] * way)[0].item() for shot in by_shot}
    transduction = choose_transduction(model, trials, limits, seed)
    return Calibration(thresholds=thresholds, transduction=transduction)


def calibrate_on_validation(
    model: FewShotModel, memory: Memory | None, dataset: Dataset
) -> Calibration:
    """Measure on the validation classes, which nothing was trained on.

    ``dataset`` is what the model was trained on; its validation images are embedded once.
    """
    sizes = dataset.class_sizes[dataset.classes("validation")]
    smallest, way = int(sizes.min()), min(WAYS[-1], len(sizes))

    def sampler(shot: int) -> EpisodeSampler:
        return EpisodeSampler(dataset, "validation", way, shot, min(MOST_QUERIES, smallest - shot))

    embed = split_embedder(model.encoder, sampler(1))

    def episodes(shot: int) -> Iterator[tuple[Memory | None, Tensor, Tensor]]:
        chosen = sampler(shot)
        for block in chosen.evaluation_episodes(EPISODES, 0):
            for image_ids in block.image_ids.split(AT_ONCE):
                support, queries = embed(image_ids).split([shot, chosen.queries], 2)
                yield memory, support, queries

    rows = embed(torch.from_numpy(dataset.split_ids("validation")))
    trial = Trial(memory, ClassFeatures(rows, sizes.tolist()))
    shots = [shot for shot in SHOTS if shot < smallest]
    return calibrate(model, episodes, shots, [trial], 0)
