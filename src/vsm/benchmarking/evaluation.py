"""Thousands of VSM episodes from features embedded once, and the reference's, embedded anew."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vsm.benchmarking.reference import build_reference, channels_first, reference_accuracies
from vsm.benchmarking.step import remembered, run_settings
from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import EvaluationWorkload
from vsm.data import EpisodeSampler, ImageDataset, open_images
from vsm.evaluation.evaluator import Evaluation, evaluate
from vsm.model import FewShotModel

SEED = 0  # of the list of episodes; the reference's are the first of the same list


def evaluations(workload: EvaluationWorkload) -> Work:
    """Return the evaluation of VSM, embedding the test set and drawing the episodes included."""
    dataset, sampler = _test_classes(workload)
    model = FewShotModel(run_settings(workload, "vsm"), dataset.image_shape)
    memory = remembered(model, workload.remembered)

    def measure() -> Evaluation:
        return evaluate(model, memory, sampler, workload.episodes, SEED)

    return measure


def reference_evaluations(workload: EvaluationWorkload) -> Work:
    """Return the evaluation of the reference ProtoNet; its episodes are drawn beforehand."""
    dataset, sampler = _test_classes(workload)
    backbone = build_reference(dataset.image_shape, workload.channels)
    drawn = torch.cat(
        [
            batch.image_ids
            for batch in sampler.evaluation_episodes(workload.reference_episodes, SEED)
        ]
    )

    def measure() -> list[float]:
        return reference_accuracies(backbone, _batches(dataset, drawn), workload.shot)

    return measure


def _batches(dataset: ImageDataset, image_ids: Tensor) -> Iterator[Tensor]:
    """Yield the images of each episode ``[N, K + Q, C, H, W]``, copied into a batch of their own.

    Public libraries' loaders do the same after reading files; here all comes out of memory.
    """
    for episode in image_ids:
        yield channels_first(dataset.normalize(dataset.load(episode)))


def _test_classes(workload: EvaluationWorkload) -> tuple[ImageDataset, EpisodeSampler]:
    dataset = open_images(workload.data)
    shape = (workload.way, workload.shot, workload.queries)
    return dataset, EpisodeSampler(dataset, "test", *shape)
