"""Run directories and trained models on disk.

Nothing is imported here: ``configuration`` and ``directory`` do without torch, so that the command
line answers at once.
"""
