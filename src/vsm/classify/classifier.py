"""A few labeled images in, a classifier out, in the manner of scikit-learn."""

import copy
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vsm.classify.fitted import (
    Examples,
    Explanation,
    FittedClasses,
    Labels,
    Recalled,
    as_labels,
    is_labeled,
)
from vsm.classify.labeling import Suggestion, suggest
from vsm.data.features import as_features
from vsm.encoders import Encoder
from vsm.errors import ClassifierError, RunError, VsmError
from vsm.evaluation.calibration import Calibration
from vsm.evaluation.memory_choice import ClassFeatures
from vsm.learning import gaussian_model, learn_statistics, name_memory
from vsm.memory.named import Changes, NamedMemory, decode_memory
from vsm.model import FewShotModel
from vsm.runs.configuration import check_settings
from vsm.runs.loading import load, restored_model, trusted_settings
from vsm.runs.trained_model import TrainedModel, made_in_memory
from vsm.settings import GaussianSettings, ModelSettings, RunSettings
from vsm.system.devices import Placement, choose_placement
from vsm.system.files import shortened
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import load_tensors, save_tensors, strip_prefix

PARAMETERS = ("encoder", "temperature", "seed")
NONE_OF_THESE, NO_CLASS = "none of these", -1
KIND, FORMAT = "classifier", 4
MODEL_KEYS = ("step", "input_shape", "preprocessing", "encoder")


class Embedded(NamedTuple):
    """Embedded images, which a classifier's methods take in place of images."""

    features: Tensor


