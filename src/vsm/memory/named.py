"""A memory with its class names, encoder and provenance; changes return a new one.

Runs, checkpoints, saved classifiers and stores hold its tensors, and its metadata as JSON.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.encoders import EncoderIdentity
from vsm.errors import MemoryFileError, RunError
from vsm.memory.gaussian import GaussianMemory
from vsm.memory.slots.consolidation import Consolidation, MeanConsolidation, SlotConsolidation
from vsm.memory.slots.kanerva import KanervaMemory
from vsm.memory.state import ClassMemory, Memory, Observations, SlotMemory
from vsm.settings import MemorySettings, RunSettings
from vsm.system.files import as_cell, atomic_path, shortened, write_text
from vsm.system.tensor_files import save_tensors

KINDS: dict[frozenset[str], type[Memory]] = {
    frozenset(field.name for field in fields(kind)): kind
    for kind in (SlotMemory, GaussianMemory, KanervaMemory)
}
"""The kind of memory that has tensors of these names."""


class Changes(NamedTuple):
    """Names of classes that got a slot, had one already, or were dropped for lack of capacity."""

    added: tuple[str, ...]
    updated: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class NamedMemory:
    """A memory and what is needed to use it.

    Attributes:
        memory: read-only.
        names: the class of each slot; empty where slots do not stand for classes.
        encoder: whose features it holds.
        provenance: its history, oldest event first; each has ``action``.
        method: that reads and writes it.
        step: the training step it was saved at.
    """

    memory: Memory
    names: tuple[str, ...]
    encoder: EncoderIdentity
    provenance: tuple[dict[str, Any], ...]
    method: str
    step: int = 0

    def metadata(self) -> dict[str, Any]:
        """Return everything but the tensors, ready for JSON."""
        return {
            "method": self.method,
            "step": self.step,
            "class_names": list(self.names),
            "encoder": self.encoder._asdict(),
            "provenance": list(self.provenance),
        }

    def to(self, device: torch.device) -> "NamedMemory":
        """Move to ``device``."""
        return replace(self, memory=self.memory.to(device))

    def write(self, path: Path) -> None:
        """Write a memory file atomically; ``decode_memory`` reads it."""
        save_tensors(path, self.memory.tensors(), self.metadata())

    def require_encoder(self, wanted: EncoderIdentity, source: object = "memory") -> None:
        """Refuse to be used with the features of another encoder."""
        if self.encoder.fingerprint != wanted.fingerprint:
            raise MemoryFileError(
                f"{source}: holds features of the encoder {self.encoder}, but they are to be used "
                f"with those of {wanted}; use the memory of one encoder with that encoder alone"
            )

    @cached_property
    def places(self) -> dict[str, int]:
        """The slot of each class."""
        return {name: slot for slot, name in enumerate(self.names)}

    @cached_property
    def added(self) -> frozenset[str]:
        """Names of classes that a user added, in contrast to those of training."""
        return frozenset(_added(self.provenance)).intersection(self.names)

    @property
    def slots(self) -> ClassMemory:
        """The memory, where it has one slot per class; else an error."""
        if not isinstance(self.memory, ClassMemory):
            raise MemoryFileError(
                f"memory: slots of the method {self.method} do not stand for classes; "
                "this needs a memory of rote, transformed or vsm"
            )
        return self.memory

    def add(
        self,
        consolidation: Consolidation,
        features: Tensor,
        labels: Sequence[str],
        source: dict[str, Any],
    ) -> tuple["NamedMemory", Changes]:
        """Add features ``[P, D]`` of P labels; return the new memory, and what changed.

        Known classes are updated, others are appended; ``source`` is added to the provenance.
        """
        if not len(features):
            return self, Changes((), (), ())
        known = dict(zip(self.names, self.memory.slot_classes, strict=True))
        ids = dict(known)
        for label in labels:
            ids.setdefault(label, 1 + max(ids.values(), default=-1))
        class_ids = torch.tensor([ids[label] for label in labels], device=features.device)
        step = self.step + 1
        if isinstance(self.memory, ClassMemory) and len(self.memory):
            step = int(self.memory.last_update.max()) + 1
        with torch.no_grad():
            memory = consolidation(self.memory, Observations(features, class_ids), step).detach()
        name_of = {class_id: name for name, class_id in ids.items()}
        names = tuple(name_of[class_id] for class_id in memory.slot_classes)
        given = list(dict.fromkeys(labels))
        kept = [label for label in given if label in names]
        changes = Changes(
            tuple(label for label in kept if label not in known),
            tuple(label for label in kept if label in known),
            tuple(name for name in ids if name not in names) if names else (),
        )
        event = {"action": "added", "classes": given, "images": len(labels), **source}
        event["new"] = list(changes.added)
        return self._after(memory, names, event), changes

    def forget(self, classes: Sequence[str]) -> "NamedMemory":
        """Return the memory without the slots of ``classes``, all of which must be there."""
        for name in classes:
            if name not in self.names:
                known = ", ".join(map(repr, self.names[:5])) or "none"
                known += f" and {len(self.names) - 5:,} more" * (len(self.names) > 5)
                raise MemoryFileError(
                    f"forget: there is no class {name!r} in the memory, only {known}"
                )
        kept = [slot for slot, name in enumerate(self.names) if name not in classes]
        device = self.slots.content.device
        memory = self.slots.keep(torch.tensor(kept, dtype=torch.int64, device=device))
        names = tuple(self.names[slot] for slot in kept)
        event: dict[str, Any] = {"action": "forgot", "classes": list(classes)}
        if memory.statistics is not None:
            exact = self.slots.can_be_forgotten.tolist()
            pairs = zip(self.names, exact, strict=True)
            event["scatter_stays"] = [name for name, yes in pairs if name in classes and not yes]
        return self._after(memory, names, event)

    def merge(self, other: "NamedMemory") -> "NamedMemory":
        """Return both memories as one; see :meth:`.ClassMemory.merge`."""
        other.require_encoder(self.encoder, "merge")
        first, second = self.slots, other.slots
        if type(first) is not type(second):
            raise MemoryFileError(
                "merge: one holds class statistics and the other does not; learn both with vsm "
                "memory learn"
            )
        ids = dict(zip(self.names, first.slot_classes, strict=True))
        new = [name for name in other.names if name not in ids]
        begin = 1 + max(first.slot_classes, default=-1)
        ids |= {name: begin + position for position, name in enumerate(new)}
        class_ids = torch.tensor([ids[name] for name in other.names], dtype=torch.int64)
        event = {"action": "merged", "slots": len(other.names), "with": list(other.provenance)}
        return self._after(first.merge(second, class_ids), (*self.names, *new), event)

    def describe(self, neighbors: int = 3) -> dict[str, Any]:
        """Describe the memory, ready for JSON: every slot with its nearest others."""
        slots, statistics = self.slots if self.names else None, self.memory.statistics
        choices = [event["choice"] for event in self.provenance if "choice" in event]
        return {
            "method": self.method,
            "encoder": self.encoder._asdict(),
            "num_slots": len(self.memory),
            "num_features": slots.content.shape[1] if slots else None,
            "reading": None if statistics is None else statistics.read_settings.as_dict(),
            "choice": choices[-1] if choices else None,
            "slots": _slot_rows(slots, self.names, neighbors) if slots else [],
            "provenance": list(self.provenance),
        }

    def export(self, path: Path) -> None:
        """Write content, names, counts and last updates as ``.npz`` or ``.csv``."""
        slots = self.slots
        if path.suffix == ".npz":
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                np.savez(
                    file,
                    content=slots.content.numpy(),
                    names=np.asarray(self.names, dtype=np.str_),
                    counts=slots.counts.numpy(),
                    last_update=slots.last_update.numpy(),
                )
        elif path.suffix == ".csv":
            text = io.StringIO()
            rows = csv.writer(text, lineterminator="\n")
            features = (f"feature_{d}" for d in range(slots.content.shape[1]))
            rows.writerow(["name", "count", "last_update", *features])
            known = zip(self.names, slots.counts.tolist(), slots.last_update.tolist(), strict=True)
            for (name, *one), content in zip(known, slots.content.tolist(), strict=True):
                rows.writerow([as_cell(name), *one, *map(repr, content)])
            write_text(path, text.getvalue())
        else:
            raise MemoryFileError(f"export: expected a file that ends in .npz or .csv, got {path}")

    def _after(
        self, memory: Memory, names: tuple[str, ...], event: dict[str, Any]
    ) -> "NamedMemory":
        event["at"] = datetime.now(UTC).isoformat(timespec="seconds")
        return replace(self, memory=memory, names=names, provenance=(*self.provenance, event))


def _added(provenance: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of all classes ever added, also to merged memories."""
    for event in provenance:
        if event["action"] == "added":
            yield from event["new"]
        elif event["action"] == "merged":
            yield from _added(event["with"])


