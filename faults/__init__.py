"""The fault and abuse campaign: ``python -m faults``, or ``make faults``.

Every part tries something that goes wrong outside of the program (damaged files, kills, full
disks, several processes at once, strange requests) and judges what the program does about it by
oracles that know nothing of how it works. Cases are drawn from a seed by generators, so that more
of them can always be tried, and any one of them again.
"""
