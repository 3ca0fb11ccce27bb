"""Measuring: episodes and their outcomes, statistics, calibration, rejection, comparisons."""
