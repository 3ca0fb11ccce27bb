"""Memories: state, addressing, recall and consolidation.

This package knows probability, and nothing of images or backbones. Reading never writes: recall is
handed a :class:`Memory` and returns a :class:`Recollection`; only a :class:`Consolidation` makes a
new memory out of an old one. :data:`MEMORIES` says which method has which.
"""

from vsm.memory.consolidation import Consolidation, MeanConsolidation, SlotConsolidation
from vsm.memory.designs import MEMORIES, MemoryDesign
from vsm.memory.gaussian import (
    ClassStatistics,
    GaussianConsolidation,
    GaussianMemory,
    Reading,
)
from vsm.memory.gaussian_reader import GaussianPrototypes, GaussianReader
from vsm.memory.recall import MemoryPrior, PreparedMemory, Recall, Recollection, SupportSet
from vsm.memory.state import Memory, Observations, SlotMemory

__all__ = [
    "MEMORIES",
    "ClassStatistics",
    "Consolidation",
    "GaussianConsolidation",
    "GaussianMemory",
    "GaussianPrototypes",
    "GaussianReader",
    "MeanConsolidation",
    "Memory",
    "MemoryDesign",
    "MemoryPrior",
    "Observations",
    "PreparedMemory",
    "Reading",
    "Recall",
    "Recollection",
    "SlotConsolidation",
    "SlotMemory",
    "SupportSet",
]