class FewShotClassifier:
    """Classify images, or features, by a few examples of each class and a long-term memory.

    The same inputs give the same answers: draws depend on ``seed`` alone. Reading never writes:
    only :meth:`remember` changes the memory, and later fits recall what it added.

    Args:
        encoder: what :func:`vsm.load` returns. None takes rows of features that any encoder made;
            :meth:`learn_memory` then gives it a memory.
        temperature: T of the probabilities p^(1/T) / Z, above 1 for less confidence; answers stay.
            None is the model's own for so many examples, 1.0 leaves them as computed.
        seed: of the sampled prototypes.

    Attributes:
        classes_: the labels that were fitted, sorted.
    """

    classes_: npt.NDArray[Any]
    _fitted: FittedClasses | None = None
    _memory: NamedMemory | None = None  # what later fits recall, if it differs from the encoder's

    def __init__(
        self,
        encoder: TrainedModel | None = None,
        *,
        temperature: float | None = None,
        seed: int = 0,
    ) -> None:
        self.encoder, self.temperature, self.seed = encoder, temperature, seed

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
        """Open a trained model; arguments are those of :func:`vsm.load` and of the constructor.

        ``device`` is where to compute: cpu, cuda, cuda:1, mps or auto.
        """
        placement = choose_placement(device, "float32")
        trained = load(source, memory=memory, backbone=backbone, placement=placement)
        return cls(trained, temperature=temperature, seed=seed)

    @classmethod
    def from_fitted(cls, fitted: FittedClasses) -> Self:
        """Return a classifier of these classes; later fits recall the memory of their model."""
        return cls(fitted.trained, seed=fitted.seed)._set_fitted(fitted)

    def learn_memory(
        self,
        features: Any,
        labels: Labels,
        *,
        encoder_name: str = "unnamed",
        normalize: bool = True,
    ) -> Self:
        """Learn a Gaussian memory over rows of features ``[n, D]``, and how far to trust it.

        How it is read is chosen by the likelihood of classes that are left out of it.

        Args:
            features: any number of classes and of rows each.
            labels: n of them.
            encoder_name: whose features these are; memories of other encoders will be refused.
            normalize: scale rows to length one, then and ever after.
        """
        rows = as_features(features)
        names, class_ids = np.unique(as_labels(labels, len(rows)), return_inverse=True)
        order = np.argsort(class_ids, kind="stable")
        known = ClassFeatures(rows[torch.from_numpy(order)], np.bincount(class_ids).tolist())
        asked = GaussianSettings(normalization=None if normalize else "un")
        data = f"features:{encoder_name}"
        encoder = Encoder(ModelSettings(), (rows.shape[1],), data)
        model = gaussian_model(encoder, data, asked, self.seed)
        learned = learn_statistics(model, known, torch.arange(len(names)), None)
        memory = name_memory(model, learned, tuple(map(str, names)), len(rows))
        return self.set_params(encoder=made_in_memory(model, memory, learned.calibration))

    def fit(self, images: Any, y: Labels, unlabeled: Any = None) -> Self:
        """Fit to a few examples of each class; one of each is enough.

        Args:
            images: paths, Pillow images, arrays ``[H, W(, C)]`` or tensors ``[C, H, W]``, in any
                mixture, or one array of them; rows of features ``[n, D]`` if the encoder is None
                or takes features; or what :meth:`embed` returned.
            y: a label for each, all strings or all integers. None, or -1 among integers, marks an
                image that is unlabeled, as in ``sklearn.semi_supervised``.
            unlabeled: more images without labels, given as ``images``. Together they tell where
                the classes lie, and how frequent they are, so that answers for these images, or
                others of their kind, become more accurate. Some may be of none of the classes.
        """
        trained = self.encoder
        if trained is None:  # prototypes are means of features
            settings = RunSettings(data="features:unnamed", method="protonet")
            trained = made_in_memory(FewShotModel(settings, (as_features(images).shape[1],)))
        examples, others = _add_examples(Examples(), trained, images, y)
        if unlabeled is not None:
            others = torch.cat([others, _embed(trained, unlabeled)])
        fitted = FittedClasses(trained, self.memory, examples, self.seed, _require_numbers(others))
        return self._set_fitted(fitted)

    def partial_fit(self, images: Any, y: Labels, classes: Labels | None = None) -> Self:
        """Add examples, of the fitted classes or of new ones, or unlabeled images.

        ``classes``, an argument of scikit-learn's, is ignored: new ones may come at any time.
        """
        del classes
        if self._fitted is None:
            return self.fit(images, y)
        fitted = self._fitted
        examples, others = _add_examples(fitted.examples, fitted.trained, images, y)
        others = _require_numbers(others)
        others = others if not len(fitted.unlabeled) else torch.cat([fitted.unlabeled, others])
        return self._set_fitted(
            replace(fitted, examples=examples, seed=self.seed, unlabeled=others)
        )

    def embed(self, images: Any, progress: Progress = NULL_PROGRESS) -> Embedded:
        """Embed images once, for several methods."""
        trained = self.encoder
        if trained is None or self._fitted is not None:
            trained = self._require_fitted().trained
        return Embedded(_embed(trained, images, progress))

    def predict(self, images: Any, reject: float | None = None) -> npt.NDArray[Any]:
        """Return the most probable class of each image ``[n]``.

        Args:
            images: as in :meth:`fit`, or what :meth:`embed` returned.
            reject: answer "none of these" (or -1 among integers) where an image is too far from
                all classes, as about 1 − ``reject`` of the images of these classes are.
        """
        fitted, embedded = self._require_fitted(), self.embed(images)
        best: npt.NDArray[Any] = self.classes_[fitted.most_probable(embedded.features)]
        if reject is None:
            return best
        none_of_these = NONE_OF_THESE if self.classes_.dtype.kind == "U" else NO_CLASS
        if none_of_these in self.classes_.tolist():
            raise ClassifierError(
                f"reject: {none_of_these!r} means that an image is none of the classes, but one "
                "has that label; give it another"
            )
        return np.where(fitted.accepted(embedded.features, reject), best, none_of_these)

    def predict_proba(self, images: Any) -> npt.NDArray[np.float32]:
        """Return the calibrated probability of each of ``classes_`` ``[n, N]``."""
        fitted = self._require_fitted()
        return fitted.probabilities(self.embed(images).features, self._temperature(fitted))

    def score(self, images: Any, y: Labels) -> float:
        """Return the share of images whose most probable class is the label given."""
        answers = self.predict(images)
        return float(np.mean(answers == as_labels(y, len(answers))))

    def explain(self, image: Any, num_recalled: int = 5) -> Explanation:
        """Explain the answer for one image, or one row of features ``[D]``.

        At most ``num_recalled`` remembered classes are named for each class.
        """
        is_row = isinstance(image, np.ndarray | Tensor) and image.ndim == 1
        return self.explain_all(image[None] if is_row else [image], num_recalled)[0]

    def explain_all(
        self, images: Any, num_recalled: int = 5, reject: float | None = None
    ) -> list[Explanation]:
        """Explain many images at once, given as in :meth:`predict`."""
        fitted, embedded = self._require_fitted(), self.embed(images)
        explained = fitted.explanations(embedded.features, self._temperature(fitted), num_recalled)
        if reject is None:
            return explained
        predictions = self.predict(embedded, reject).tolist()
        pairs = zip(explained, predictions, strict=True)
        return [replace(one, prediction=prediction) for one, prediction in pairs]

    def suggest(self, images: Any, number: int = 20) -> list[Suggestion]:
        """Choose the images whose labels would help most, the most useful first.

        They are chosen together: none is nearly the same as another. Nothing is remembered.
        """
        fitted = self._require_fitted()
        return suggest(fitted, self.embed(images).features, number, self._temperature(fitted))

    def recalled(self, num_recalled: int = 5) -> dict[Any, list[Recalled]]:
        """Name the remembered classes that each fitted class recalled, most weight first."""
        return self._require_fitted().recalled_classes(num_recalled)

    def prototypes(self) -> Tensor:
        """Return the prototypes of ``classes_``, means of their samples ``[N, D]``."""
        return self._require_fitted().posterior.prototypes[0].mean(1)

    def coordinates(self, images: Any) -> Tensor:
        """Map images to the coordinates of the prototypes ``[n, D]``."""
        return self._require_fitted().project(self.embed(images).features)

    def remember(self) -> Changes:
        """Consolidate the examples of the fitted classes into the long-term memory.

        Each example is added once, however often this is called. The fitted classes keep the
        memory that they were fitted with, so their answers stay the same to the bit. The next
        :meth:`fit` reads the new memory. What was remembered under one of its labels counts as the
        images that it was made of; other classes can be recalled.
        """
        fitted, memory = self._require_fitted(), self.memory
        consolidation = fitted.trained.manual_consolidation()
        assert memory is not None
        features, names = fitted.examples.not_remembered()
        source = {"from": "FewShotClassifier.remember"}
        self._memory, changes = memory.add(consolidation, features, names, source)
        self._fitted = copy.copy(fitted)  # with its posterior, which does not change
        self._fitted.examples = replace(fitted.examples, remembered=fitted.examples.shots)
        return changes

    @property
    def memory(self) -> NamedMemory | None:
        """The long-term memory as it is now; None for methods without one."""
        if self._memory is not None:
            return self._memory
        return None if self.encoder is None else self.encoder.memory

    def save(self, path: str | Path) -> None:
        """Write encoder, memory and examples as one safetensors file, atomically."""
        fitted = self._require_fitted()
        trained, examples = fitted.trained, fitted.examples
        tensors = {f"model.{name}": value for name, value in trained.model.state_dict().items()}
        tensors |= {
            "support.features": examples.features,
            "support.sizes": torch.tensor(examples.shots),
            "support.remembered": torch.tensor(examples.remembered),
            "unlabeled.features": fitted.unlabeled,
        }
        memories = {}
        for part, memory in (("memory", self.memory), ("recalled", fitted.recalled)):
            if memory is not None:
                tensors |= {f"{part}.{name}": v for name, v in memory.memory.tensors().items()}
                memories[part] = memory.metadata()
        metadata = {
            "kind": KIND,
            "format": FORMAT,
            "name": trained.name,
            "settings": asdict(trained.settings),
            **{key: trained.metadata()[key] for key in MODEL_KEYS},
            **trained.calibration.as_dict(),
            "has_encoder": self.encoder is not None,
            "labels": list(examples.labels),
            "seed": self.seed,
            "temperature": self.temperature,
            "memories": memories,
        }
        save_tensors(Path(path), tensors, metadata)

    @classmethod
    def load(cls, path: str | Path, *, backbone: str | None = None, device: str = "cpu") -> Self:
        """Read what :meth:`save` wrote; nothing in a file is ever run.

        ``backbone`` and ``device`` are those of :meth:`from_pretrained`.
        """
        path, placement = Path(path), choose_placement(device, "float32")
        tensors, metadata = load_tensors(path)
        if metadata.get("kind") != KIND:
            raise RunError(f"{path} does not hold a classifier; write one with save")
        if metadata.get("format") != FORMAT:
            raise RunError(
                f"{path} has format {shortened(metadata.get('format'), 20)}, but this version "
                f"reads {FORMAT}; use the version of vsm that wrote it"
            )
        try:
            fitted = _restore(tensors, metadata, path, backbone, placement)
            encoder = fitted.trained if metadata["has_encoder"] else None
            temperature = metadata["temperature"]
        except VsmError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = shortened(repr(error))
            raise RunError(f"{path} is damaged: its parts do not fit ({reason})") from error
        return cls(encoder, temperature=temperature, seed=fitted.seed)._set_fitted(fitted)

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002 - scikit-learn's
        """Return the constructor's arguments, as scikit-learn's estimators do."""
        return {name: getattr(self, name) for name in PARAMETERS}

    def set_params(self, **parameters: Any) -> Self:
        """Set the constructor's arguments; with another encoder all examples are forgotten."""
        for name, value in parameters.items():
            if name not in PARAMETERS:
                raise ClassifierError(
                    f"{name}: is not a parameter; there are {', '.join(PARAMETERS)}"
                )
            setattr(self, name, value)
        if "encoder" in parameters:
            self._memory = self._fitted = None
        return self

    @property
    def n_features_in_(self) -> int:
        """Numbers per row, where the classifier takes features and is fitted."""
        if self._fitted is None or not self._takes_features:
            raise AttributeError("n_features_in_: is defined once features are fitted")
        return self._fitted.trained.model.num_features

    def __sklearn_is_fitted__(self) -> bool:
        return self._fitted is not None

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags  # noqa: PLC0415 - extra

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(two_d_array=self._takes_features),
        )

    def __repr__(self) -> str:
        opened = "None" if self.encoder is None else f"<{self.encoder.name}>"
        fitted = f", fitted to {len(self.classes_)} classes" if self._fitted is not None else ""
        return f"FewShotClassifier({opened}{fitted})"

    @property
    def _takes_features(self) -> bool:
        return self.encoder is None or self.encoder.preprocessing is None

    def _require_fitted(self) -> FittedClasses:
        if self._fitted is not None:
            return self._fitted
        bases: tuple[type, ...] = (ClassifierError,)
        if "sklearn.exceptions" in sys.modules:  # for callers that catch scikit-learn's error
            bases += (sys.modules["sklearn.exceptions"].NotFittedError,)
        error = type("NotFittedError", bases, {})
        raise error("this classifier knows no classes yet; call fit first")

    def _set_fitted(self, fitted: FittedClasses) -> Self:
        if len(fitted.unlabeled):
            _ = fitted.posterior  # refuses models that have no use for unlabeled images
        self._fitted, self.classes_ = fitted, np.asarray(fitted.examples.labels)
        return self

    def _temperature(self, fitted: FittedClasses) -> float:
        if self.temperature is None:
            return fitted.temperature()
        if not 0 < self.temperature < math.inf:
            raise ClassifierError(
                f"temperature: expected a number above 0, or None for the model's own, got "
                f"{self.temperature!r}"
            )
        return self.temperature


