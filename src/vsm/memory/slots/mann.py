"""A memory-augmented neural network: short-term memory of one episode, with a controller.

A. Santoro, S. Bartunov, M. Botvinick, D. Wierstra, T. Lillicrap, "Meta-Learning with
Memory-Augmented Neural Networks", ICML 2016. A recurrent controller writes what it is shown into
the places of an external memory that were least recently used, or read last, and reads by content.

Differences from the original, which classifies a stream of images, each with the label of the one
before:

* The controller sees the support features, each with its class's mean in place of a label. Nothing
  is predicted meanwhile, so no label is delayed.
* To read for a class, its mean is shown once more, for all classes in parallel and without writing,
  so the order of classes does not matter. The recollection is a linear map of what the heads read;
  it conditions the prototype as m does and has no KL.
* The order in which the support is shown matters, and is drawn at random for each task.

The memory is cleared between episodes: nothing is consolidated.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.memory.slots.recall import Recall, Recollection
from vsm.memory.state import SupportSet
from vsm.seeding import Randomness, uniform
from vsm.settings import RunSettings


class Episode(NamedTuple):
    """All that changes within an episode of B tasks; R heads, S places of W numbers each."""

    content: Tensor  # M [B, S, W]
    read_weights: Tensor  # w^r of the latest step [B, R, S]
    usage: Tensor  # w^u [B, S]
    hidden: Tensor  # of the controller [B, H]
    cell: Tensor  # of the controller [B, H]


class MannRecall(Recall):
    """Show the support to the controller, then read once for every class: J = 1."""

    def __init__(self, num_features: int, run: RunSettings) -> None:
        super().__init__(num_features, run)
        self.settings = settings = run.mann
        read = settings.reads * settings.width
        self.controller = nn.LSTMCell(2 * num_features + read, settings.controller_units)
        self.keys = nn.Linear(settings.controller_units, read)
        self.gate = nn.Linear(settings.controller_units, settings.reads)  # α
        self.output = nn.Linear(read, num_features)

    def forward(
        self,
        support: SupportSet,
        memory: None,
        slot_mask: Tensor | None,
        num_samples: int,
        random: Randomness,
    ) -> Recollection:
        """See :class:`Recall`; the only draw is the order of presentation."""
        del memory, slot_mask, num_samples
        tasks, way, shot, _ = support.features.shape
        order = uniform(random, tasks, way * shot).argsort(-1)
        return self.recollect(support, order.to(support.features.device))

    def recollect(self, support: SupportSet, order: Tensor) -> Recollection:
        """Show images in ``order`` ``[T, N·K]``, positions in N·K, and read for every class."""
        features, means = support.features, support.mean
        tasks, way, shot, width = features.shape
        shown = torch.cat([features, means.unsqueeze(2).expand_as(features)], -1).flatten(1, 2)
        shown = shown.gather(1, order.unsqueeze(-1).expand(-1, -1, 2 * width))  # [T, N·K, 2·D]
        episode = self.begin(tasks, features)
        for step in range(way * shot):
            episode = self.show(episode, shown[:, step])
        return self._read(episode, means)

    def begin(self, num_tasks: int, like: Tensor) -> Episode:
        """Return wiped memories for ``num_tasks`` tasks, of the type of ``like``."""
        settings = self.settings
        controller = like.new_zeros(num_tasks, settings.controller_units)
        return Episode(
            like.new_zeros(num_tasks, settings.slots, settings.width),
            like.new_zeros(num_tasks, settings.reads, settings.slots),
            like.new_zeros(num_tasks, settings.slots),
            controller,
            controller,
        )

    def show(self, episode: Episode, shown: Tensor) -> Episode:
        """One step of least recently used access, for ``shown`` ``[B, 2·D]``.

        Writing: w^w = σ(α)·w^r + (1 − σ(α))·w^lu with the weights of the step before, each head to
        its own least used place; those places are wiped first. Then reading by content, and
        w^u ← γ·w^u + w^r + w^w, summed over heads.
        """
        last_read = (episode.read_weights @ episode.content).flatten(1)
        state = (episode.hidden, episode.cell)
        hidden, cell = self.controller(torch.cat([shown, last_read], -1), state)
        keys = self._keys(hidden)  # [B, R, W]
        gate = torch.sigmoid(self.gate(hidden)).unsqueeze(-1)  # [B, R, 1]
        unused = least_used(episode.usage, self.settings.reads)  # [B, R, S]
        write_weights = gate * episode.read_weights + (1 - gate) * unused
        kept = episode.content * (1 - unused.sum(1)).unsqueeze(-1)
        content = kept + write_weights.mT @ keys
        read_weights = content_weights(keys, content)
        usage = self.settings.usage_decay * episode.usage + (read_weights + write_weights).sum(1)
        return Episode(content, read_weights, usage.detach(), hidden, cell)

    def _read(self, episode: Episode, means: Tensor) -> Recollection:
        """Read for the classes of each task without writing: means ``[T, N, D]``."""
        tasks, way, _ = means.shape
        last_read = (episode.read_weights @ episode.content).flatten(1)
        controller = (last_read, episode.hidden, episode.cell)
        last_read, *state = (part.repeat_interleave(way, 0) for part in controller)  # [T·N, ...]
        shown = means.repeat(1, 1, 2).flatten(0, 1)
        hidden, _ = self.controller(torch.cat([shown, last_read], -1), tuple(state))
        keys = self._keys(hidden).view(tasks, way * self.settings.reads, -1)  # [T, N·R, W]
        read_weights = content_weights(keys, episode.content)  # [T, N·R, S]
        read = (read_weights @ episode.content).view(tasks, way, 1, -1)  # [T, N, 1, R·W]
        return Recollection(
            self.output(read),
            read_weights.unflatten(1, (way, -1)).mean(2),
            means.new_zeros(tasks, way),
        )

    def _keys(self, hidden: Tensor) -> Tensor:
        heads = (self.settings.reads, self.settings.width)
        keys: Tensor = torch.tanh(self.keys(hidden)).unflatten(-1, heads)
        return keys


def content_weights(keys: Tensor, content: Tensor) -> Tensor:
    """w^r = softmax over places of the cosine: ``[B, R, W]`` and ``[B, S, W]`` to ``[B, R, S]``."""
    # A wiped place has no direction. This bound keeps its gradient within reason.
    places = F.normalize(content, dim=-1, eps=1e-4)
    return (F.normalize(keys, dim=-1) @ places.mT).softmax(-1)


def least_used(usage: Tensor, count: int) -> Tensor:
    """w^lu: one-hot weights of the ``count`` least used places ``[B, S]``: ``[B, count, S]``."""
    places = usage.argsort(stable=True, dim=-1)[:, :count]
    return F.one_hot(places, usage.shape[-1]).to(usage)
