"""A few labeled pictures in, a classifier out, in the manner of scikit-learn."""

import math
import statistics
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vsm.classify.empirical_bayes import learn_feature_model
from vsm.classify.explanation import (
    Explanation,
    Recalled,
    Uncertainty,
    split_uncertainty,
    spread_of,
)
from vsm.classify.inputs import Labels, as_features, as_labels, not_fitted
from vsm.classify.pretrained import Pretrained, from_parts, open_pretrained
from vsm.errors import ClassifierError, RunError
from vsm.evaluation.calibration import scale_by_temperature
from vsm.evaluation.evaluator import ELEMENTS_AT_ONCE
from vsm.evaluation.rejection import class_scores, slots_of
from vsm.memory import SlotMemory, SupportSet
from vsm.memory.recall import VariationalRecall
from vsm.model import FewShotModel, InferredPrototypes
from vsm.nn.prototype_classifier import mean_distance, predictive
from vsm.runs.memory_files import Changes, NamedMemory, by_hand, restored_memory
from vsm.runs.tensor_files import load_tensors, save_tensors, strip_prefix
from vsm.seeding import generator
from vsm.settings import RunSettings
from vsm.system.devices import Placement, choose_placement

KIND, FORMAT = "classifier", 2
PARAMETERS = ("encoder", "temperature", "seed")
NONE_OF_THESE, NO_CLASS = "none of these", -1
SAME_EVIDENCE = 1e-4  # relative difference below which a slot is made of the very support


