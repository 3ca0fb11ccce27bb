"""A named memory as rows of a table, and back, to the bit.

What belongs to one class is a row: counts, mean and scatter factors. What all classes share is one
safetensors blob, so that a class can be added or forgotten without writing the others again.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from vsm.errors import StoreError
from vsm.memory import GaussianMemory, SlotMemory
from vsm.memory.named import EncoderIdentity, NamedMemory
from vsm.stores.contract import Row

SHARED = ("center", "shared_scatter", "shared_freedom", "reading")
NO_MEMORY = "none"


class ClassRow(NamedTuple):
    """One class: ``content`` and ``factors`` are the bytes of its mean and its scatter factors."""

    name: str
    class_id: int
    images: int
    last_update: int
    freedom: int
    content: bytes
    factors: bytes

    def mean(self, dtype: str) -> Row:
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


def head_of(named: NamedMemory | None) -> Head:
    """Return what all classes of a memory share, or say that it cannot be stored."""
    if named is None:
        return Head(NO_MEMORY, "", 0, "float32", 0, b"")
    memory = named.memory
    if not isinstance(memory, SlotMemory):
        raise StoreError(
            f"memory: slots of the method {named.method} do not stand for classes, so a store "
            "cannot hold them; use a model with class statistics, as vsm memory learn makes them"
        )
    dtype = str(memory.content.dtype).removeprefix("torch.")
    shared = b""
    if isinstance(memory, GaussianMemory):
        tensors = memory.tensors()
        shared = safetensors.torch.save({name: tensors[name].contiguous() for name in SHARED})
    width = memory.content.shape[1]
    return Head(type(memory).__name__, named.method, named.step, dtype, width, shared)


def rows_of(named: NamedMemory | None) -> dict[str, ClassRow]:
    """Return the rows of all classes by name, in the order of their slots."""
    if named is None:
        return {}
    memory = named.slots
    content = memory.content.cpu().contiguous().numpy()
    freedom, factors = [0] * len(memory), [b""] * len(memory)
    if isinstance(memory, GaussianMemory):
        freedom = memory.freedom.tolist()
        parts = memory.factors.split(memory.factor_rows.tolist())
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


def memory_of(
    head: Head,
    encoder: EncoderIdentity,
    rows: Sequence[ClassRow],
    provenance: Sequence[Mapping[str, Any]],
) -> NamedMemory | None:
    """Make the memory again; None if there was none."""
    if head.kind == NO_MEMORY:
        return None
    fields = {
        "content": _stacked([row.content for row in rows], head),
        "class_ids": _integers(row.class_id for row in rows),
        "counts": _integers(row.images for row in rows),
        "last_update": _integers(row.last_update for row in rows),
    }
    memory: SlotMemory
    if head.kind == GaussianMemory.__name__:
        size = head.width * np.dtype(head.dtype).itemsize
        memory = GaussianMemory(
            **fields,
            **{name: t.clone() for name, t in safetensors.torch.load(head.shared).items()},
            factors=_stacked([row.factors for row in rows], head),
            factor_rows=_integers(len(row.factors) // size for row in rows),
            freedom=_integers(row.freedom for row in rows),
        )
    else:
        memory = SlotMemory(**fields)
    memory.check(head.width)
    names = tuple(row.name for row in rows)
    return NamedMemory(memory, names, encoder, tuple(map(dict, provenance)), head.method, head.step)


def digest_of(named: NamedMemory | None) -> str:
    """Return a SHA-256 of all that is stored of a memory, in whatever order its classes are."""
    values: list[Any] = [*head_of(named)]
    if named is not None:
        values += [*named.encoder, *map(event_text, named.provenance)]
        values += [value for _, row in sorted(rows_of(named).items()) for value in row]
    return _digest(values)


def example_digest(label: str, embedding: Row) -> str:
    """Return a SHA-256 of what answers depend on of an example."""
    return _digest([label, np.ascontiguousarray(embedding, np.float32).tobytes()])


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        part = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        digest.update(b"%d " % len(part))
        digest.update(part)
    return digest.hexdigest()


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event of the provenance as it is stored."""
    return json.dumps(event, ensure_ascii=False)


def _integers(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _stacked(parts: Sequence[bytes], head: Head) -> Tensor:
    flat = np.frombuffer(b"".join(parts), head.dtype).reshape(-1, head.width)
    return torch.from_numpy(flat.copy())
