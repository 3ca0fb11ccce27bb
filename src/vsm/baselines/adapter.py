"""Training the linear map of :class:`vsm.baselines.ProtoNetAdapter`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.errors import SettingsError
from vsm.nn.layers import pairwise_distance
from vsm.seeding import generator, uniform
from vsm.settings import BaselineSettings

SEED = 0  # of training: an evaluation with another seed measures the same adapter
NUM_TASKS = 8  # of every step
WAY = 5
QUERIES = 15  # of a class, or as many as it has left
TEMPERATURE = 0.1


class Adapter(NamedTuple):
    """A linear map between features of length one."""

    weights: Tensor  # A [D, D]
    biases: Tensor  # b [D]

    def __call__(self, features: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., D]``, in the precision and on the device of the features."""
        inputs = F.normalize(features, dim=-1)
        outputs = F.linear(inputs, self.weights.to(features), self.biases.to(features))
        return F.normalize(outputs, dim=-1)


def train_adapter(
    features: Tensor, class_sizes: Sequence[int], shot: int, settings: BaselineSettings
) -> Adapter:
    """Minimize the loss of episodes of the training classes by Adam, also within ``no_grad``.

    The learning rate falls to zero as a cosine. Every draw is a function of shot and step alone.
    """
    features, classes = features.detach(), _usable_classes(class_sizes, shot)
    steps = settings.adapter_steps
    num_features = features.shape[1]
    start = Adapter(torch.eye(num_features).to(features), features.new_zeros(num_features))
    adapter = Adapter(*(part.requires_grad_() for part in start))
    optimizer = torch.optim.Adam(list(adapter), lr=settings.adapter_learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for step in range(steps):
        drawn = _draw(*classes, shot, generator(SEED, "protonet-adapter", shot, step))
        rows, is_query = (part.to(features.device) for part in drawn)
        support, queries = features[rows].split([shot, rows.shape[2] - shot], 2)
        with torch.enable_grad():
            loss = episode_loss(adapter, support, queries, is_query)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
    return Adapter(*(part.detach() for part in adapter))


def episode_loss(adapter: Adapter, support: Tensor, queries: Tensor, is_query: Tensor) -> Tensor:
    """Average the cross-entropy over the queries of every task, and the tasks.

    ``is_query [T, N, Q]`` is false for the padding of small classes in ``queries [T, N, Q, D]``.
    """
    num_tasks, way, count = is_query.shape
    scores = episode_scores(adapter, support, queries.flatten(1, 2))
    labels = torch.arange(way, device=scores.device).repeat_interleave(count).repeat(num_tasks)
    losses = F.cross_entropy(scores.flatten(0, 1), labels, reduction="none")
    weights = is_query.flatten(1).to(losses)
    return ((losses.view(num_tasks, -1) * weights).sum(1) / weights.sum(1)).mean()


def episode_scores(adapter: Adapter, support: Tensor, queries: Tensor) -> Tensor:
    """Return −distance / 0.1 of queries ``[T, B, D]`` to class means: ``[T, B, N]``."""
    means = adapter(support).mean(2, keepdim=True)  # [T, N, 1, D]
    inputs = adapter(queries)
    return -pairwise_distance(inputs, means, "cosine").squeeze(-1) / TEMPERATURE


def _usable_classes(class_sizes: Sequence[int], shot: int) -> tuple[Tensor, Tensor]:
    """First rows and sizes ``[C]`` of the classes with a query besides ``shot`` support images."""
    sizes = torch.tensor(class_sizes)
    usable = sizes > shot
    if (known := int(usable.sum())) < 2:
        raise SettingsError(
            f"protonet-adapter: training with {shot} support images per class needs 2 training "
            f"classes of {shot + 1} images or more, but {known} of {len(sizes)} have so many; "
            "lower the shot or choose another baseline"
        )
    return (sizes.cumsum(0) - sizes)[usable], sizes[usable]


def _draw(
    starts: Tensor, sizes: Tensor, shot: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw the classes of every task, then images of each, all without replacement.

    Returns rows ``[T, N, K + Q]``, support first, and which queries are real ``[T, N, Q]``:
    a class with too few images repeats its last one.
    """
    largest = int(sizes.max())
    chosen = uniform(random, NUM_TASKS, len(sizes)).argsort(-1)[:, :WAY]  # [T, N]
    sizes = sizes[chosen].unsqueeze(-1)  # [T, N, 1]
    order = uniform(random, *chosen.shape, largest)
    order[torch.arange(largest) >= sizes] = 2.0  # beyond the class: after all its images
    places = order.topk(min(shot + QUERIES, largest), largest=False).indices  # in ascending order
    rows = starts[chosen].unsqueeze(-1) + places.minimum(sizes - 1)
    return rows, (places < sizes)[..., shot:]
