"""Measuring: episodes and their outcomes, intervals, calibration, how memories are read."""
