"""Colors of plots."""

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""A palette that people with color blindness can tell apart."""
QUIET = "#bbbbbb"
