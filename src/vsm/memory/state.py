"""Memories, support sets and observations, as immutable values."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vsm.memory.gaussian import GaussianMemory

Mask = Literal["none", "own", "task"]


class SupportSet(NamedTuple):
    """S, the labeled images of the classes of a batch."""

    features: Tensor  # [T, N, K, D]; classes with fewer images than K repeat theirs
    mean: Tensor  # h̄ [T, N, D], over the images of each class
    shots: Tensor | None = None  # images of each class [T, N, 1]; None where all have K

    @staticmethod
    def of(features: Tensor) -> "SupportSet":
        """Make a support set of ``features [T, N, K, D]``."""
        return SupportSet(features, features.mean(2))

    @staticmethod
    def of_classes(rows: Tensor, sizes: Sequence[int]) -> "SupportSet":
        """Make one task of ``rows [P, D]``, class after class; ``sizes`` are the K_n ≥ 1."""
        if len(set(sizes)) == 1:
            return SupportSet.of(rows.view(1, len(sizes), sizes[0], -1))
        classes, turns = rows.split(list(sizes)), torch.arange(max(sizes))
        repeated = torch.stack([features[turns % len(features)] for features in classes])
        means = torch.stack([features.mean(0) for features in classes])
        shots = means.new_tensor(sizes).view(1, -1, 1)
        return SupportSet(repeated.unsqueeze(0), means.unsqueeze(0), shots)

    @property
    def shot(self) -> int | Tensor:
        """K: one number, or ``[T, N, 1]`` where classes differ in it."""
        return self.features.shape[2] if self.shots is None else self.shots


class Observations(NamedTuple):
    """Features of one step, to be consolidated in the next."""

    features: Tensor  # [P, D], detached
    class_ids: Tensor  # int64 [P]

    def to(self, device: torch.device) -> "Observations":
        """Move to ``device``."""
        return Observations(self.features.to(device), self.class_ids.to(device))


@dataclass(frozen=True)
class Memory(ABC):
    """A long-term memory: a record whose fields are tensors, stored by their names.

    Each is annotated with its kind (float or int) and axes; axes of one letter have one size.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Return every field by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device) -> Self:
        """Move to ``device``."""
        return type(self)(**{name: value.to(device) for name, value in self.tensors().items()})

    def detach(self) -> Self:
        """Detach from any graph."""
        return type(self)(**{name: value.detach() for name, value in self.tensors().items()})

    def check(self, width: int | None = None) -> None:
        """Raise a ``ValueError`` if tensors are inconsistent, or not of ``width`` (None: any)."""
        sizes = {} if width is None else {"D": width}
        for field in fields(self):
            tensor: Tensor = getattr(self, field.name)
            kind, *axes = get_args(field.type)[1].split()
            fits = tensor.ndim == len(axes) and all(
                sizes.setdefault(axis, int(axis) if axis.isdigit() else size) == size
                for axis, size in zip(axes, tensor.shape, strict=True)
            )
            is_int = tensor.dtype == torch.int64
            if not fits or not (is_int if kind == "int" else tensor.is_floating_point()):
                expected = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
                raise ValueError(
                    f"its {field.name} is {tensor.dtype} {list(tensor.shape)}, expected {kind} "
                    f"[{expected}]"
                )

    @abstractmethod
    def __len__(self) -> int:
        """Slots that hold something."""

    @property
    @abstractmethod
    def slot_classes(self) -> list[int]:
        """The class of each slot; empty where slots do not stand for classes."""

    @abstractmethod
    def first(self, count: int) -> Self:
        """Return the memory of the first ``count`` slots; 0 empties it."""

    @abstractmethod
    def slot_mask(self, class_ids: Tensor, mask: Mask) -> Tensor | None:
        """Return which slots classes ``[T, N]`` of a training batch must not address.

        Boolean ``[T, N, A]`` or None: no slot, the class's ``own``, or all of its ``task``.
        """

    def normalize(self, features: Tensor) -> Tensor:
        """Normalize features ``[..., D]`` as this memory needs them; slots do not."""
        return features

    def project(self, features: Tensor) -> Tensor:
        """Map features ``[..., D]`` to the coordinates in which prototypes are inferred."""
        return features

    @property
    def rejection_slots(self) -> Tensor | None:
        """Slots ``[A, D]`` whose distances count for "none of these"; None where there are none."""
        return None

    @property
    def statistics(self) -> "GaussianMemory | None":
        """The class statistics, if this memory holds them; else None."""
        return None


