"""Speed benchmarks: training steps, evaluation, memory, classifier and server.

A benchmark is a function of :mod:`.benchmarks` or :mod:`.reference` that sets something up and
returns the code to be timed. :mod:`.suite` lists which are compared, with which arguments. They run
alternately in separate processes (:mod:`.processes`), never at the same time, because the allocator
is configured per process; ratios are taken pair by pair.
"""
