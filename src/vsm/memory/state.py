"""What a memory holds, as immutable values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

Mask = Literal["none", "own", "task"]


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
class Memory(ABC):
    """The contract of what is remembered in the long term: a record whose fields are tensors.

    The fields are all there is, so that a memory can be stored by their names and made again from
    them.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Return every field by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device) -> Self:
        """Return the same memory on ``device``."""
        return type(self)(**{name: value.to(device) for name, value in self.tensors().items()})

    def detach(self) -> Self:
        """Return the same memory outside any graph."""
        return type(self)(**{name: value.detach() for name, value in self.tensors().items()})

    @abstractmethod
    def check(self, width: int | None = None) -> None:
        """Raise a ``ValueError`` if shapes do not belong together, as in a damaged file.

        Args:
            width: of the features that it must be of, D; None: of any.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Slots that hold something."""

    @property
    @abstractmethod
    def slot_classes(self) -> list[int]:
        """The class of each slot; empty where slots do not stand for classes."""

    @abstractmethod
    def first(self, count: int) -> Self:
        """Return the memory of the first ``count`` slots alone; 0 empties it."""

    @abstractmethod
    def slot_mask(self, class_ids: Tensor, mask: Mask) -> Tensor | None:
        """Tell which slots each class of a training batch must not address.

        Args:
            class_ids: ``[T, N]``, the classes of the batch.
            mask: ``none``, the class's ``own`` slot, or the slots of all classes of its ``task``.

        Returns:
            Boolean ``[T, N, A]``, true where masked; None where no slot is.
        """


@dataclass(frozen=True)
class SlotMemory(Memory):
    """One slot per class; A slots in all, in the order in which their classes were first met.

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
    def empty(num_features: int) -> "SlotMemory":
        """Return a memory without slots."""
        none = torch.zeros(0, dtype=torch.int64)
        return SlotMemory(torch.zeros(0, num_features), none, none, none)

    def check(self, width: int | None = None) -> None:
        """See :class:`Memory`."""
        require_shapes(self.tensors(), {"content": ("A", "D")}, torch.is_floating_point, D=width)
        slots = dict.fromkeys(("class_ids", "counts", "last_update"), ("A",))
        require_shapes(self.tensors(), slots, is_integer, A=len(self))
        if (self.counts < 0).any():
            raise ValueError("its counts are negative")
        if len(self.class_ids.unique()) < len(self):
            raise ValueError("two of its slots are of one class")

    def __len__(self) -> int:
        return self.content.shape[0]

    @property
    def slot_classes(self) -> list[int]:
        """See :class:`Memory`."""
        classes: list[int] = self.class_ids.tolist()
        return classes

    def keep(self, slots: Tensor) -> "SlotMemory":
        """Return the memory of these slots alone: int64 ``[A']``."""
        return SlotMemory(
            self.content.index_select(0, slots),
            self.class_ids[slots],
            self.counts[slots],
            self.last_update[slots],
        )

    def first(self, count: int) -> "SlotMemory":
        """See :class:`Memory`."""
        return self.keep(torch.arange(min(count, len(self)), device=self.class_ids.device))

    def slot_mask(self, class_ids: Tensor, mask: Mask) -> Tensor | None:
        """See :class:`Memory`."""
        if mask == "none":
            return None
        own = class_ids.unsqueeze(-1) == self.class_ids  # [T, N, A]
        return own if mask == "own" else own.any(1, keepdim=True).expand_as(own)


def require_shapes(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[str, ...]],
    is_kind: Callable[[Tensor], bool],
    **sizes: int | None,
) -> None:
    """Raise a ``ValueError`` unless tensors have these shapes; equal letters are equal sizes."""
    known = {letter: size for letter, size in sizes.items() if size is not None}
    for name, letters in shapes.items():
        tensor = tensors[name]
        fits = tensor.ndim == len(letters) and all(
            known.setdefault(letter, size) == size
            for letter, size in zip(letters, tensor.shape, strict=True)
        )
        if not fits or not is_kind(tensor):
            expected = ", ".join(str(known.get(letter, letter)) for letter in letters)
            raise ValueError(
                f"its {name} is {tensor.dtype} {list(tensor.shape)}, expected [{expected}]"
            )


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor holds what counts and positions are."""
    return tensor.dtype == torch.int64
