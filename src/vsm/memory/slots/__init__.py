"""The paper's memory of slots, and two others: addressing, recall and consolidation."""
