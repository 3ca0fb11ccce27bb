"""One episode looked at closely: what was predicted, and what was recalled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vsm.data import Dataset, EpisodeSampler
from vsm.evaluation.comparison import MeasuredRun
from vsm.evaluation.evaluator import embed_images, evaluation_mode
from vsm.nn.prototype_classifier import predictive
from vsm.seeding import generator


@dataclass(frozen=True)
class ShownEpisode:
    """One episode under one model; N classes, K support images, Q queries a class.

    Attributes:
        class_names: N names.
        support_ids: image ids ``[N, K]``.
        query_ids: image ids ``[N, Q]``.
        query_features: ``[N, Q, D]``.
        probabilities: ``[N, Q, N]``.
        prototypes: samples of z ``[N, L, D]``.
        weights: λ ``[N, A]``, or nothing for methods without memory.
    """

    class_names: list[str]
    support_ids: Tensor
    query_ids: Tensor
    query_features: Tensor
    probabilities: Tensor
    prototypes: Tensor
    weights: Tensor | None


@torch.no_grad()
def look_at_episodes(
    measured: MeasuredRun, dataset: Dataset, num_episodes: int, queries: int
) -> list[ShownEpisode]:
    """Run the first episodes of the protocol's list, with few queries, keeping every detail."""
    protocol, trained = measured.protocol, measured.trained
    sampler = EpisodeSampler(dataset, protocol.split, protocol.way, protocol.shot, queries)
    [batch] = sampler.evaluation_episodes(num_episodes, protocol.seed)
    features = embed_images(trained.model, dataset, batch.image_ids.flatten())
    features = features.unflatten(0, batch.image_ids.shape)
    support, query_features = features.split([protocol.shot, queries], 2)
    with evaluation_mode(trained.model):
        random = generator(protocol.seed, "report")
        prediction = trained.model(support, query_features, trained.memory, random)
    probabilities = predictive(prediction.log_probabilities).exp()
    probabilities = probabilities.unflatten(1, (protocol.way, queries))
    weights = None if prediction.recollection is None else prediction.recollection.weights.cpu()
    return [
        ShownEpisode(
            [dataset.class_names[class_id] for class_id in batch.class_ids[t].tolist()],
            batch.image_ids[t, :, : protocol.shot],
            batch.image_ids[t, :, protocol.shot :],
            query_features[t].cpu(),
            probabilities[t].cpu(),
            prediction.prototypes[t].cpu(),
            None if weights is None else weights[t],
        )
        for t in range(num_episodes)
    ]
