"""Measuring speed: what a step, an evaluation and a memory cost, beside reference code.

Works are timed in separate processes (:mod:`vsm.benchmarking.processes`), because the allocator is
set per process. They take turns, never run at once, and ratios are taken pair by pair.
"""
