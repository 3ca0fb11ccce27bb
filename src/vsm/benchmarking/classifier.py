"""What the classifier of a few examples adds to embedding its pictures, and explaining to that."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import ClassifierWorkload
from vsm.classify import Explanation, FewShotClassifier
from vsm.runs.trained_model import load


def embedding_alone(workload: ClassifierWorkload) -> Work:
    """Return the embedding of examples and questions at once, prepared as the model wants them."""
    trained = load(workload.model)
    assert trained.preprocessing is not None
    support, queries = pictures(workload, trained.input_shape)
    prepared = trained.preprocessing.normalize(trained.preprocessing.pixels([*support, *queries]))

    def embed() -> Tensor:
        with torch.no_grad():
            return trained.model.embed(prepared)

    return embed


def fits_and_predictions(workload: ClassifierWorkload) -> Work:
    """Return fit and predict: arrays of pixels in, labels out."""
    classifier, support, queries, labels = _fitted(workload)

    def fit_and_predict() -> npt.NDArray[np.str_]:
        return classifier.fit(support, labels).predict(queries)

    return fit_and_predict


def predictions(workload: ClassifierWorkload) -> Work:
    """Return the probabilities of a fitted classifier."""
    classifier, _, queries, _ = _fitted(workload)
    return lambda: classifier.predict_proba(queries)


def explanations(workload: ClassifierWorkload) -> Work:
    """Return the same with all that they rest on."""
    classifier, _, queries, _ = _fitted(workload)

    def explain() -> list[Explanation]:
        return classifier.explain_all(queries)

    return explain


Pixels = npt.NDArray[np.uint8]


def pictures(
    workload: ClassifierWorkload, shape: Sequence[int]
) -> tuple[list[Pixels], list[Pixels]]:
    """Return noise in the place of examples and questions, arrays ``[H, W, C]`` of bytes."""
    channels, height, width = shape
    count = workload.way * workload.shot + workload.queries
    noise = np.random.default_rng(0).integers(0, 256, (count, height, width, channels), np.uint8)
    examples = workload.way * workload.shot
    return list(noise[:examples]), list(noise[examples:])


def _fitted(
    workload: ClassifierWorkload,
) -> tuple[FewShotClassifier, list[Pixels], list[Pixels], list[str]]:
    trained = load(workload.model)
    support, queries = pictures(workload, trained.input_shape)
    labels = [f"class {number}" for number in range(workload.way) for _ in range(workload.shot)]
    return FewShotClassifier(trained).fit(support, labels), support, queries, labels
