"""Thousands of VSM episodes from features embedded once, and a peer's, embedded anew each."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vsm.benchmarking.peers import build_peer, channels_first, peer_accuracies
from vsm.benchmarking.step import remembered, run_settings
from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import EvaluationWorkload
from vsm.data import EpisodeSampler, open_dataset
from vsm.evaluation import Evaluation, evaluate
from vsm.model import FewShotModel

SEED = 0  # of the list of episodes; the peer's are the first of the same list


def evaluations(workload: EvaluationWorkload) -> Work:
    """Return the evaluation of VSM, embedding the test set and drawing the episodes included."""
    sampler = _sampler(workload)
    model = FewShotModel(run_settings(workload, "vsm"), sampler.dataset.image_shape)
    memory = remembered(workload.remembered, model.num_features)

    def measure() -> Evaluation:
        return evaluate(model, memory, sampler, workload.episodes, SEED)

    return measure


def peer_evaluations(workload: EvaluationWorkload) -> Work:
    """Return the evaluation of a peer's ProtoNet; its episodes are drawn beforehand."""
    sampler = _sampler(workload)
    backbone = build_peer(sampler.dataset.image_shape, workload.channels)
    drawn = torch.cat(
        [batch.image_ids for batch in sampler.evaluation_episodes(workload.peer_episodes, SEED)]
    )

    def measure() -> list[float]:
        return peer_accuracies(backbone, _batches(sampler, drawn), workload.shot)

    return measure


def _batches(sampler: EpisodeSampler, image_ids: Tensor) -> Iterator[Tensor]:
    """Yield the images of each episode ``[N, K + Q, C, H, W]``, copied into a batch of their own.

    Peers' loaders do the same after reading files; here everything comes out of memory.
    """
    for episode in image_ids:
        yield channels_first(sampler.dataset.normalise(sampler.dataset.load(episode)))


def _sampler(workload: EvaluationWorkload) -> EpisodeSampler:
    dataset = open_dataset(workload.data)
    return EpisodeSampler(dataset, "test", workload.way, workload.shot, workload.queries)