def manual_consolidation(
    consolidation: Consolidation | None, settings: MemorySettings
) -> Consolidation | None:
    """Return what adds a user's images to a memory; None for methods without one.

    Slots of classes become plain means, since features do not change any more; other memories keep
    the model's ``consolidation``.
    """
    if isinstance(consolidation, SlotConsolidation):
        return MeanConsolidation(consolidation.num_features, settings)
    return consolidation


def trained_memory(
    settings: RunSettings,
    encoder: EncoderIdentity,
    memory: Memory,
    names: tuple[str, ...],
    step: int,
) -> NamedMemory:
    """Name the memory that training left at ``step``."""
    event = {"action": "trained", "data": settings.data, "step": step}
    return NamedMemory(memory, names, encoder, (event,), settings.method, step)


def _slot_rows(slots: ClassMemory, names: Sequence[str], neighbors: int) -> list[dict[str, Any]]:
    """Describe every slot and its nearest others, by the cosine relative to the mean of all."""
    directions = F.normalize(slots.content - slots.content.mean(0), dim=-1)
    cosines = (directions @ directions.mT).fill_diagonal_(-torch.inf)  # [A, A]
    best = cosines.topk(min(neighbors, len(names) - 1), dim=-1)
    columns = (slots.counts, slots.last_update, best.indices, best.values)
    rows = zip(names, *(column.tolist() for column in columns), strict=True)
    return [
        {
            "name": name,
            "count": count,
            "last_update": updated,
            "nearest": [
                {"name": names[other], "similarity": round(cosine, 4)}
                for other, cosine in zip(others, cosines, strict=True)
            ],
        }
        for name, count, updated, others, cosines in rows
    ]


def decode_tensors(tensors: Mapping[str, Tensor], width: int | None = None) -> Memory:
    """Make a memory of its tensors; a ``ValueError`` if they do not fit, or have another width."""
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
        provenance, method, step = (metadata[key] for key in ("provenance", "method", "step"))
        texts = (*names, method, *_added(provenance))
        if not all(isinstance(text, str) for text in texts) or type(step) is not int:
            raise TypeError("names of classes and method must be strings, and step an integer")
        if len(set(names)) < len(names):
            raise ValueError("two slots have the same name")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = shortened(repr(error) if isinstance(error, KeyError) else error)
        raise RunError(f"memory: {source} does not hold a memory ({reason})") from error
    if len(names) != len(memory.slot_classes):
        raise RunError(f"memory: {source} has {len(memory)} slots but {len(names)} names")
    return NamedMemory(memory, names, encoder, tuple(provenance), method, step)
