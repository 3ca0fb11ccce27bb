"""The long-term memory: state, addressing, recall and consolidation.

This room knows probability, and nothing of images or backbones. Reading never writes: recall is
handed a :class:`Memory` and returns a :class:`Recollection`; only :class:`Consolidation` makes a
new memory out of an old one.
"""

from vsm.memory.consolidation import Consolidation
from vsm.memory.recall import RECALLS, Recall, Recollection
from vsm.memory.state import Memory, Observations

__all__ = ["RECALLS", "Consolidation", "Memory", "Observations", "Recall", "Recollection"]
