"""What is measured of models besides accuracy: episodes in detail, prototypes, changed answers."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.data import Dataset, EpisodeSampler, Split
from vsm.encoders import evaluation_mode
from vsm.evaluation.evaluator import EpisodeProtocol, split_embedder
from vsm.memory import GaussianPosterior
from vsm.model import Prediction
from vsm.nn.layers import predictive
from vsm.runs.trained_model import Measurement, ModelOnData
from vsm.seeding import Randomness, generator, task_generators

SAMPLES_SHOWN = 100


@dataclass(frozen=True)
class ShownEpisode:
    """One episode under one model; N classes, K support images, Q queries per class.

    Attributes:
        class_names: N names.
        support_ids: image ids ``[N, K]``.
        query_ids: image ids ``[N, Q]``.
        query_features: projected ``[N, Q, D]``.
        probabilities: ``[N, Q, N]``.
        prototypes: samples of z ``[N, L, D]``.
        weights: λ ``[N, A]``, or None for methods without memory.
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
    measured: Measurement, dataset: Dataset, num_episodes: int, queries: int
) -> list[ShownEpisode]:
    """Run the first episodes of the protocol's list, with few queries, keeping every detail."""
    protocol, trained = measured.protocol, measured.trained
    sampler = EpisodeSampler(dataset, protocol.split, protocol.way, protocol.shot, queries)
    [batch] = sampler.evaluation_episodes(num_episodes, protocol.seed)
    features = trained.encoder.features(dataset, batch.image_ids)
    support, query_features = features.split([protocol.shot, queries], 2)
    with evaluation_mode(trained.model):
        random = generator(protocol.seed, "report")
        prediction = trained.model(support, query_features, trained.state, random)
        query_features = trained.model.project(query_features, trained.state)
        prototypes = _prototype_samples(prediction, random)
    probabilities = predictive(prediction.log_probabilities).exp()
    probabilities = probabilities.unflatten(1, (protocol.way, queries))
    weights = prediction.posterior.weights
    weights = None if weights is None else weights.cpu()
    return [
        ShownEpisode(
            [dataset.class_names[class_id] for class_id in batch.class_ids[t].tolist()],
            batch.image_ids[t, :, : protocol.shot],
            batch.image_ids[t, :, protocol.shot :],
            query_features[t].cpu(),
            probabilities[t].cpu(),
            prototypes[t].cpu(),
            None if weights is None else weights[t],
        )
        for t in range(num_episodes)
    ]


def _prototype_samples(prediction: Prediction, random: Randomness) -> Tensor:
    """Return samples of the prototypes ``[T, N, L, D]``, also where none were needed."""
    posterior = prediction.posterior
    if isinstance(posterior, GaussianPosterior):
        return posterior.gaussian.sample(SAMPLES_SHOWN, random)
    return posterior.prototypes


class Separation(NamedTuple):
    """How far apart prototype distributions lie in E episodes, each ``[E]``.

    Attributes:
        distance: mean distance between the prototype means of two classes.
        std: root mean square distance of a class's prototype samples to their mean.
        overlap: share of prototype samples that lie nearer to another class's mean.
    """

    distance: Tensor
    std: Tensor
    overlap: Tensor


def separation(prototypes: Tensor) -> Separation:
    """Measure prototype samples ``[E, N, L, D]``."""
    way = prototypes.shape[1]
    means = prototypes.mean(2)  # [E, N, D]
    between = torch.cdist(means, means)  # [E, N, N]
    std = (prototypes - means.unsqueeze(2)).square().sum(-1).mean((1, 2)).sqrt()
    nearest = torch.cdist(prototypes.flatten(1, 2), means).argmin(-1).unflatten(1, (way, -1))
    strayed = nearest != torch.arange(way).unsqueeze(-1)  # [E, N, L]
    return Separation(between.sum((1, 2)) / (way * (way - 1)), std, strayed.double().mean((1, 2)))


@torch.no_grad()
def measure_separation(subject: ModelOnData, protocol: EpisodeProtocol) -> Separation:
    """Measure the prototypes that a model infers on the protocol's episodes: Figure 2."""
    trained, dataset = subject.trained, subject.dataset
    batches = protocol.sampler(dataset).evaluation_episodes(protocol.episodes, protocol.seed)
    found: list[Separation] = []
    done = 0
    with evaluation_mode(trained.model):
        for batch in batches:
            shown = batch.image_ids[:, :, : protocol.shot + 1]  # the support, and one query
            features = trained.encoder.features(dataset, shown)
            support, query = features.split([protocol.shot, 1], 2)
            tasks = range(done, done + len(shown))
            random = task_generators(protocol.seed, "evaluation-noise", 0, tasks)
            prediction = trained.model(support, query, trained.state, random)
            found.append(separation(_prototype_samples(prediction, random).cpu()))
            done += len(shown)
    return Separation(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def with_slots(subject: ModelOnData, size: int, subset: int, seed: int) -> ModelOnData:
    """Return the model with the first slots of its memory for subset 0, else with random ones.

    A memory whose slots do not stand for classes has no subset but its first slots.
    """
    memory = subject.trained.state
    if subset == 0 or memory is None or not memory.slot_classes:
        return subject.first_slots(min(size, 0 if memory is None else len(memory)))
    order = torch.randperm(len(memory), generator=generator(seed, "slots", size, subset))
    return subject.with_slots(order[:size].sort().values.tolist())


@torch.no_grad()
def nearness_to_slots(subject: ModelOnData, split: Split) -> dict[int, float]:
    """Return, by class of a split, the cosine of its mean feature to the nearest slot.

    Both are relative to the mean of all slots if ``memory.center_addressing`` is true, and in the
    coordinates in which the Gaussian memory is read. Empty for a
    memory whose slots do not stand for classes.
    """
    memory = subject.trained.state
    if memory is None or not memory.slot_classes:
        return {}
    assert subject.trained.memory is not None
    slots = subject.trained.memory.slots
    encoder = subject.trained.encoder
    embed = split_embedder(encoder, EpisodeSampler(subject.dataset, split, 2, 1, 1))
    classes = subject.dataset.classes(split).tolist()
    rows = (embed(torch.from_numpy(subject.dataset.image_ids(c))) for c in classes)
    project = subject.trained.model.project
    features = torch.stack([project(r, memory).mean(0) for r in rows])
    content = slots.coordinates.to(features.device)
    if memory.statistics is None and subject.trained.settings.memory.center_addressing:
        center = content.mean(0)
        features, content = features - center, content - center
    cosines = F.normalize(features, dim=-1) @ F.normalize(content, dim=-1).mT  # [C, A]
    return dict(zip(classes, cosines.amax(-1).tolist(), strict=True))


def changed_answers(
    with_memory: ModelOnData, without: ModelOnData, protocol: EpisodeProtocol
) -> dict[str, float]:
    """Return the share of answers that memory turned right, and that it turned wrong."""
    before, after = (one.measure(protocol).evaluation.correct for one in (without, with_memory))
    return {
        "turned_right": (after & ~before).double().mean().item(),
        "misled": (before & ~after).double().mean().item(),
    }
