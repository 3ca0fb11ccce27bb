"""Checks of labels. Refusals use the words of scikit-learn's own."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vsm.errors import ClassifierError

Labels = Sequence[Any] | npt.NDArray[Any] | Tensor


def as_labels(labels: Labels, count: int) -> npt.NDArray[Any]:
    """Return ``count`` labels as an array of strings or of integers; 2.0 is the integer 2."""
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


def not_fitted() -> ClassifierError:
    """Return an error that is also scikit-learn's, for callers that catch that one."""
    message = "this classifier knows no classes yet; call fit first"
    sklearn = sys.modules.get("sklearn.exceptions")
    if sklearn is None:
        return ClassifierError(message)
    bases = (ClassifierError, sklearn.NotFittedError)
    both: type[ClassifierError] = type("NotFittedError", bases, {})
    return both(message)
