"""The format of a memory in runs, checkpoints, saved classifiers and stores.

All of them hold the tensors of a memory, and as metadata the class name of every slot, the encoder
whose features they are, and the provenance.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsm.encoders import EncoderIdentity
from vsm.errors import RunError
from vsm.memory.named import NamedMemory
from vsm.memory.slots.kanerva import KanervaMemory
from vsm.memory.state import Memory, SlotMemory
from vsm.memory.statistics import GaussianMemory
from vsm.system.documents import shortened

MEMORIES: tuple[type[Memory], ...] = (SlotMemory, GaussianMemory, KanervaMemory)
KINDS = {frozenset(field.name for field in fields(kind)): kind for kind in MEMORIES}
"""The kind of memory that has tensors of these names."""


def decode_tensors(tensors: Mapping[str, Tensor], width: int | None = None) -> Memory:
    """Make a memory of its tensors; raise a ``ValueError`` if they do not belong together.

    ``width`` is the expected number of features; None: any.
    """
    kind = KINDS.get(frozenset(tensors))
    if kind is None:
        raise ValueError(f"no memory has the tensors {', '.join(sorted(tensors)) or 'none'}")
    single = {name: t.float() if t.dtype == torch.float16 else t for name, t in tensors.items()}
    memory = kind(**single)
    memory.check(width)
    return memory


def decode_memory(tensors: Mapping[str, Tensor], metadata: Any, source: Path) -> NamedMemory:
    """Make a named memory of its tensors and :meth:`NamedMemory.metadata`."""
    try:
        memory = decode_tensors(tensors)
        names, encoder = tuple(metadata["class_names"]), EncoderIdentity.stored(metadata["encoder"])
        provenance = _checked_provenance(metadata["provenance"])
        method, step = metadata["method"], metadata["step"]
        if not all(isinstance(name, str) for name in (*names, method)) or type(step) is not int:
            raise TypeError("class_names and method must be strings, and step an integer")
        if len(set(names)) < len(names):
            raise ValueError("two slots have the same name")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = shortened(repr(error) if isinstance(error, KeyError) else error)
        raise RunError(f"memory: {source} does not hold a memory ({reason})") from error
    if len(names) != len(memory.slot_classes):
        raise RunError(f"memory: {source} has {len(memory)} slots but {len(names)} names")
    return NamedMemory(memory, names, encoder, provenance, method, step)


def _checked_provenance(events: Any) -> tuple[dict[str, Any], ...]:
    """Return the provenance, if each event has what :attr:`NamedMemory.added` reads."""
    for event in events:
        if event["action"] == "added" and not all(isinstance(name, str) for name in event["new"]):
            raise TypeError("names of added classes must be strings")
        if event["action"] == "merged":
            _checked_provenance(event["with"])
    return tuple(events)
