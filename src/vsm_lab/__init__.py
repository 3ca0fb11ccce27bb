"""The lab: studies, the paper's tables, benchmarks and shipping, on top of :mod:`vsm`."""
