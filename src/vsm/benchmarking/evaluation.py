"""Thousands of VSM episodes from features embedded once, and the reference's, embedded anew."""

import torch

from vsm.benchmarking.reference import build_reference, channels_first, reference_accuracies
from vsm.benchmarking.step import remembered, run_settings
from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import EvaluationWorkload
from vsm.data import EpisodeSampler, ImageDataset, open_images
from vsm.evaluation.evaluator import evaluate
from vsm.model import FewShotModel

SEED = 0  # of the list of episodes; the reference's are the first of the same list


def evaluations(workload: EvaluationWorkload) -> Work:
    """Return the evaluation of VSM, embedding the test set and drawing the episodes included."""
    dataset, sampler = _test_classes(workload)
    model = FewShotModel(run_settings(workload, "vsm"), dataset.image_shape)
    memory = remembered(model, workload.remembered)
    return lambda: evaluate(model, memory, sampler, workload.episodes, SEED)


def reference_evaluations(workload: EvaluationWorkload) -> Work:
    """Return the evaluation of the reference ProtoNet; its episodes are drawn beforehand."""
    dataset, sampler = _test_classes(workload)
    backbone = build_reference(dataset.image_shape, workload.channels)
    batches = sampler.evaluation_episodes(workload.reference_episodes, SEED)
    drawn = torch.cat([batch.image_ids for batch in batches])

    def measure() -> list[float]:
        # Each episode is copied into a batch [N, K + Q, C, H, W] of its own. Public libraries'
        # loaders do the same after reading files; here everything comes out of memory.
        episodes = (channels_first(dataset.normalize(dataset.load(ids))) for ids in drawn)
        return reference_accuracies(backbone, episodes, workload.shot)

    return measure


def _test_classes(workload: EvaluationWorkload) -> tuple[ImageDataset, EpisodeSampler]:
    dataset = open_images(workload.data)
    shape = (workload.way, workload.shot, workload.queries)
    return dataset, EpisodeSampler(dataset, "test", *shape)