def _add_examples(
    known: Examples, trained: TrainedModel, images: Any, labels: Labels
) -> tuple[Examples, Tensor]:
    """Return all examples, and the features of images that are unlabeled ``[U, D]``."""
    features = _embed(trained, images)
    others = features[:0]
    labels = labels.tolist() if isinstance(labels, Tensor) else labels
    given = np.asarray(labels, dtype=object)
    if given.shape == (len(features),) and not (rows := is_labeled(given)).all():
        chosen = torch.from_numpy(rows).to(features.device)
        features, others = features[chosen], features[~chosen]
        labels = given[rows]
    if not len(features):
        if known.labels and len(others):
            return known, others
        raise ClassifierError("images: expected at least one example, got none")
    checked = as_labels(labels, len(features))
    if known.labels and isinstance(known.labels[0], str) != (checked.dtype.kind == "U"):
        raise ClassifierError(
            f"labels: the fitted ones are like {known.labels[0]!r}, got {checked[0]!r}; use "
            "strings or integers throughout"
        )
    return known.add(features, checked), others


def _require_numbers(unlabeled: Tensor) -> Tensor:
    """Return features ``[U, D]``, unless one is NaN or infinite, which would spoil all answers."""
    bad = (~unlabeled.isfinite().all(-1)).nonzero().flatten().tolist()
    if bad:
        raise ClassifierError(
            f"unlabeled: image {bad[0]} has features that are infinite or not a number; leave it "
            "out"
        )
    return unlabeled


