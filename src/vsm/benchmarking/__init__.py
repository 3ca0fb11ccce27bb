"""Measuring speed: what a step, an evaluation and a memory cost, beside bare and peer-style code.

Works are timed in processes of their own (:mod:`vsm.benchmarking.processes`), because the allocator
is set for a whole process. They take turns, never run at once, and ratios are taken pair by pair.
"""
