"""The format of a memory in runs, checkpoints, saved classifiers and stores.

A file holds the tensors of a memory, and as metadata the class name of every slot, the encoder
whose features they are, and the provenance. A store holds the same tensors as one row per class,
so that a class can be added or forgotten without writing the others again.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from vsm.errors import RunError, StoreError
from vsm.memory.named import EncoderIdentity, NamedMemory
from vsm.memory.slots.kanerva import KanervaMemory
from vsm.memory.state import ClassMemory, Memory, SlotMemory
from vsm.memory.statistics import GaussianMemory
from vsm.system.documents import shortened

CLASS_MEMORIES: dict[str, type[ClassMemory]] = {
    kind.__name__: kind for kind in (SlotMemory, GaussianMemory)
}
MEMORIES: list[type[Memory]] = [*CLASS_MEMORIES.values(), KanervaMemory]
KINDS = {frozenset(field.name for field in fields(kind)): kind for kind in MEMORIES}
"""The kind of memory that has tensors of these names."""
NO_MEMORY = "none"


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


class ClassRow(NamedTuple):
    """One class: ``content`` and ``factors`` are the bytes of its mean and its scatter factors."""

    name: str
    class_id: int
    images: int
    last_update: int
    freedom: int
    content: bytes
    factors: bytes

    def mean(self, dtype: str) -> npt.NDArray[np.float32]:
        """Return the mean in single precision, to be searched by."""
        return np.frombuffer(self.content, dtype).astype(np.float32)


class Head(NamedTuple):
    """What all classes share: how many numbers a mean has and of which type, and other tensors."""

    kind: str
    method: str
    step: int
    dtype: str
    width: int
    shared: bytes


def encode_head(named: NamedMemory | None) -> Head:
    """Return what all classes of a memory share, or say that it cannot be stored."""
    if named is None:
        return Head(NO_MEMORY, "", 0, "float32", 0, b"")
    memory = named.memory
    if not isinstance(memory, ClassMemory):
        raise StoreError(
            f"memory: slots of the method {named.method} do not stand for classes, so a store "
            "cannot hold them; use a model with class statistics, as vsm memory learn makes them"
        )
    tensors = memory.tensors()
    shared = {name: tensors[name].contiguous() for name in memory.SHARED}
    dtype, width = str(memory.content.dtype).removeprefix("torch."), memory.content.shape[1]
    stored = safetensors.torch.save(shared) if shared else b""
    return Head(type(memory).__name__, named.method, named.step, dtype, width, stored)


def encode_rows(named: NamedMemory | None) -> dict[str, ClassRow]:
    """Return the rows of all classes by name, in the order of their slots."""
    if named is None:
        return {}
    memory = named.slots
    content = memory.content.cpu().contiguous().numpy()
    freedom, factors = [0] * len(memory), [b""] * len(memory)
    if memory.statistics is not None:
        freedom = memory.statistics.freedom.tolist()
        parts = memory.statistics.factors.split(memory.statistics.factor_rows.tolist())
        factors = [part.contiguous().numpy().tobytes() for part in parts]
    columns = zip(
        named.names,
        memory.class_ids.tolist(),
        memory.counts.tolist(),
        memory.last_update.tolist(),
        freedom,
        (mean.tobytes() for mean in content),
        factors,
        strict=True,
    )
    return {row.name: row for row in map(ClassRow._make, columns)}


def decode_rows(
    head: Head,
    encoder: EncoderIdentity,
    rows: Sequence[ClassRow],
    provenance: Sequence[Mapping[str, Any]],
) -> NamedMemory | None:
    """Make a memory of the rows of its classes; None if there was none."""
    if head.kind == NO_MEMORY:
        return None
    tensors = {
        "content": _stack([row.content for row in rows], head),
        "class_ids": _integers(row.class_id for row in rows),
        "counts": _integers(row.images for row in rows),
        "last_update": _integers(row.last_update for row in rows),
    }
    if CLASS_MEMORIES[head.kind].SHARED:
        size = head.width * np.dtype(head.dtype).itemsize
        tensors |= {
            **{name: t.clone() for name, t in safetensors.torch.load(head.shared).items()},
            "factors": _stack([row.factors for row in rows], head),
            "factor_rows": _integers(len(row.factors) // size for row in rows),
            "freedom": _integers(row.freedom for row in rows),
        }
    memory = decode_tensors(tensors, head.width)
    names = tuple(row.name for row in rows)
    return NamedMemory(memory, names, encoder, tuple(map(dict, provenance)), head.method, head.step)


def memory_digest(named: NamedMemory | None) -> str:
    """Return a SHA-256 of all that is stored of a memory, whatever the order of its classes."""
    values: list[Any] = [*encode_head(named)]
    if named is not None:
        values += [*named.encoder, *map(event_text, named.provenance)]
        values += [value for _, row in sorted(encode_rows(named).items()) for value in row]
    return digest_values(values)


def digest_values(values: Iterable[Any]) -> str:
    """Return a SHA-256 of texts, numbers and bytes."""
    digest = hashlib.sha256()
    for value in values:
        part = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        digest.update(b"%d " % len(part))
        digest.update(part)
    return digest.hexdigest()


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event of the provenance as it is stored."""
    return json.dumps(event, ensure_ascii=False)


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _stack(parts: Sequence[bytes], head: Head) -> Tensor:
    flat = np.frombuffer(b"".join(parts), head.dtype).reshape(-1, head.width)
    return torch.from_numpy(flat.copy())
