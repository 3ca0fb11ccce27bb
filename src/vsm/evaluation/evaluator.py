"""Measuring a model on seeded episodes; the memory is only read.

Inductive features do not depend on the episode, so each image is embedded once and thousands of
episodes are drawn from the cached features.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vsm.data import Dataset, EpisodeSampler, FeatureDataset, Split
from vsm.errors import EpisodeError
from vsm.evaluation.calibration import fit_temperature, scale_by_temperature
from vsm.evaluation.statistics import Estimate, Reliability, estimate, reliability
from vsm.memory import Memory
from vsm.model import FewShotModel
from vsm.nn.prototype_classifier import predictive
from vsm.seeding import Randomness, task_generators
from vsm.system.devices import send
from vsm.system.progress import NULL_PROGRESS, Progress

EMBEDDING_BATCH = 256
ELEMENTS_AT_ONCE = 20_000_000  # numbers that a classifier holds at a time; bounds its memory

BatchNormMode = Literal["inductive", "transductive"]
Embedder = Callable[[Tensor], Tensor]
"""From image ids ``[T, N, K + Q]`` to features ``[T, N, K + Q, D]``."""
EpisodeClassifier = Callable[[Tensor, Tensor, Randomness], Tensor]
"""From support ``[T, N, K, D]``, queries ``[T, N, Q, D]`` and a source of draws to
log-probabilities ``[T, N·Q, N]``."""


@dataclass(frozen=True)
class Evaluation:
    """Outcomes of E episodes of N classes and B = N·Q queries each, on the CPU.

    Attributes:
        class_ids: the classes of every episode, int64 ``[E, N]``.
        log_probabilities: of every class for every query ``[E, B, N]``, queries class after class.
    """

    class_ids: Tensor
    log_probabilities: Tensor

    def scale_by_temperature(self, temperature: float) -> "Evaluation":
        """Return the same answers with probabilities p^(1/T) / Z."""
        return Evaluation(self.class_ids, scale_by_temperature(self.log_probabilities, temperature))

    def best_temperature(self) -> float:
        """Return the temperature that makes these answers most likely."""
        return fit_temperature(self.log_probabilities.flatten(0, 1), self.labels.flatten())

    @property
    def labels(self) -> Tensor:
        """The true class of every query, as a position in its episode: int64 ``[E, B]``."""
        num_episodes, num_queries, way = self.log_probabilities.shape
        return torch.arange(way).repeat_interleave(num_queries // way).expand(num_episodes, -1)

    @cached_property
    def correct(self) -> Tensor:
        """Whether the most probable class is the true one: boolean ``[E, B]``."""
        return self.log_probabilities.argmax(-1) == self.labels

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the predicted class ``[E, B]``."""
        return self.log_probabilities.amax(-1).exp()

    @cached_property
    def log_likelihood(self) -> Tensor:
        """Log-probability of the true class ``[E, B]``."""
        return self.log_probabilities.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)

    @property
    def confusions(self) -> Tensor:
        """How many queries of each class of an episode each class answered: ``[E, N, N]``."""
        num_episodes, way = self.class_ids.shape
        cells = self.labels * way + self.log_probabilities.argmax(-1)  # [E, B]
        cells = cells + torch.arange(num_episodes).unsqueeze(1) * way**2
        counts = torch.bincount(cells.flatten(), minlength=num_episodes * way**2)
        return counts.view(num_episodes, way, way)

    @property
    def episode_accuracies(self) -> Tensor:
        """``[E]``, in double precision."""
        return self.correct.double().mean(1)

    @property
    def accuracy(self) -> Estimate:
        """Mean accuracy with its interval over episodes."""
        return estimate(self.episode_accuracies)

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of the averaged probabilities, in nats."""
        return -self.log_likelihood.double().mean().item()

    @property
    def reliability(self) -> Reliability:
        """Confidence against accuracy over all queries."""
        return reliability(self.confidence.flatten(), self.correct.flatten())


@torch.no_grad()
def embed_images(
    model: FewShotModel, dataset: Dataset, image_ids: Tensor, progress: Progress = NULL_PROGRESS
) -> Tensor:
    """Embed samples ``[B]`` in evaluation mode: ``[B, D]``."""
    with evaluation_mode(model):
        parts = []
        for part in image_ids.split(EMBEDDING_BATCH):
            parts.append(model.embed(_load(model, dataset, part)))
            progress.advance(len(part))
        return torch.cat(parts)


def _load(model: FewShotModel, dataset: Dataset, image_ids: Tensor) -> Tensor:
    """Return the normalized samples ``[B]`` where the model is: ``[B, ...]``."""
    return dataset.normalize(send(dataset.load(image_ids), model.device))


def encode_dataset(model: FewShotModel, dataset: Dataset) -> FeatureDataset:
    """Pass every training and validation image through the backbone once, in evaluation mode.

    Classes, splits and names stay, so episodes are those of the images. Rows of test images are
    not a number: nothing may be learned from them.
    """
    features = np.full((dataset.num_samples, model.num_features), np.nan, np.float32)
    splits: tuple[Split, ...] = ("train", "validation")
    with torch.no_grad(), evaluation_mode(model):
        for split in splits:
            for part in torch.from_numpy(dataset.split_ids(split)).split(EMBEDDING_BATCH):
                features[part.numpy()] = model.encode(_load(model, dataset, part)).cpu().numpy()
    return with_features(dataset, features)


def with_features(dataset: Dataset, features: npt.NDArray[np.float32]) -> FeatureDataset:
    """Return ``dataset`` with the features ``[num_samples, D]`` of its samples in their place."""
    return FeatureDataset(
        name=dataset.name,
        class_names=dataset.class_names,
        class_starts=dataset.class_starts,
        splits=dataset.splits,
        origin=dataset.origin,
        features=features,
    )


def evaluate(
    model: FewShotModel,
    memory: Memory | None,
    sampler: EpisodeSampler,
    num_episodes: int,
    seed: int,
    batch_norm: BatchNormMode = "inductive",
    progress: Progress = NULL_PROGRESS,
    embed: Embedder | None = None,
    temperature: float = 1.0,
) -> Evaluation:
    """Classify the first ``num_episodes`` of the sampler's seeded list of episodes.

    ``transductive`` batch norm uses each episode's own statistics, so its queries see each other;
    every episode is embedded anew and results carry that name. Features that were cached for
    episodes of another shape serve again as ``embed``. ``temperature`` calibrates probabilities.
    """

    def classify(support: Tensor, queries: Tensor, random: Randomness) -> Tensor:
        drawn = model(support, queries, memory, random).log_probabilities
        return scale_by_temperature(predictive(drawn), temperature)

    with evaluation_mode(model):
        embed = embed or _embedder(model, sampler, batch_norm)
        per_task = (sampler.way**2) * sampler.queries * model.num_prototype_samples
        return evaluate_classifier(classify, embed, sampler, num_episodes, seed, per_task, progress)


@torch.no_grad()
def evaluate_classifier(
    classify: EpisodeClassifier,
    embed: Embedder,
    sampler: EpisodeSampler,
    num_episodes: int,
    seed: int,
    elements_per_task: int,
    progress: Progress = NULL_PROGRESS,
) -> Evaluation:
    """Run the one loop over episodes that every classifier is measured by.

    The sampler and ``seed``, which also seeds the classifier's draws, define the list of episodes.
    ``elements_per_task``, the numbers that ``classify`` holds for an episode, bounds the batches.
    """
    outcomes = []
    done, size = 0, max(1, ELEMENTS_AT_ONCE // elements_per_task)
    for block in sampler.evaluation_episodes(num_episodes, seed):
        for class_ids, image_ids in zip(*(ids.split(size) for ids in block), strict=True):
            count = len(class_ids)
            random = task_generators(seed, "evaluation-noise", 0, range(done, done + count))
            features = embed(image_ids)  # [T, N, K + Q, D]
            support, queries = features.split([sampler.shot, sampler.queries], 2)
            outcomes.append((class_ids, classify(support, queries, random).cpu()))
            progress.advance(count)
            done += count
    return Evaluation(*(torch.cat(values) for values in zip(*outcomes, strict=True)))


def cached_embedder(model: FewShotModel, sampler: EpisodeSampler) -> Embedder:
    """Embed every image of the sampler's split once; return the look-up of their features."""
    image_ids = torch.from_numpy(sampler.dataset.split_ids(sampler.split))
    features = embed_images(model, sampler.dataset, image_ids)
    row = torch.zeros(sampler.dataset.num_samples, dtype=torch.int64)
    row[image_ids] = torch.arange(len(image_ids))
    return lambda wanted: features[row[wanted].to(features.device)]


