"""Classes that were fitted: their examples, their posterior, and predictions from it."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.errors import ClassifierError
from vsm.evaluation.evaluator import ELEMENTS_AT_ONCE, scale_by_temperature
from vsm.memory import Assigned, Posterior, SupportSet
from vsm.memory.named import NamedMemory
from vsm.memory.reader import PROTOTYPE_SAMPLES
from vsm.nn.layers import mean_distance, predictive
from vsm.runs.trained_model import TrainedModel
from vsm.seeding import generator

DIRECTIONS_SHOWN = 3
NO_FEATURES = torch.empty(0, 0)
UNLABELED = -1  # among integer labels, as in scikit-learn
SAME_EVIDENCE = 1e-4  # relative difference below which a slot is the mean of the very examples


Labels = Sequence[Any] | npt.NDArray[Any] | Tensor


def as_labels(labels: Labels, count: int) -> npt.NDArray[Any]:
    """Return ``count`` labels as an array of strings or of integers; 2.0 is the integer 2.

    Errors use the words of scikit-learn's own.
    """
    if labels is None:
        raise ClassifierError("labels: requires y to be passed, but the target y is None")
    given = np.asarray(labels.tolist() if isinstance(labels, Tensor) else labels, dtype=object)
    if given.shape != (count,):
        raise ClassifierError(
            f"labels: expected one for each of {count} examples, got {list(given.shape)}"
        )
    values = [one.item() if isinstance(one, np.generic) else one for one in given]
    if all(isinstance(one, str) for one in values):
        return np.asarray(values, np.str_)
    if all(type(one) is int or (type(one) is float and one.is_integer()) for one in values):
        return np.asarray(values).astype(np.int64)
    kind = "continuous" if all(type(one) is float for one in values) else "a mixture"
    raise ClassifierError(
        f"labels: Unknown label type: {kind}, like {values[0]!r}; expected all strings or all "
        "integers"
    )


def is_labeled(labels: Labels) -> npt.NDArray[np.bool_]:
    """Return which labels are labels: not None, and not the number -1 ``[n]``."""
    given = np.asarray(labels, dtype=object).ravel()
    return np.array(
        [one is not None and (isinstance(one, str) or one != UNLABELED) for one in given]
    )


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

    The length is relative to the distance of the examples' mean from the mean of all classes, in
    units of the scatter within classes. The directions have the largest shares of the move.
    """

    length: float
    directions: tuple[Direction, ...]


class Uncertainty(NamedTuple):
    """How unsure an answer is, in nats: the entropy of its probabilities, in two parts.

    The aleatoric part is the mean entropy over the posterior of the prototypes, which more examples
    cannot reduce: the image itself is ambiguous. The epistemic part is the mutual information of
    answer and prototypes, which more examples can reduce.
    """

    total: float
    aleatoric: float
    epistemic: float


class Unlabeled(NamedTuple):
    """What unlabeled images added to a class.

    The move of its prototype is relative to the examples' distance from the mean of all classes.
    """

    images: float  # so many were assigned to it
    moved: float


@dataclass(frozen=True)
class Explanation:
    """An answer and what it rests on; dictionaries are by class."""

    prediction: Any
    probabilities: dict[Any, float]  #: averaged over the sampled prototypes, and calibrated
    std: dict[Any, float]  #: standard deviation over the sampled prototypes, before calibration
    distances: dict[Any, float]  #: from the image to the prototype, averaged over its samples
    recalled: dict[Any, list[Recalled]]  #: remembered classes, most weight first
    memory_strength: dict[Any, float] | None  #: examples that the memory counted for, if known
    moved: dict[Any, Moved] | None  #: by the Gaussian memory; None for other memories
    shots: dict[Any, int]  #: examples of each class that were fitted
    remembered: dict[Any, int]  #: images remembered under the same name, which count as examples
    #: before calibration: a temperature would hide what part of it the samples account for
    uncertainty: Uncertainty
    unlabeled: dict[Any, Unlabeled] | None = None  #: None without unlabeled images

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; classes become strings."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Examples:
    """The examples of every fitted class, classes sorted by their labels."""

    labels: tuple[Any, ...] = ()  # N of them
    features: Tensor = NO_FEATURES  # of all examples, class by class [P, D]
    shots: tuple[int, ...] = ()  # how many examples each class has
    remembered: tuple[int, ...] = ()  # how many of these, the first ones, the memory includes

    def add(self, features: Tensor, labels: npt.NDArray[Any]) -> "Examples":
        """Return these and more examples ``[n, D]`` with their labels ``[n]``."""
        known = zip(self.labels, self.shots, strict=True)
        given = [label for label, shot in known for _ in range(shot)] + labels.tolist()
        counts = Counter(given)
        ordered = sorted(counts)
        rows = torch.cat([self.features, features]) if self.labels else features.clone()
        if given != sorted(given):  # mostly they come class by class
            order = sorted(range(len(given)), key=given.__getitem__)  # stable: old before new
            rows = rows[torch.tensor(order).to(rows.device)]
        done = dict(zip(self.labels, self.remembered, strict=True))
        return Examples(
            tuple(ordered),
            rows,
            tuple([counts[label] for label in ordered]),
            tuple([done.get(label, 0) for label in ordered]),
        )

    def not_remembered(self) -> tuple[Tensor, list[str]]:
        """Return features ``[n, D]`` and class names of examples that the memory lacks."""
        classes = zip(self.features.split(self.shots), self.remembered, strict=True)
        new = [rows[done:] for rows, done in classes]
        pairs = zip(self.labels, new, strict=True)
        return torch.cat(new), [str(label) for label, rows in pairs for _ in rows]


