"""What the few-shot classifier adds to embedding its images, and explaining to that."""

import numpy as np
import numpy.typing as npt
import torch

from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import ClassifierWorkload
from vsm.classify import FewShotClassifier
from vsm.runs.trained_model import TrainedModel, load

Pixels = npt.NDArray[np.uint8]


def embedding_alone(workload: ClassifierWorkload) -> Work:
    """Return the embedding of examples and queries at once, prepared as the model wants them."""
    trained = load(workload.model)
    assert trained.preprocessing is not None
    support, queries = images(workload, trained)
    prepared = trained.preprocessing.normalize(trained.preprocessing.pixels([*support, *queries]))
    return torch.no_grad()(lambda: trained.model.embed(prepared))


def fits_and_predictions(workload: ClassifierWorkload) -> Work:
    """Return fit and predict: arrays of pixels in, labels out."""
    classifier, support, queries, labels = fitted(workload)
    return lambda: classifier.fit(support, labels).predict(queries)


def predictions(workload: ClassifierWorkload) -> Work:
    """Return the probabilities of a fitted classifier."""
    classifier, _, queries, _ = fitted(workload)
    return lambda: classifier.predict_proba(queries)


def explanations(workload: ClassifierWorkload) -> Work:
    """Return the same with all that they rest on."""
    classifier, _, queries, _ = fitted(workload)
    return lambda: classifier.explain_all(queries)


def images(
    workload: ClassifierWorkload, trained: TrainedModel
) -> tuple[list[Pixels], list[Pixels]]:
    """Return noise in place of examples and queries, arrays ``[H, W, C]`` of bytes."""
    channels, height, width = trained.input_shape
    examples = workload.way * workload.shot
    shape = (examples + workload.queries, height, width, channels)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return list(noise[:examples]), list(noise[examples:])


def fitted(
    workload: ClassifierWorkload,
) -> tuple[FewShotClassifier, list[Pixels], list[Pixels], list[str]]:
    """Return a classifier, the examples it was fitted to, queries, and the examples' labels."""
    trained = load(workload.model)
    support, queries = images(workload, trained)
    labels = [f"class {number}" for number in range(workload.way) for _ in range(workload.shot)]
    return FewShotClassifier(trained).fit(support, labels), support, queries, labels
