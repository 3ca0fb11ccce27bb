"""Writing to the memory: Eqs. 11-13, appending, and capacity."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.memory.state import Memory, Observations, SlotMemory
from vsm.settings import MemorySettings

LEAKY_SLOPE = 0.2

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.positive,
    "softmax": partial(F.softmax, dim=-1),
    "relu": F.relu,
    "tanh": torch.tanh,
}


class Consolidation(ABC):
    """Maps a memory and observations to a new memory; nothing else changes a memory.

    The training step calls it inside its own graph on the previous step's observations and then
    recalls from the result: its parameters learn although stored memories and observed features
    are constants.
    """

    @abstractmethod
    def empty(self) -> Memory:
        """Return an empty memory."""

    @abstractmethod
    def __call__(self, memory: Memory, observations: Observations, step: int) -> Memory:
        """Return the memory with ``observations`` of ``step`` added."""

    def diagnostics(self, memory: Memory) -> dict[str, float]:
        """Return values to log after a backward pass."""
        return {"slots": float(len(memory))}


class SlotConsolidation(nn.Module, Consolidation):
    """Eqs. 11-13 on a memory of one slot per class.

    Seen classes are updated (Eqs. 11-13), unseen ones append their mean feature. All samples of a
    class in one batch of observations are nodes of one graph, whichever tasks they came from.
    """

    def __init__(self, num_features: int, settings: MemorySettings) -> None:
        super().__init__()
        self.num_features = num_features
        self.update = settings.update
        self.activation = ACTIVATIONS[settings.update_activation]
        self.attention_scale = settings.attention_scale
        self.retention = settings.retention
        self.capacity = settings.capacity
        if self.update == "attention":
            bound = (2 * num_features) ** -0.5
            self.attention_memory = nn.Parameter(torch.empty(num_features).uniform_(-bound, bound))
            self.attention_sample = nn.Parameter(torch.empty(num_features).uniform_(-bound, bound))

    def empty(self) -> SlotMemory:
        """Return a memory without slots."""
        return SlotMemory.empty(self.num_features)

    def forward(self, memory: SlotMemory, observations: Observations, step: int) -> SlotMemory:
        """See :class:`Consolidation`."""
        features, class_ids = observations
        classes, node_class = torch.unique(class_ids, return_inverse=True)  # [C], [P]
        counts = torch.bincount(node_class, minlength=len(classes))  # [C]
        match = classes.unsqueeze(-1) == memory.class_ids  # [C, A]
        seen = match.any(-1)  # [C]
        slots = match.long().argmax(-1)[seen] if len(memory) else classes[seen]  # [C_seen]
        means = _segment_sum(features, node_class, len(classes)) / counts.unsqueeze(-1)

        content, updated_counts, updated_at = memory.content, memory.counts, memory.last_update
        if len(slots):
            old = content.index_select(0, slots)
            of_seen = seen[node_class]  # nodes [P]; their classes are renumbered without gaps
            place = (seen.cumsum(0) - 1)[node_class[of_seen]]
            new = self._new_content(old, means[seen], features[of_seen], place)
            # Eq. 13. A difference is added rather than rows assigned, to keep it one graph.
            change = self._share_of_new(memory.counts[slots], counts[seen]) * (new - old)
            content = content.index_add(0, slots, change)
            updated_counts = updated_counts.index_add(0, slots, counts[seen])
            updated_at = updated_at.index_fill(0, slots, step)
        unseen = ~seen
        grown = SlotMemory(
            torch.cat([content, means[unseen]]),
            torch.cat([memory.class_ids, classes[unseen]]),
            torch.cat([updated_counts, counts[unseen]]),
            torch.cat([updated_at, torch.full_like(classes[unseen], step)]),
        )
        if self.capacity is None or len(grown) <= self.capacity:
            return grown
        return grown.first(self.capacity)

    def _share_of_new(self, old_counts: Tensor, new_counts: Tensor) -> float | Tensor:
        """1 − α of Eq. 13, of each of C classes: one number, or ``[C, 1]``."""
        del old_counts, new_counts
        return 1 - self.retention

    def _new_content(
        self, old: Tensor, means: Tensor, features: Tensor, node_class: Tensor
    ) -> Tensor:
        """M̄_c of Eq. 12, or the plain mean of the class's samples: ``[C, D]``.

        ``old`` is M_c ``[C, D]``; the nodes ``features [P, D]`` belong to ``node_class [P]``.
        """
        if self.update == "mean":
            return means
        own = torch.arange(len(old), device=old.device)
        nodes = torch.cat([old, features])  # node 0 of every graph is M_c itself
        segment = torch.cat([own, node_class])
        weights = self.attention_weights(old, nodes, segment).unsqueeze(-1)
        return self.activation(_segment_sum(weights * nodes, segment, len(old)))

    def attention_weights(self, old: Tensor, nodes: Tensor, segment: Tensor) -> Tensor:
        """Eq. 11: β = softmax over each class's nodes of LeakyReLU(s·wᵀ[M_c, h_i]): ``[P]``."""
        from_memory = (old @ self.attention_memory).index_select(0, segment)
        scores = F.leaky_relu(from_memory + nodes @ self.attention_sample, LEAKY_SLOPE)
        scores = self.attention_scale * scores
        highest = torch.full_like(scores[: len(old)], -torch.inf).scatter_reduce(
            0, segment, scores.detach(), "amax"
        )
        exponentials = (scores - highest.index_select(0, segment)).exp()
        totals = _segment_sum(exponentials, segment, len(old))
        return exponentials / totals.index_select(0, segment)

    def diagnostics(self, memory: Memory) -> dict[str, float]:
        """Return the number of slots and, where there is one, the gradient of w (Eq. 11)."""
        measured = super().diagnostics(memory)
        if self.update == "attention":
            parameters = (self.attention_memory, self.attention_sample)
            gradients = [p.grad.norm() for p in parameters if p.grad is not None]
            norm = torch.stack(gradients).norm().item() if gradients else 0.0
            measured["attention_gradient_norm"] = norm
        return measured


class MeanConsolidation(SlotConsolidation):
    """Slots as plain means of all their samples, for memories that users extend.

    Eq. 13 with α = n / (n + k) for k new samples and n old ones, and the mean in place of
    Eqs. 11-12: adding two batches one after the other equals adding them at once.
    """

    def __init__(self, num_features: int, settings: MemorySettings) -> None:
        super().__init__(num_features, replace(settings, update="mean"))

    def _share_of_new(self, old_counts: Tensor, new_counts: Tensor) -> Tensor:
        return (new_counts / (old_counts + new_counts)).unsqueeze(-1)


def _segment_sum(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Sum rows of ``values [P, ...]`` that share a segment: ``[num_segments, ...]``."""
    return values.new_zeros(num_segments, *values.shape[1:]).index_add(0, segment, values)
