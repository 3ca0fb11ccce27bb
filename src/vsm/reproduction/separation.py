"""Figure 2 in numbers: how far apart prototype distributions lie, and how much they overlap."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vsm.data import EpisodeSampler, open_dataset
from vsm.evaluation.comparison import EpisodeProtocol
from vsm.evaluation.evaluator import embed_images, evaluation_mode
from vsm.runs.trained_model import load_run
from vsm.seeding import task_generators
from vsm.system.devices import choose_placement


class Separation(NamedTuple):
    """Of E episodes, each ``[E]``.

    Attributes:
        distance: mean distance between the prototype means of two classes.
        spread: root mean square distance of a class's prototype samples to their mean.
        overlap: share of prototype samples that lie nearer to another class's mean.
    """

    distance: Tensor
    spread: Tensor
    overlap: Tensor


def separation(prototypes: Tensor) -> Separation:
    """Measure prototype samples ``[E, N, L, D]``."""
    way = prototypes.shape[1]
    means = prototypes.mean(2)  # [E, N, D]
    between = torch.cdist(means, means)  # [E, N, N]
    spread = (prototypes - means.unsqueeze(2)).square().sum(-1).mean((1, 2)).sqrt()
    nearest = torch.cdist(prototypes.flatten(1, 2), means).argmin(-1).unflatten(1, (way, -1))
    strayed = nearest != torch.arange(way).unsqueeze(-1)  # [E, N, L]
    return Separation(
        between.sum((1, 2)) / (way * (way - 1)), spread, strayed.double().mean((1, 2))
    )


@torch.no_grad()
def measure_separation(run: Path, protocol: EpisodeProtocol) -> Separation:
    """Measure the prototypes that a run infers on the protocol's episodes."""
    dataset = open_dataset(protocol.data)
    trained = load_run(run, dataset, placement=choose_placement())
    sampler = EpisodeSampler(dataset, protocol.split, protocol.way, protocol.shot, protocol.queries)
    found: list[Separation] = []
    done = 0
    with evaluation_mode(trained.model):
        for batch in sampler.evaluation_episodes(protocol.episodes, protocol.seed):
            shown = batch.image_ids[:, :, : protocol.shot + 1]  # the support, and one query
            features = embed_images(trained.model, dataset, shown.flatten())
            support, query = features.unflatten(0, shown.shape).split([protocol.shot, 1], 2)
            tasks = range(done, done + len(shown))
            random = task_generators(protocol.seed, "evaluation-noise", 0, tasks)
            prediction = trained.model(support, query, trained.memory, random)
            found.append(separation(prediction.prototypes.cpu()))
            done += len(shown)
    return Separation(*(torch.cat(parts) for parts in zip(*found, strict=True)))
