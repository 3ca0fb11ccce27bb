"""Which method remembers how: one look-up."""

from collections.abc import Callable
from typing import NamedTuple

from vsm.memory.slots.consolidation import Consolidation, SlotConsolidation
from vsm.memory.slots.kanerva import KanervaConsolidation, KanervaRecall
from vsm.memory.slots.mann import MannRecall
from vsm.memory.slots.recall import Recall
from vsm.memory.slots.rote import RoteRecall, TransformedRecall
from vsm.memory.slots.variational import VariationalRecall
from vsm.settings import Method, RunSettings


class MemoryDesign(NamedTuple):
    """How a method reads its memory, and how it writes it."""

    recall: Recall
    consolidation: Consolidation | None  # None for a memory that is wiped between episodes


def _rote(width: int, run: RunSettings) -> MemoryDesign:
    recall = RoteRecall(width, run.memory, run.model)
    return MemoryDesign(recall, SlotConsolidation(width, run.memory))


def _transformed(width: int, run: RunSettings) -> MemoryDesign:
    recall = TransformedRecall(width, run.memory, run.model)
    return MemoryDesign(recall, SlotConsolidation(width, run.memory))


def _vsm(width: int, run: RunSettings) -> MemoryDesign:
    recall = VariationalRecall(width, run.memory, run.model, run.objective)
    return MemoryDesign(recall, SlotConsolidation(width, run.memory))


def _mann(width: int, run: RunSettings) -> MemoryDesign:
    return MemoryDesign(MannRecall(width, run.mann), None)


def _kanerva(width: int, run: RunSettings) -> MemoryDesign:
    recall = KanervaRecall(width, run.kanerva, run.model)
    return MemoryDesign(recall, KanervaConsolidation(recall.machine, run.kanerva.retention))


MEMORIES: dict[Method, Callable[[int, RunSettings], MemoryDesign]] = {
    "rote": _rote,
    "transformed": _transformed,
    "vsm": _vsm,
    "mann": _mann,
    "kanerva": _kanerva,
}