@dataclass
class FittedClasses:
    """What a trained model infers of a few classes from their examples and a memory.

    It is inferred when it is first needed, after all images were embedded.
    """

    trained: TrainedModel
    recalled: NamedMemory | None  # that they are inferred with; None for methods without memory
    examples: Examples
    seed: int = 0  # of what is drawn
    unlabeled: Tensor = NO_FEATURES  # of images that help without labels [U, D]

    @cached_property
    @torch.inference_mode()
    def _support(self) -> tuple[SupportSet, tuple[int, ...]]:
        """The support set, and how many remembered images of each class it includes."""
        examples = self.examples
        support = SupportSet.of_classes(self.project(examples.features), examples.shots)
        if self.recalled is None or not self.recalled.names:
            return support, (0,) * len(examples.labels)
        return _add_remembered(support, examples, self.recalled)

    @property
    def posterior(self) -> Posterior:
        """Of the prototypes of one task with N classes, given unlabeled images too."""
        return self._transduced[0]

    @cached_property
    @torch.inference_mode()
    def _transduced(self) -> tuple[Posterior, Assigned | None]:
        if not len(self.unlabeled):
            return self.inductive, None
        images, slots = self.project(self.unlabeled).unsqueeze(0), self._other_slots()
        return self.trained.transduce(self.inductive, images, slots, self.shots)

    @cached_property
    @torch.inference_mode()
    def inductive(self) -> Posterior:
        """Of the prototypes, given the examples and the memory alone."""
        memory, (support, _) = self.recalled, self._support
        state = slot_mask = None
        if memory is not None:
            device = support.mean.device
            state = memory.memory.to(device)
            slot_mask = _slot_mask(memory, list(map(str, self.examples.labels)))
            slot_mask = None if slot_mask is None else slot_mask.to(device)
        random = generator(self.seed, "classify")
        return self.trained.model.infer(support, state, random, slot_mask)

    @cached_property
    def shots(self) -> list[int]:
        """Images of each class that count, fitted and remembered."""
        pairs = zip(self.examples.shots, self._support[1], strict=True)
        return [shot + more for shot, more in pairs]

    def temperature(self) -> float:
        """Return the model's temperature for so many examples, and for unlabeled images if any.

        Where classes differ in how many they have, it is that of their geometric mean.
        """
        first, *others = set(self.shots)
        shot = statistics.geometric_mean(self.shots) if others else first
        used = self.trained.transduction
        by = used if len(self.unlabeled) and used.weight else self.trained
        return by.temperature(shot)

    def project(self, features: Tensor) -> Tensor:
        """Map embedded images ``[n, D]`` to the coordinates of the prototypes ``[n, D]``."""
        memory = None if self.recalled is None else self.recalled.memory
        return self.trained.model.project(features, memory)

    @torch.inference_mode()
    def probabilities(self, features: Tensor, temperature: float) -> npt.NDArray[np.float32]:
        """Return calibrated probabilities of embedded images ``[n, D]``: ``[n, N]``."""
        found = self._in_parts(lambda part: self._probabilities(part, temperature).cpu(), features)
        return found.numpy()

    @torch.inference_mode()
    def most_probable(self, features: Tensor) -> npt.NDArray[np.int64]:
        """Return the index of the most probable class of embedded images ``[n, D]``: ``[n]``.

        No temperature changes it, and where scores are linear there is no need of a softmax.
        """

        def best(part: Tensor) -> Tensor:
            scores = self._linear_scores(part)
            scores = self._probabilities(part, 1.0) if scores is None else scores
            return torch.from_numpy(self._require_finite(scores).cpu().numpy().argmax(1))

        return self._in_parts(best, features).numpy()

    @torch.inference_mode()
    def accepted(self, features: Tensor, coverage: float) -> npt.NDArray[np.bool_]:
        """Return which embedded images ``[n, D]`` are near enough to one of the classes ``[n]``.

        Thresholds were measured without unlabeled images, so these do not count here.
        """
        limits = self.trained.thresholds().at(coverage, self.shots)
        slots = self._other_slots()

        def scores(part: Tensor) -> Tensor:
            return self.inductive.rejection_scores(self.project(part).unsqueeze(0), slots)[0].cpu()

        found = self._in_parts(scores, features, 1 if slots is None else len(slots))
        return (found <= limits).any(-1).numpy()

    @torch.inference_mode()
    def explanations(
        self, features: Tensor, temperature: float, num_recalled: int
    ) -> list[Explanation]:
        """Explain the answers for embedded images ``[n, D]``."""
        labels, (_, remembered) = self.examples.labels, self._support
        kappa = self.inductive.memory_strength(torch.tensor(self.shots).unsqueeze(-1))
        shared: dict[str, Any] = {
            "recalled": self.recalled_classes(num_recalled),
            "memory_strength": None if kappa is None else self._by_class(kappa.unsqueeze(0))[0],
            "moved": self._moved(),
            "shots": dict(zip(labels, self.examples.shots, strict=True)),
            "remembered": dict(zip(labels, remembered, strict=True)),
            "unlabeled": self.assigned(),
        }

        def explain(part: Tensor) -> Tensor:
            queries, prototypes = self.project(part).unsqueeze(0), self.posterior.prototypes
            std, *nats = self.posterior.uncertainty(queries, generator(self.seed, "uncertainty"))
            distances = mean_distance(queries, prototypes, self.trained.model.classifier.distance)
            probabilities = self._probabilities(part, temperature)
            return torch.cat([probabilities, std[0], distances[0], torch.stack(nats, -1)[0]], -1)

        also = PROTOTYPE_SAMPLES * len(labels) ** 2  # numbers of the uncertainty of an image
        found = self._in_parts(explain, features, also)
        *by_class, nats = found.split([*[len(labels)] * 3, 3], -1)
        rows = zip(*map(self._by_class, by_class), nats.tolist(), strict=True)
        return [
            Explanation(
                prediction=max(probabilities, key=probabilities.__getitem__),
                probabilities=probabilities,
                std=std,
                distances=distances,
                uncertainty=Uncertainty(*uncertainty),
                **shared,
            )
            for probabilities, std, distances, uncertainty in rows
        ]

    def recalled_classes(self, most: int) -> dict[Any, list[Recalled]]:
        """Name the remembered classes that each fitted class recalled, most weight first."""
        weights, labels = self.posterior.weights, self.examples.labels
        if weights is None or self.recalled is None or not self.recalled.names:
            return {label: [] for label in labels}
        names = self.recalled.names
        best = weights[0].cpu().topk(min(most, len(names)), dim=-1)
        rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        found = (
            [Recalled(names[a], w) for w, a in zip(*row, strict=True) if w > 0] for row in rows
        )
        return dict(zip(labels, found, strict=True))

    def assigned(self) -> dict[Any, Unlabeled] | None:
        """Return how many unlabeled images each class was assigned, and how far it moved."""
        _, found = self._transduced
        if found is None:
            return None
        moved = (self.posterior.mean - self.inductive.mean)[0].norm(dim=-1)
        distance = self._support[0].mean[0].norm(dim=-1).clamp_min(1e-12)
        rows = zip(found.counts[0].tolist(), (moved / distance).tolist(), strict=True)
        return dict(zip(self.examples.labels, (Unlabeled(*row) for row in rows), strict=True))

    def _moved(self) -> dict[Any, Moved] | None:
        """Return how far the memory moved each prototype, and along which learned directions."""
        if self.inductive.displacement is None:
            return None
        change, support = self.inductive.displacement
        distance = support.norm(dim=-1)  # from the mean of all classes, 0
        shares = change.square() / change.square().sum(-1, keepdim=True).clamp_min(1e-12)
        best = shares[0].topk(min(DIRECTIONS_SHOWN, shares.shape[-1]), dim=-1)
        length = change.norm(dim=-1) / distance.clamp_min(1e-12)
        rows = zip(length[0].tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        moved = [
            Moved(far, tuple(Direction(d + 1, s) for d, s in zip(where, share, strict=True)))
            for far, where, share in rows
        ]
        return dict(zip(self.examples.labels, moved, strict=True))

    def _probabilities(self, features: Tensor, temperature: float) -> Tensor:
        """Eq. 1, averaged over sampled prototypes, calibrated: ``[n, D]`` to ``[n, N]``."""
        scores = self._linear_scores(features)
        if scores is None:
            found = self.posterior.log_probabilities(self.project(features).unsqueeze(0))
        else:
            found = F.log_softmax(scores, -1).unsqueeze(0).unsqueeze(-1)
        calibrated = scale_by_temperature(predictive(found), temperature)
        return self._require_finite(calibrated.exp().squeeze(0))

    def _linear_scores(self, features: Tensor) -> Tensor | None:
        if self.recalled is None or self._linear is None:
            return None
        return F.linear(self.recalled.memory.normalize(features), *self._linear)

    @cached_property
    def _linear(self) -> tuple[Tensor, Tensor] | None:
        """The posterior's linear scores: N·D² operations per fit, and D² less for each image."""
        return self.posterior.linear()

    def _require_finite(self, values: Tensor) -> Tensor:
        """Return ``values``, whose sum is finite if and only if they all are."""
        if not math.isfinite(values.sum()):
            raise ClassifierError(
                f"probabilities: {self.trained.name} and its memory give NaN probabilities; "
                "is one of their files damaged?"
            )
        return values

    def _in_parts(
        self, answer: Callable[[Tensor], Tensor], features: Tensor, also: int = 1
    ) -> Tensor:
        """Answer rows in parts whose samples, or ``also`` numbers per row, fit into memory."""
        _, way, samples, _ = self.posterior.prototypes.shape
        most = max(1, ELEMENTS_AT_ONCE // max(way * samples, also))
        if len(features) <= most:
            return answer(features)
        return torch.cat([answer(part) for part in features.split(most)])

    def _by_class(self, values: Tensor) -> list[dict[Any, float]]:
        """Name the numbers of each row by class: ``[n, N]``."""
        return [dict(zip(self.examples.labels, row, strict=True)) for row in values.tolist()]

    def _other_slots(self) -> Tensor | None:
        """Return the slots that training left of classes that are not fitted: ``[A, D]``."""
        if self.recalled is None or not self.recalled.names:
            return None
        slots = self.recalled.memory.rejection_slots
        known = self.recalled.added | {str(label) for label in self.examples.labels}
        kept = [slot for slot, name in enumerate(self.recalled.names) if name not in known]
        return slots[kept].to(self.trained.model.device) if slots is not None and kept else None


def _slot_mask(memory: NamedMemory, labels: list[str]) -> Tensor | None:
    """Return which slots a class must not recall: boolean ``[1, N, A]``; None if it may all.

    These are the slots of the other fitted classes, and those that a user added under its own
    label, which :func:`_add_remembered` counts.
    """
    known = {n: memory.places[label] for n, label in enumerate(labels) if label in memory.places}
    if not known:
        return None
    slot_mask = torch.zeros(1, len(labels), len(memory.names), dtype=torch.bool)
    for n, slot in known.items():
        slot_mask[0, :, slot] = True
        slot_mask[0, n, slot] = memory.names[slot] in memory.added
    return slot_mask


def _add_remembered(
    support: SupportSet, examples: Examples, memory: NamedMemory
) -> tuple[SupportSet, tuple[int, ...]]:
    """Count what a user added under a class's own label as the images it was made of.

    A slot of the very examples that are fitted is no new evidence, and is not counted.
    """
    shots, counted = list(examples.shots), [0] * len(examples.shots)
    means = support.mean.clone()
    for n, label in enumerate(map(str, examples.labels)):
        if label in memory.added:
            slot = memory.places[label]
            own = memory.slots.coordinates[slot].to(means.device)
            if (own - means[0, n]).norm() > SAME_EVIDENCE * own.norm():
                counted[n] = int(memory.slots.counts[slot])
                shots[n] += counted[n]
                means[0, n] = torch.lerp(means[0, n], own, counted[n] / shots[n])
    if any(counted):
        support = SupportSet(support.features, means, means.new_tensor(shots).view(1, -1, 1))
    return support, tuple(counted)
