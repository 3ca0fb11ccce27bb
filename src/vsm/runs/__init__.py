"""Run directories and trained models on disk.

Nothing is imported here: ``configuration``, ``directory`` and ``shipped`` do without torch, so that
the command line answers at once.
"""
