"""What a classifier is given, checked. Refusals use the words that scikit-learn's own do."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vsm.errors import ClassifierError

Labels = Sequence[Any] | npt.NDArray[Any] | Tensor
LABELS = "expected all strings or all integers"


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
        given.dtype.kind == "U"
        and not all(issubclass(kind, str) for kind in set(map(type, labels)))
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
    """Return an error that is also scikit-learn's, for callers that catch that one."""
    theirs = sys.modules.get("sklearn.exceptions")
    if theirs is None:
        return ClassifierError(message)
    both: type[ClassifierError] = type(
        "NotFittedError", (ClassifierError, theirs.NotFittedError), {}
    )
    return both(message)
