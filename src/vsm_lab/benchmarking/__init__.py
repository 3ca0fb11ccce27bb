"""Speed benchmarks: training steps, evaluation, memory and classifier beside reference code.

Benchmarks run in separate processes (:mod:`.processes`), because the allocator is configured per
process. They alternate and never run at the same time; ratios are taken pair by pair.
"""
