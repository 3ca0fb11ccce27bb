"""What the memory holds, as immutable values."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Observations(NamedTuple):
    """Features seen in one step that the memory has yet to take in.

    Attributes:
        features: ``[P, D]``, detached.
        class_ids: int64 ``[P]``.
    """

    features: Tensor
    class_ids: Tensor

    def to(self, device: torch.device) -> "Observations":
        """Return the same observations on ``device``."""
        return Observations(self.features.to(device), self.class_ids.to(device))


@dataclass(frozen=True)
class Memory:
    """One slot a class; A slots in all, in the order in which their classes were first met.

    Attributes:
        content: M ``[A, D]``.
        class_ids: int64 ``[A]``, the class of each slot.
        counts: int64 ``[A]``, samples that went into each slot.
        last_update: int64 ``[A]``, the step of each slot's latest change.
    """

    content: Tensor
    class_ids: Tensor
    counts: Tensor
    last_update: Tensor

    @staticmethod
    def empty(num_features: int, device: torch.device | None = None) -> "Memory":
        """Return a memory without slots."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return Memory(torch.zeros(0, num_features, device=device), none, none, none)

    def __len__(self) -> int:
        return self.content.shape[0]

    def to(self, device: torch.device) -> "Memory":
        """Return the same memory on ``device``."""
        return Memory(
            self.content.to(device),
            self.class_ids.to(device),
            self.counts.to(device),
            self.last_update.to(device),
        )

    def detach(self) -> "Memory":
        """Return the same memory outside any graph."""
        return Memory(self.content.detach(), self.class_ids, self.counts, self.last_update)

    def keep(self, slots: Tensor) -> "Memory":
        """Return the memory of these slots alone: int64 ``[A']``."""
        return Memory(
            self.content.index_select(0, slots),
            self.class_ids[slots],
            self.counts[slots],
            self.last_update[slots],
        )

    def hidden_from(self, class_ids: Tensor, mask: Literal["none", "own", "task"]) -> Tensor | None:
        """Tell which slots each class of a training batch must not see.

        Args:
            class_ids: ``[T, N]``, the classes of the batch.
            mask: ``none``, the class's ``own`` slot, or the slots of all classes of its ``task``.

        Returns:
            Boolean ``[T, N, A]``, true where hidden; nothing for ``none``.
        """
        if mask == "none":
            return None
        own = class_ids.unsqueeze(-1) == self.class_ids  # [T, N, A]
        return own if mask == "own" else own.any(1, keepdim=True).expand_as(own)
