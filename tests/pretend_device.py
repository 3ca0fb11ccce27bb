"""A device that is not there: tensors that claim to be elsewhere and compute on the CPU.

No GPU is needed to see whether code keeps its tensors together: an operation that mixes the
pretended device with the CPU is refused, as a GPU would, and all others give the CPU's numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

PRETENDED = torch.device("meta", 0)  # the one device that torch accepts without having it
MAY_MIX = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Elsewhere(Tensor):
    """A tensor that claims to be on ``PRETENDED``."""

    held: Tensor
    is_meta = False  # it holds numbers, whatever its device says

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=PRETENDED,
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        return compute(operation, arguments, named or {})


class _Creation(TorchDispatchMode):
    """Lets ``torch.zeros(..., device=PRETENDED)`` and the like make tensors that hold numbers."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        return compute(operation, arguments, named or {})


def compute(operation: Callable[..., Any], arguments: Any, named: dict[str, Any]) -> Any:
    """Do ``operation`` on the CPU; its result is where its arguments are, or where it is sent."""
    tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
    elsewhere = [one for one in tensors if isinstance(one, Elsewhere)]
    here = [one for one in tensors if one.ndim and not isinstance(one, Elsewhere)]
    if elsewhere and here and operation not in MAY_MIX:
        raise RuntimeError(f"{operation}: tensors are on two devices")
    target = named.get("device")
    goes_elsewhere = bool(elsewhere) if target is None else target.type == PRETENDED.type
    if target is not None:
        named = {**named, "device": torch.device("cpu")}
    known = {id(one.held): one for one in elsewhere}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or not goes_elsewhere:
            return value
        return known[id(value)] if id(value) in known else Elsewhere(value)

    result = operation(*tree_map(_held, arguments), **tree_map(_held, named))
    return tree_map(wrapped, result)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """Make the device usable inside the block."""
    with _Creation():  # type: ignore[no-untyped-call]
        yield PRETENDED