def _embedder(model: FewShotModel, sampler: EpisodeSampler, batch_norm: BatchNormMode) -> Embedder:
    dataset = sampler.dataset
    if batch_norm == "inductive":
        return cached_embedder(model, sampler)
    if not _batch_norms(model):
        raise EpisodeError(
            f"batch_norm: transductive needs a backbone with batch norm, and the model of "
            f"{dataset.name} has none; leave it out"
        )

    def embed_each_episode(wanted: Tensor) -> Tensor:
        with batch_statistics(model):
            images = (_load(model, dataset, episode.flatten()) for episode in wanted)
            features = torch.stack([model.embed(one) for one in images])
            return features.view(*wanted.shape, -1)

    return embed_each_episode


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode inside the block and back into its own after."""
    if not any(module.training for module in model.modules()):  # telling is faster than setting
        yield
        return
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Make batch norm use the batch's own statistics, and leave the running ones untouched."""
    layers = _batch_norms(model)
    before = [(layer.training, layer.track_running_stats) for layer in layers]
    try:
        for layer in layers:
            layer.training, layer.track_running_stats = True, False
        yield
    finally:
        for layer, (training, tracking) in zip(layers, before, strict=True):
            layer.training, layer.track_running_stats = training, tracking


def _batch_norms(model: nn.Module) -> list[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [module for module in model.modules() if isinstance(module, kinds)]
