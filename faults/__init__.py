"""Fault injection: ``python -m faults``, or ``make faults``.

Each part injects faults from outside the program (damaged files, kills, full disks, concurrent
processes, malformed requests) and checks the result with oracles that do not depend on the
implementation. Cases are drawn from a seed, so that any of them can be repeated.
"""