def _embed(trained: TrainedModel, images: Any, progress: Progress = NULL_PROGRESS) -> Tensor:
    """Embed images, or check that what is embedded has the width of this encoder ``[n, D]``."""
    if not isinstance(images, Embedded):
        return trained.embed(images, progress)
    width, given = trained.model.num_features, list(images.features.shape)
    if len(given) != 2 or given[1] != width:
        raise ClassifierError(
            f"images: expected what embed of this classifier returned, features [n, {width}], got "
            f"{given}; embed them with this one"
        )
    return images.features


def _restore(
    tensors: dict[str, Tensor],
    metadata: dict[str, Any],
    source: Path,
    backbone: str | None,
    placement: Placement,
) -> FittedClasses:
    """Return what a file holds, or raise one of several errors if its parts do not fit."""
    settings = check_settings(RunSettings, metadata["settings"], source)
    settings = trusted_settings(source, settings, backbone)
    weights = strip_prefix(tensors, "model")
    trained = restored_model(metadata["name"], settings, weights, metadata, source, placement)
    memories = {
        part: decode_memory(strip_prefix(tensors, part), known, source).to(placement.device)
        for part, known in metadata["memories"].items()
    }
    width = trained.model.num_features
    for memory in memories.values():
        memory.memory.check(width)
    calibration = Calibration.from_dict(metadata)
    trained = replace(trained, memory=memories.get("memory"), calibration=calibration)
    examples = Examples(
        tuple(metadata["labels"]),
        tensors["support.features"].to(placement.device),
        tuple(tensors["support.sizes"].tolist()),
        tuple(tensors["support.remembered"].tolist()),
    )
    _check_examples(examples, width)
    unlabeled = tensors["unlabeled.features"].to(placement.device)
    fits = unlabeled.dim() == 2 and (not len(unlabeled) or unlabeled.shape[1] == width)
    if unlabeled.dtype != torch.float32 or not fits:
        raise ValueError(f"expected float32 features [U, {width}] of unlabeled images")
    temperature, seed = metadata["temperature"], metadata["seed"]
    if temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(f"expected a temperature above 0, got {temperature}")
    if type(metadata["has_encoder"]) is not bool or type(seed) is not int:
        raise TypeError("expected a truth value as has_encoder and a number as seed")
    return FittedClasses(trained, memories.get("recalled"), examples, seed, unlabeled)


def _check_examples(examples: Examples, width: int) -> None:
    """Raise a ``ValueError`` or ``TypeError`` unless labels, counts and features fit."""
    labels, shots, remembered = examples.labels, examples.shots, examples.remembered
    if not len(set(labels)) == len(labels) == len(shots) > 0:
        raise ValueError("expected distinct labels, and numbers of examples for each")
    if not all(isinstance(label, str | int | float) for label in labels):
        raise TypeError("expected strings or numbers as labels")
    if not all(type(one) is int for one in (*shots, *remembered)):
        raise TypeError("expected whole numbers of examples")
    if not all(0 <= done <= shot > 0 for done, shot in zip(remembered, shots, strict=True)):
        raise ValueError("classes without examples, or with more remembered than there are")
    if examples.features.shape != (sum(shots), width) or examples.features.dtype != torch.float32:
        raise ValueError(f"expected float32 features [{sum(shots)}, {width}]")