class FewShotClassifier:
    """Classify pictures, or features, by a few examples of each class and a long-term memory.

    The same inputs give the same answers: draws depend on ``seed`` alone. Reading never writes:
    only :meth:`remember` changes the memory, and later fits recall what it added.

    Args:
        encoder: what :meth:`from_pretrained` opens. None takes rows of features that any encoder
            made; :meth:`learn_memory` then gives it a memory.
        temperature: T of the probabilities p^(1/T) / Z, above 1 for less confidence; answers stay.
            None is the one on the model's card for so many examples, 1.0 leaves them as computed.
        seed: of the sampled prototypes.

    Attributes:
        classes_: the labels that were fitted, sorted.
    """

    classes_: npt.NDArray[Any]
    _opened: Pretrained
    _inferred: InferredPrototypes
    _recalled: NamedMemory | None = None  # what the fitted classes were inferred with
    _memory: NamedMemory | None = None  # what later ones will be, if it differs from the encoder's
    _labels: tuple[Any, ...] = ()
    _support: tuple[Tensor, ...] = ()  # features of each class
    _remembered: tuple[int, ...] = ()  # how many of them the memory holds already
    _counted: tuple[int, ...] = ()  # images that the memory holds under each label

    def __init__(
        self,
        encoder: Pretrained | None = None,
        *,
        temperature: float | None = None,
        seed: int = 0,
    ) -> None:
        self.encoder = encoder
        self.temperature = temperature
        self.seed = seed

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        memory: str | Path | None = None,
        backbone: str | None = None,
        device: str = "cpu",
        temperature: float | None = None,
        seed: int = 0,
    ) -> Self:
        """Open a trained model.

        Args:
            source: a run directory.
            memory: a memory file in place of the model's own, of the same encoder.
            backbone: the run's own code ``module:attribute``, named again to allow its import.
            device: where to compute: cpu, cuda, cuda:1, mps or auto.
            temperature: as in the constructor, and so is ``seed``.
            seed: see there.
        """
        opened = open_pretrained(source, memory, backbone, choose_placement(device, "float32"))
        return cls(opened, temperature=temperature, seed=seed)

    def learn_memory(
        self,
        features: Any,
        labels: Labels,
        *,
        encoder_name: str = "unnamed",
        normalize: bool = True,
    ) -> Self:
        """Learn a memory over features, one slot a class, and how far to trust it.

        Args:
            features: rows ``[n, D]`` of at least three classes with at least two rows each.
            labels: n of them.
            encoder_name: whose features these are; memories of other encoders will be refused.
            normalize: scale every row to length one, then and ever after.
        """
        rows = as_features(features)
        given = as_labels(labels, len(rows))
        names, class_ids = np.unique(given, return_inverse=True)
        model, memory, thresholds = learn_feature_model(
            rows, torch.from_numpy(class_ids), encoder_name, normalize, self.seed
        )
        slots = tuple(str(names[class_id]) for class_id in memory.slot_classes)
        return self.set_params(encoder=from_parts(model, memory, slots, thresholds))

    def fit(self, images: Any, y: Labels) -> Self:
        """Take in a few examples of each class, in place of all before; one of each is enough.

        Args:
            images: paths, images of Pillow's, arrays ``[H, W(, C)]`` or tensors ``[C, H, W]``, in
                any mixture, or one array of them; rows of features ``[n, D]`` if the encoder is
                None or takes features.
            y: a label for each, all strings or all integers.
        """
        opened = self.encoder or _plain(images)
        examples = _embedded(opened, images, y)
        self._forget_fit()
        self._opened, self._recalled = opened, self.memory
        self._take_in(*examples)
        return self

    def partial_fit(self, images: Any, y: Labels, classes: Labels | None = None) -> Self:
        """Take in more examples, or new classes, besides those that were fitted.

        Args:
            images: as in :meth:`fit`.
            y: see there.
            classes: what scikit-learn announces of later calls; new classes may come unannounced.
        """
        del classes
        if not self._is_fitted:
            return self.fit(images, y)
        features, given = _embedded(self._opened, images, y)
        if given.dtype.kind != self.classes_.dtype.kind:
            raise ClassifierError(
                f"labels: the fitted ones are like {self.classes_[0]!r}, got {given[0]!r}; use "
                "strings or integers throughout"
            )
        self._take_in(features, given)
        return self

    def predict(self, images: Any, reject: float | None = None) -> npt.NDArray[Any]:
        """Return the most probable class of each picture ``[n]``.

        Args:
            images: as in :meth:`fit`.
            reject: answer "none of these" (or -1 among integers) where a picture is too far from
                all classes: that will befall about 1 − ``reject`` of the pictures of these classes.
                Thresholds come with a shipped model; those of a run are measured on
                validation classes when first asked for.
        """
        self._require_fitted()
        features = self._opened.embed(images)
        best: npt.NDArray[Any] = self.classes_[self._predict_features(features).argmax(1)]
        if reject is None:
            return best
        return np.where(self.accepted(features, reject), best, self._none_of_these)

    @torch.no_grad()
    def accepted(self, features: Tensor, coverage: float) -> npt.NDArray[np.bool_]:
        """Tell which embedded pictures ``[n, D]`` are near enough to one of the classes ``[n]``."""
        self._require_fitted()
        limits = self._opened.thresholds().at(coverage, self._shots)
        model, prototypes, slots = self._opened.model, self._inferred.prototypes, self._others()
        at_once = self._parts(features, 1 if slots is None else len(slots))
        near = [
            (class_scores(model, prototypes, part.unsqueeze(0), slots)[0].cpu() <= limits).any(-1)
            for part in at_once
        ]
        return torch.cat(near).numpy()

    def _others(self) -> Tensor | None:
        """Return the slots that training left of classes that are not fitted: ``[A, D]``."""
        if self._recalled is None or not self._recalled.names:
            return None
        slots = slots_of(self._recalled.memory)
        known = self._recalled.added | {str(label) for label in self._labels}
        kept = [slot for slot, name in enumerate(self._recalled.names) if name not in known]
        return slots[kept].to(self._opened.model.device) if slots is not None and kept else None

    @property
    def _none_of_these(self) -> str | int:
        answer: str | int = NONE_OF_THESE if self.classes_.dtype.kind == "U" else NO_CLASS
        if answer in self._labels:
            raise ClassifierError(
                f"reject: {answer!r} means that a picture is none of the classes, but one has that "
                "label; give it another"
            )
        return answer

    @property
    def _shots(self) -> list[int]:
        """Images of each class that count, fitted and remembered."""
        return [len(rows) + more for rows, more in zip(self._support, self._counted, strict=True)]

    def _distances(self, features: Tensor) -> Tensor:
        """Return distances to prototypes, averaged over their samples: ``[n, D]`` to ``[n, N]``."""
        prototypes, kind = self._inferred.prototypes, self._opened.model.classifier.distance
        return mean_distance(features.unsqueeze(0), prototypes, kind)[0]

    def predict_proba(self, images: Any) -> npt.NDArray[np.float32]:
        """Return ``[n, N]``, the probability of each of ``classes_``.

        It is averaged over the sampled prototypes and calibrated by the temperature.
        """
        self._require_fitted()
        return self._predict_features(self._opened.embed(images))

    def score(self, images: Any, y: Labels) -> float:
        """Return the share of pictures whose most probable class is the label given."""
        answers = self.predict(images)
        return float(np.mean(answers == as_labels(y, len(answers))))

    def explain(self, image: Any, num_recalled: int = 5) -> Explanation:
        """Tell what the answer for one picture rests on.

        Args:
            image: a picture, or one row of features ``[D]``.
            num_recalled: how many remembered classes to name for each class, at most.
        """
        return self.explain_all(_as_batch(image), num_recalled)[0]

    def explain_all(self, images: Any, num_recalled: int = 5) -> list[Explanation]:
        """Explain many pictures at once, given as in :meth:`fit`."""
        self._require_fitted()
        return self.explain_features(self._opened.embed(images), num_recalled)

    @torch.no_grad()
    def explain_features(self, features: Tensor, num_recalled: int = 5) -> list[Explanation]:
        """Explain pictures that are embedded already: ``[n, D]``, as the encoder's embed gives."""
        self._require_fitted()
        return [
            told for part in self._parts(features) for told in self._explained(part, num_recalled)
        ]

    def _explained(self, features: Tensor, num_recalled: int) -> list[Explanation]:
        log_probabilities = self._log_probabilities(features)
        recalled, strength = self._recollected(num_recalled), self._strength()
        shots = dict(zip(self._labels, map(len, self._support), strict=True))
        remembered = dict(zip(self._labels, self._counted, strict=True))
        by_picture = zip(
            self._by_class(self._calibrated(log_probabilities)),
            self._by_class(spread_of(log_probabilities)[0]),
            self._by_class(self._distances(features)),
            torch.stack(split_uncertainty(log_probabilities), -1)[0].tolist(),
            strict=True,
        )
        return [
            Explanation(
                prediction=max(probabilities, key=probabilities.__getitem__),
                probabilities=probabilities,
                spread=spread,
                distances=distances,
                recalled=recalled,
                memory_strength=strength,
                shots=shots,
                remembered=remembered,
                uncertainty=Uncertainty(*uncertainty),
            )
            for probabilities, spread, distances, uncertainty in by_picture
        ]

    def remember(self) -> Changes:
        """Consolidate the examples of the fitted classes into the long-term memory.

        Examples are taken in once, however often this is called. The fitted classes go on
        recalling the memory that they were fitted with, in which they are not: their answers stay
        the same to the bit. The next :meth:`fit` reads the new memory. What was remembered under
        one of its labels counts as the images that it was made of; all else can be recalled.
        """
        self._require_fitted()
        opened, memory = self._opened, self.memory
        consolidation = by_hand(opened.model)
        if memory is None or consolidation is None:
            raise ClassifierError(
                f"remember: the method {opened.model.settings.method} has no long-term memory; use "
                "a model with one, or learn_memory over features"
            )
        fresh = [rows[done:] for rows, done in zip(self._support, self._remembered, strict=True)]
        names = [
            str(label)
            for label, rows in zip(self._labels, fresh, strict=True)
            for _ in range(len(rows))
        ]
        source = {"from": "FewShotClassifier.remember"}
        self._memory, changes = memory.taking_in(consolidation, torch.cat(fresh), names, source)
        self._remembered = tuple(len(rows) for rows in self._support)
        return changes

    @property
    def memory(self) -> NamedMemory | None:
        """The long-term memory as it is now; nothing for methods without one."""
        if self._memory is not None:
            return self._memory
        return None if self.encoder is None else self.encoder.memory

    def save(self, path: str | Path) -> None:
        """Write encoder, memory and examples as one safetensors file, atomically."""
        self._require_fitted()
        opened = self._opened
        tensors = opened.tensors() | {
            "support.features": torch.cat(self._support),
            "support.sizes": torch.tensor([len(rows) for rows in self._support]),
            "support.remembered": torch.tensor(self._remembered),
        }
        stamps = {}
        for part, memory in (("memory", self.memory), ("recalled", self._recalled)):
            if memory is not None:
                tensors |= {f"{part}.{k}": v for k, v in memory.memory.tensors().items()}
                stamps[part] = memory.stamp()
        facts = {
            "kind": KIND,
            "format": FORMAT,
            **opened.facts(),
            "has_encoder": self.encoder is not None,
            "labels": list(self._labels),
            "seed": self.seed,
            "chosen_temperature": self.temperature,
            "memories": stamps,
        }
        save_tensors(Path(path), tensors, facts)

    @classmethod
    def load(cls, path: str | Path, *, backbone: str | None = None, device: str = "cpu") -> Self:
        """Read what :meth:`save` wrote; nothing in a file is ever run.

        Args:
            path: the file.
            backbone: the encoder's own code ``module:attribute``, named again to allow its import.
            device: where to compute.
        """
        source = Path(path)
        tensors, facts = load_tensors(source)
        if not isinstance(facts, dict) or facts.get("kind") != KIND:
            raise RunError(f"{source} does not hold a classifier; write one with save")
        if facts["format"] != FORMAT:
            raise RunError(
                f"{source} has format {facts['format']}, but this version reads {FORMAT}; use the "
                "version of vsm that wrote it"
            )
        placement = choose_placement(device, "float32")
        try:
            return cls._restored(tensors, facts, source, backbone, placement)
        except (KeyError, TypeError, RuntimeError) as error:
            raise RunError(f"{source} is damaged: its parts do not fit ({error!r})") from error

    @classmethod
    def _restored(
        cls,
        tensors: dict[str, Tensor],
        facts: dict[str, Any],
        source: Path,
        backbone: str | None,
        placement: Placement,
    ) -> Self:
        opened = Pretrained.restored(tensors, facts, source, backbone, placement)
        memories = {
            part: restored_memory(strip_prefix(tensors, part), stamp, source)
            for part, stamp in facts["memories"].items()
        }
        if "memory" in memories:
            on_device = memories["memory"].memory.to(placement.device)
            opened = replace(opened, memory=replace(memories["memory"], memory=on_device))
        loaded = cls(
            opened if facts["has_encoder"] else None,
            temperature=facts["chosen_temperature"],
            seed=facts["seed"],
        )
        loaded._opened = opened
        loaded._recalled = memories.get("recalled")
        loaded._labels = tuple(facts["labels"])
        features = tensors["support.features"].to(placement.device)
        loaded._support = features.split(tensors["support.sizes"].tolist())
        loaded._remembered = tuple(tensors["support.remembered"].tolist())
        loaded._infer()
        return loaded

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002 - scikit-learn's
        """Return the constructor's arguments, as scikit-learn's estimators do."""
        return {name: getattr(self, name) for name in PARAMETERS}

    def set_params(self, **parameters: Any) -> Self:
        """Set the constructor's arguments; with another encoder all examples are forgotten."""
        for name, value in parameters.items():
            if name not in PARAMETERS:
                raise ClassifierError(f"{name}: is no parameter; there are {', '.join(PARAMETERS)}")
            setattr(self, name, value)
        if "encoder" in parameters:
            self._memory = None
            self._forget_fit()
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return self._is_fitted

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags  # noqa: PLC0415 - extra

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(two_d_array=self._takes_features),
        )

    @property
    def n_features_in_(self) -> int:
        """Numbers a row, where the classifier takes features and is fitted."""
        if not (self._is_fitted and self._takes_features):
            raise AttributeError("n_features_in_: is known of features, once they are fitted")
        return self._opened.model.num_features

    @property
    def _takes_features(self) -> bool:
        return self.encoder is None or self.encoder.pictures is None

    def __repr__(self) -> str:
        opened = "None" if self.encoder is None else f"<{self.encoder.name}>"
        fitted = f", fitted to {len(self._labels)} classes" if self._is_fitted else ""
        return f"FewShotClassifier({opened}{fitted})"

    @property
    def _is_fitted(self) -> bool:
        return bool(self._support)

    def _require_fitted(self) -> None:
        if not self._is_fitted:
            raise not_fitted("this classifier knows no classes yet; call fit first")

    def _forget_fit(self) -> None:
        self._labels, self._support, self._remembered = (), (), ()

    def _take_in(self, features: Tensor, labels: npt.NDArray[Any]) -> None:
        """Add examples to those of their classes, keep classes sorted, and infer anew."""
        held = {
            label: (rows, done)
            for label, rows, done in zip(self._labels, self._support, self._remembered, strict=True)
        }
        for label in np.unique(labels).tolist():
            rows = features[torch.from_numpy(labels == label).to(features.device)]
            before, done = held.get(label, (rows[:0], 0))
            held[label] = (torch.cat([before, rows]), done)
        self._labels = tuple(sorted(held))
        self._support = tuple(held[label][0] for label in self._labels)
        self._remembered = tuple(held[label][1] for label in self._labels)
        self._infer()

    @torch.no_grad()
    def _infer(self) -> None:
        """Infer the prototypes of all fitted classes from their examples and the memory."""
        self.classes_ = np.asarray(self._labels)
        model = self._opened.model
        support, self._counted = SupportSet.of_classes(self._support), (0,) * len(self._labels)
        memory = slot_mask = None
        if self._recalled is not None:
            memory = self._recalled.memory.to(model.device)
            if isinstance(model.recall, VariationalRecall) and isinstance(memory, SlotMemory):
                model.recall.keep(memory)
            if self._recalled.names:
                slot_mask = self._hidden()
                support = self._with_remembered(support)
        self._inferred = model.infer(support, memory, generator(self.seed, "classify"), slot_mask)

    def _hidden(self) -> Tensor | None:
        """Tell which slots a class must not recall by likeness: boolean ``[1, N, A]``, or none.

        Those under the labels of other fitted classes, since it is none of them; and what people
        remembered under its own, which :meth:`_with_remembered` counts.
        """
        assert self._recalled is not None
        names, added = self._recalled.names, self._recalled.added
        place = {str(label): n for n, label in enumerate(self._labels)}
        if place.keys().isdisjoint(names):
            return None
        slot_mask = torch.zeros(1, len(place), len(names), dtype=torch.bool)
        for slot, name in enumerate(names):
            if name in place:
                slot_mask[0, :, slot] = True
                slot_mask[0, place[name], slot] = name in added
        return slot_mask.to(self._opened.model.device)

    def _with_remembered(self, support: SupportSet) -> SupportSet:
        """Count what was remembered under a class's own label as the images it was made of.

        A slot of the very examples that are fitted tells nothing new, and is not counted.
        """
        assert self._recalled is not None
        added = self._recalled.added
        if not added:
            return support
        slots, place = self._recalled.slots, dict(zip(self._recalled.names, count(), strict=False))
        means, counted = support.mean.clone(), []
        for n, (label, rows) in enumerate(zip(self._labels, self._support, strict=True)):
            counted.append(0)
            if str(label) in added:
                slot = place[str(label)]
                content = slots.content[slot].to(means.device)
                difference = (content - means[0, n]).norm()
                if difference > SAME_EVIDENCE * content.norm():
                    counted[n] = int(slots.counts[slot])
                    share = counted[n] / (counted[n] + len(rows))
                    means[0, n] = torch.lerp(means[0, n], content, share)
        self._counted = tuple(counted)
        if not any(counted):
            return support
        shots = [len(rows) + more for rows, more in zip(self._support, counted, strict=True)]
        return SupportSet(support.features, means, means.new_tensor(shots).view(1, -1, 1))

    @torch.no_grad()
    def _log_probabilities(self, features: Tensor) -> Tensor:
        """Eq. 1 for every sample of the prototypes: ``[n, D]`` to ``[1, n, N, L]``."""
        classifier = self._opened.model.classifier
        log_probabilities: Tensor = classifier(features.unsqueeze(0), self._inferred.prototypes)
        return log_probabilities

    def _calibrated(self, log_probabilities: Tensor) -> Tensor:
        """Average over samples, and calibrate: ``[1, n, N, L]`` to probabilities ``[n, N]``."""
        return scale_by_temperature(predictive(log_probabilities), self._calibration()).exp()[0]

    def _calibration(self) -> float:
        """Return the temperature given, or that of the model for so many examples.

        Where classes differ in how many they have, it is that of their geometric mean.
        """
        if self.temperature is None:
            return self._opened.temperature(statistics.geometric_mean(self._shots))
        if not 0 < self.temperature < math.inf:
            raise ClassifierError(
                f"temperature: expected a number above 0, or None for the model's own, got "
                f"{self.temperature!r}"
            )
        return self.temperature

    def _predict_features(self, features: Tensor) -> npt.NDArray[np.float32]:
        answers = [
            self._calibrated(self._log_probabilities(part)) for part in self._parts(features)
        ]
        return torch.cat(answers).cpu().numpy()

    def _parts(self, features: Tensor, also: int = 1) -> tuple[Tensor, ...]:
        """Split rows into parts whose samples, or ``also`` numbers a row, fit into memory."""
        _, way, samples, _ = self._inferred.prototypes.shape
        per_row = max(way * samples, also)
        parts: tuple[Tensor, ...] = features.split(max(1, ELEMENTS_AT_ONCE // per_row))
        return parts

    def _by_class(self, values: Tensor) -> list[dict[Any, float]]:
        """Name the numbers of each row by class: ``[n, N]``."""
        return [dict(zip(self._labels, row, strict=True)) for row in values.tolist()]

    def _recollected(self, most: int) -> dict[Any, list[Recalled]]:
        """Name the remembered classes that each fitted class recalled, most weight first."""
        recollection = self._inferred.recollection
        if recollection is None or self._recalled is None or not self._recalled.names:
            return {label: [] for label in self._labels}
        names, weights = self._recalled.names, recollection.weights[0].cpu()  # [N, A]
        best = weights.topk(min(most, len(names)), dim=-1)
        return {
            label: [
                Recalled(names[slot], weight)
                for slot, weight in zip(slots, values, strict=True)
                if weight > 0
            ]
            for label, slots, values in zip(
                self._labels, best.indices.tolist(), best.values.tolist(), strict=True
            )
        }

    def _strength(self) -> dict[Any, float] | None:
        kappa = self._inferred.strength
        return None if kappa is None else self._by_class(kappa.mean(-1))[0]


def _plain(features: Any) -> Pretrained:
    """Return what there is without encoder and memory: prototypes that are means of features."""
    settings = RunSettings(data="features:unnamed", method="protonet")
    return from_parts(FewShotModel(settings, (as_features(features).shape[1],)), None, ())


def _embedded(opened: Pretrained, images: Any, labels: Labels) -> tuple[Tensor, npt.NDArray[Any]]:
    """Embed examples and check their labels."""
    features = opened.embed(images)
    if not len(features):
        raise ClassifierError("images: expected at least one example, got none")
    return features, as_labels(labels, len(features))


def _as_batch(image: Any) -> Any:
    """Put one picture, or one row of features, into a batch."""
    if isinstance(image, np.ndarray | Tensor) and image.ndim == 1:
        return image[None]
    return [image]
