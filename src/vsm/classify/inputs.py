"""What a classifier is given, checked. Refusals use the words that scikit-learn's own do."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vsm.errors import ClassifierError, ClassifierTypeError

Labels = Sequence[Any] | npt.NDArray[Any] | Tensor
LABELS = "expected all strings or all integers"


def as_features(rows: Any, width: int | None = None) -> Tensor:
    """Check features ``[n, D]`` of any array type, and return them as float32."""
    if hasattr(rows, "tocsr"):
        raise ClassifierError(
            "features: sparse input is not supported; give a dense array, as its toarray() makes"
        )
    given = _as_numbers(rows)
    if given.ndim != 2:
        raise ClassifierError(
            f"features: expected rows [n, D], got {list(given.shape)}. Reshape your data; one row "
            "is features[None]"
        )
    if not given.shape[1]:
        raise ClassifierError(
            f"features: 0 feature(s) (shape=({len(given)}, 0)) while a minimum of 1 is required."
        )
    if width is not None and given.shape[1] != width:
        raise ClassifierError(
            f"features: X has {given.shape[1]} features, but FewShotClassifier is expecting "
            f"{width} features as input"
        )
    with np.errstate(over="ignore"):  # named below
        features = torch.from_numpy(given.astype(np.float32))
    finite = features.isfinite().all(1)
    if not finite.all():
        raise ClassifierError(
            f"features: row {int((~finite).int().argmax())} holds NaN, infinity or a number too "
            "large for float32; mend it"
        )
    return features


def _as_numbers(rows: Any) -> npt.NDArray[Any]:
    given = rows.detach().cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    if given.dtype.kind == "c":
        raise ClassifierError(f"features: Complex data not supported, got {given.dtype}")
    if given.dtype.kind == "O":
        try:
            return given.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ClassifierTypeError(
                f"features: expected numbers [n, D] ({error}); this classifier takes features, not "
                "pictures"
            ) from error
    if given.dtype.kind not in "fiu":
        raise ClassifierError(
            f"features: expected numbers [n, D], got {given.dtype} {list(given.shape)}; this "
            "classifier takes features, not pictures"
        )
    return given


def as_labels(labels: Labels, count: int) -> npt.NDArray[Any]:
    """Return ``count`` labels as an array of strings or of integers; 2.0 is the integer 2."""
    if labels is None:
        raise ClassifierError("labels: requires y to be passed, but the target y is None")
    given = np.asarray(labels.tolist() if isinstance(labels, Tensor) else labels)
    if given.shape != (count,):
        raise ClassifierError(
            f"labels: expected one for each of {count} examples, got {list(given.shape)}"
        )
    if given.dtype.kind == "O":
        given = _of_one_kind(given)
    if given.dtype.kind == "f" and (np.isfinite(given) & (given == np.rint(given))).all():
        given = given.astype(np.int64)
    if given.dtype.kind not in "iuU" or (
        given.dtype.kind == "U" and not all(isinstance(label, str) for label in labels)
    ):
        kinds = {"f": "continuous", "U": "a mixture"}
        kind = kinds.get(given.dtype.kind, str(given.dtype))
        raise ClassifierError(f"labels: Unknown label type: {kind}, like {given[0]!r}; {LABELS}")
    return given.astype(np.int64) if given.dtype.kind == "u" else given


def _of_one_kind(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Turn objects into an array of strings or of integers."""
    if all(isinstance(label, str) for label in labels):
        return labels.astype(np.str_)
    if all(isinstance(label, int | np.integer) and not isinstance(label, bool) for label in labels):
        return labels.astype(np.int64)
    raise ClassifierError(f"labels: Unknown label type: {LABELS}, got a mixture")


def not_fitted(message: str) -> ClassifierError:
    """Return an error that is also scikit-learn's, for whoever has loaded it and waits for that."""
    theirs = sys.modules.get("sklearn.exceptions")
    if theirs is None:
        return ClassifierError(message)
    both: type[ClassifierError] = type(
        "NotFittedError", (ClassifierError, theirs.NotFittedError), {}
    )
    return both(message)
