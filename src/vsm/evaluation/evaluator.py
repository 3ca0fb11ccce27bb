"""Measuring a model on seeded episodes; the memory is only read.

Inductive features do not depend on the episode, so the encoder embeds each image once and thousands
of episodes are drawn from its features.

The predictive distribution p averages the probabilities of all sampled prototypes. Calibrated by a
temperature it is p_i^(1/T) / Σ_j p_j^(1/T): T > 1 makes it less confident, T < 1 more.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.data import Dataset, EpisodeSampler, Split
from vsm.data.episodes import Proportions
from vsm.encoders import Encoder, evaluation_mode
from vsm.errors import EpisodeError
from vsm.evaluation.intervals import Estimate, Reliability, estimate, reliability
from vsm.memory import Memory, Posterior, SupportSet
from vsm.model import FewShotModel
from vsm.nn.layers import predictive
from vsm.seeding import Randomness, task_generators
from vsm.system.progress import NULL_PROGRESS, Progress

ELEMENTS_AT_ONCE = 20_000_000  # numbers that a classifier holds at a time; bounds its memory
BOUNDS = (0.05, 20.0)  # of temperatures
NUM_HALVINGS = 50
LOWEST_LOG_PROBABILITY = -1e4  # of what was held impossible, so that no zero meets an infinity

BatchNormMode = Literal["inductive", "transductive"]
Embedder = Callable[[Tensor], Tensor]
"""From image ids ``[T, …]`` of episodes to features ``[T, …, D]``."""
EpisodeClassifier = Callable[[Tensor, Tensor, Randomness], Tensor]
"""From support ``[T, N, K, D]``, queries ``[T, B, D]`` and a source of draws to log-probabilities
``[T, B, N]``."""


@dataclass(frozen=True)
class EpisodeProtocol:
    """A seeded list of episodes, the batch norm mode, and how much of the memory is used.

    ``transductive`` classifies the queries of an episode together; ``proportions`` and ``outliers``
    are those of ``vsm.data.EpisodeSampler``.
    """

    data: str
    split: Split
    way: int
    shot: int
    queries: int
    episodes: int
    seed: int
    batch_norm: BatchNormMode = "inductive"
    memory_slots: int | None = None
    transductive: bool = False
    proportions: Proportions = "balanced"
    outliers: float = 0.0

    def __post_init__(self) -> None:
        if self.episodes < 2:
            raise EpisodeError(f"episodes: an interval needs at least 2, got {self.episodes}")
        if self.memory_slots is not None and self.memory_slots < 0:
            raise EpisodeError(f"memory_slots: must not be negative, got {self.memory_slots}")

    def describe(self) -> str:
        """Return the protocol in one line for people."""
        unusual = ", transductive batch norm" if self.batch_norm == "transductive" else ""
        if self.memory_slots is not None:
            unusual += f", memory cut to its first {self.memory_slots} classes"
        if self.proportions != "balanced":
            unusual += f", proportions {self.proportions}"
        if self.outliers:
            unusual += f", {self.outliers:.0%} outliers among them"
        if self.transductive:
            unusual += ", classified together"
        return (
            f"{self.data}, {self.split} classes, {self.way}-way {self.shot}-shot, {self.queries} "
            f"queries per class, {self.episodes} episodes, seed {self.seed}{unusual}"
        )

    def sampler(self, dataset: Dataset) -> EpisodeSampler:
        """Return the sampler of these episodes."""
        shape = (self.way, self.shot, self.queries, self.proportions, self.outliers)
        return EpisodeSampler(dataset, self.split, *shape)


@dataclass(frozen=True)
class Evaluation:
    """Outcomes of E episodes of N classes and B = N·Q queries of these each, on the CPU.

    Attributes:
        class_ids: the classes of every episode, int64 ``[E, N]``.
        log_probabilities: of every class for every query ``[E, B, N]``.
        labels: the true class of every query, as a position in its episode: int64 ``[E, B]``.
    """

    class_ids: Tensor
    log_probabilities: Tensor
    labels: Tensor

    def scale_by_temperature(self, temperature: float) -> "Evaluation":
        """Return the same answers with probabilities p^(1/T) / Z."""
        scaled = scale_by_temperature(self.log_probabilities, temperature)
        return Evaluation(self.class_ids, scaled, self.labels)

    def best_temperature(self) -> float:
        """Return the temperature that makes these answers most likely."""
        return fit_temperature(self.log_probabilities.flatten(0, 1), self.labels.flatten())

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


def query_labels(log_probabilities: Tensor) -> Tensor:
    """Return the true classes ``[E, B]`` of queries ``[E, B, N]``, which go class after class."""
    num_episodes, num_queries, way = log_probabilities.shape
    return torch.arange(way).repeat_interleave(num_queries // way).expand(num_episodes, -1)


def scale_by_temperature(log_probabilities: Tensor, temperature: float) -> Tensor:
    """Return log(p_i^(1/T) / Z) of ``log_probabilities [..., N]``; T = 1 leaves them untouched."""
    if temperature == 1.0:
        return log_probabilities
    return F.log_softmax(log_probabilities / temperature, dim=-1)


def fit_temperature(
    log_probabilities: Tensor,
    labels: Tensor,
    bounds: tuple[float, float] = BOUNDS,
    halvings: int = NUM_HALVINGS,
) -> float:
    """Return the T that minimizes the mean NLL of ``labels [P]`` by ``log_probabilities [P, N]``.

    That is convex in b = 1/T with the slope E_p^b[log p] − log p_label, averaged over predictions,
    whose sign change is found by bisection of log b. Predictions without a mistake would want
    T = 0, and worthless ones infinity: T stays within the bounds.
    """
    log_probabilities = log_probabilities.double().clamp_min(LOWEST_LOG_PROBABILITY)
    mean_of_true = log_probabilities.gather(-1, labels.unsqueeze(-1)).mean()
    by_class = log_probabilities.mT.contiguous()  # [N, P]: a softmax over few classes is slow
    low, high = 1 / bounds[1], 1 / bounds[0]
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        weights = torch.softmax(middle * by_class, 0)
        if (weights * by_class).sum(0).mean() < mean_of_true:
            low = middle  # the true classes deserve more than they are given
        else:
            high = middle
    return 1 / math.sqrt(low * high)


def evaluate(
    model: FewShotModel,
    memory: Memory | None,
    sampler: EpisodeSampler,
    num_episodes: int,
    seed: int,
    batch_norm: BatchNormMode = "inductive",
    progress: Progress = NULL_PROGRESS,
    temperature: float = 1.0,
    joint: Callable[[Posterior, Tensor], Posterior] | None = None,
) -> Evaluation:
    """Classify the first ``num_episodes`` of the sampler's seeded list of episodes.

    ``transductive`` batch norm uses each episode's own statistics, so its queries see each other:
    every episode is embedded by itself. ``temperature`` calibrates probabilities. ``joint`` returns
    the posterior given the queries of each task too, which are projected ``[T, B, D]``.
    """

    def classify(support: Tensor, queries: Tensor, random: Randomness) -> Tensor:
        support, queries = (model.project(part, memory) for part in (support, queries))
        posterior = model.infer(SupportSet.of(support), memory, random)
        if joint is not None:
            posterior = joint(posterior, queries)
        drawn = posterior.log_probabilities(queries)
        return scale_by_temperature(predictive(drawn), temperature)

    with evaluation_mode(model):
        inductive = batch_norm == "inductive"
        embed = split_embedder(model.encoder, sampler) if inductive else _by_episode(model, sampler)
        queries = sampler.way * sampler.queries / (1 - sampler.outliers)
        per_task = math.ceil(sampler.way * queries) * model.num_prototype_samples
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
    for block in sampler.evaluation_batches(num_episodes, seed):
        for part in block.split(size):
            count, num_support = len(part.class_ids), sampler.way * sampler.shot
            random = task_generators(seed, "evaluation-noise", 0, range(done, done + count))
            features = embed(torch.cat([part.support_ids.flatten(1), part.query_ids], 1))
            support, queries = features.tensor_split([num_support], 1)
            support = support.unflatten(1, (sampler.way, sampler.shot))
            answers = classify(support, queries, random)[:, : part.labels.shape[1]]  # no outliers
            outcomes.append((part.class_ids, answers.cpu(), part.labels))
            progress.advance(count)
            done += count
    return Evaluation(*(torch.cat(values) for values in zip(*outcomes, strict=True)))


def split_embedder(encoder: Encoder, sampler: EpisodeSampler) -> Embedder:
    """Embed the images of the sampler's split; return the look-up of their features."""
    image_ids = torch.from_numpy(sampler.dataset.split_ids(sampler.split))
    features = encoder.features(sampler.dataset, image_ids)
    row = torch.zeros(sampler.dataset.num_samples, dtype=torch.int64)
    row[image_ids] = torch.arange(len(image_ids))
    return lambda wanted: features[row[wanted].to(features.device)]


def _by_episode(model: FewShotModel, sampler: EpisodeSampler) -> Embedder:
    """Embed every episode with batch norm of its own statistics."""
    if not _batch_norms(model):
        raise EpisodeError(
            f"batch_norm: transductive needs a backbone with batch norm, and the model of "
            f"{sampler.dataset.name} has none; leave it out"
        )

    def embed_each_episode(wanted: Tensor) -> Tensor:
        with batch_statistics(model):
            images = (model.encoder.load(sampler.dataset, one.flatten()) for one in wanted)
            features = torch.stack([model.embed(one) for one in images])
            return features.view(*wanted.shape, -1)

    return embed_each_episode


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
