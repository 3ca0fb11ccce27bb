"""Memories, and how they are read and written.

Class statistics (:class:`GaussianMemory`) and the paper's slots (:class:`SlotMemory`, package
``slots``) are read through one interface: inference returns a :class:`Posterior`. Reading never
writes; only a :class:`Consolidation` makes a new memory out of an old one.
"""

from vsm.memory.gaussian import ClassStatistics, GaussianConsolidation, GaussianMemory, ReadSettings
from vsm.memory.posterior import Posterior, SampledPosterior
from vsm.memory.reader import GaussianPosterior, GaussianReader
from vsm.memory.slots.consolidation import Consolidation, SlotConsolidation
from vsm.memory.slots.kanerva import KanervaRecall
from vsm.memory.slots.mann import MannRecall
from vsm.memory.slots.recall import (
    Recall,
    Recollection,
    RoteRecall,
    TransformedRecall,
    VariationalRecall,
)
from vsm.memory.state import Memory, Observations, SlotMemory, SupportSet
from vsm.memory.transduction import Assigned, Transduction, transduce
from vsm.settings import Method

MEMORIES: dict[Method, type[Recall]] = {
    "rote": RoteRecall,
    "transformed": TransformedRecall,
    "vsm": VariationalRecall,
    "mann": MannRecall,
    "kanerva": KanervaRecall,
}

__all__ = [
    "MEMORIES",
    "Assigned",
    "ClassStatistics",
    "Consolidation",
    "GaussianConsolidation",
    "GaussianMemory",
    "GaussianPosterior",
    "GaussianReader",
    "Memory",
    "Observations",
    "Posterior",
    "ReadSettings",
    "Recall",
    "Recollection",
    "SampledPosterior",
    "SlotConsolidation",
    "SlotMemory",
    "SupportSet",
    "Transduction",
    "transduce",
]