@dataclass(frozen=True)
class ClassMemory(Memory):
    """A memory with one slot per class; A slots, in the order in which classes were first met."""

    content: Annotated[Tensor, "float A D"]  # M
    class_ids: Annotated[Tensor, "int A"]  # the class of each slot
    counts: Annotated[Tensor, "int A"]  # samples that went into each slot
    last_update: Annotated[Tensor, "int A"]  # the step of each slot's latest change

    def check(self, width: int | None = None) -> None:
        """See :class:`vsm.Memory`."""
        super().check(width)
        if (self.counts < 0).any():
            raise ValueError("its counts are negative")
        if len(self.class_ids.unique()) < len(self):
            raise ValueError("two of its slots are of one class")

    def __len__(self) -> int:
        return self.content.shape[0]

    @property
    def slot_classes(self) -> list[int]:
        """See :class:`vsm.Memory`."""
        classes: list[int] = self.class_ids.tolist()
        return classes

    @abstractmethod
    def keep(self, slots: Tensor) -> Self:
        """Return the memory of these slots: int64 ``[A']``."""

    @abstractmethod
    def merge(self, other: Self, class_ids: Tensor) -> Self:
        """Return both as one; ``class_ids [A']`` are what the other's classes are called here.

        Slots that are equal in both are the same evidence and count once.
        """

    @property
    def coordinates(self) -> Tensor:
        """The slots in the coordinates of ``project`` ``[A, D]``."""
        return self.content

    @property
    def can_be_forgotten(self) -> Tensor:
        """Of which classes nothing is left once their slot is removed: boolean ``[A]``."""
        return torch.ones(len(self), dtype=torch.bool)

    def find(self, class_ids: Tensor) -> Tensor:
        """The slot of each of ``class_ids [C]``, or -1: ``[C]``."""
        places = {one: slot for slot, one in enumerate(self.slot_classes)}
        return torch.tensor([places.get(one, -1) for one in class_ids.tolist()], dtype=torch.int64)

    def same_evidence(self, other: Self, slots: Tensor) -> Tensor:
        """Which slots of ``other`` equal those at ``slots [A']`` here, where not -1: ``[A']``."""
        same = slots >= 0
        here, there = slots[same], same.clone()
        same[there] = (self.counts[here] == other.counts[there]) & (
            self.content[here] == other.content[there]
        ).all(-1)
        return same

    def slot_mask(self, class_ids: Tensor, mask: Mask) -> Tensor | None:
        """See :class:`vsm.Memory`."""
        if mask == "none":
            return None
        own = class_ids.unsqueeze(-1) == self.class_ids  # [T, N, A]
        return own if mask == "own" else own.any(1, keepdim=True).expand_as(own)


@dataclass(frozen=True)
class SlotMemory(ClassMemory):
    """The paper's memory: the content of a slot is what recall addresses and transforms."""

    @staticmethod
    def empty(num_features: int) -> "SlotMemory":
        """Return a memory without slots."""
        none = torch.zeros(0, dtype=torch.int64)
        return SlotMemory(torch.zeros(0, num_features), none, none, none)

    def keep(self, slots: Tensor) -> "SlotMemory":
        """See :class:`vsm.memory.state.ClassMemory`."""
        return SlotMemory(*(value.index_select(0, slots) for value in self.tensors().values()))

    def first(self, count: int) -> "SlotMemory":
        """See :class:`vsm.Memory`."""
        return self.keep(torch.arange(min(count, len(self)), device=self.class_ids.device))

    def merge(self, other: "SlotMemory", class_ids: Tensor) -> "SlotMemory":
        """See ``ClassMemory``; a class of both becomes the mean weighted by counts."""
        own = self.find(class_ids)
        known = ((own >= 0) & ~self.same_evidence(other, own)).nonzero().flatten()
        slots = own[known]
        content, _, counts, last_update = (value.clone() for value in self.tensors().values())
        counts[slots] += other.counts[known]
        weight = (other.counts[known] / counts[slots]).unsqueeze(-1)
        content[slots] = torch.lerp(content[slots], other.content[known], weight)
        last_update[slots] = torch.maximum(last_update[slots], other.last_update[known])
        new = (own < 0).nonzero().flatten()
        return SlotMemory(
            torch.cat([content, other.content[new]]),
            torch.cat([self.class_ids, class_ids[new]]),
            torch.cat([counts, other.counts[new]]),
            torch.cat([last_update, other.last_update[new]]),
        )

    @property
    def rejection_slots(self) -> Tensor | None:
        """See :class:`vsm.Memory`."""
        return self.content if len(self) else None
