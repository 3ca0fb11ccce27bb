"""A page of pictures about trained runs. This room sits on top and contains no mathematics."""

from vsm.report.page import write_report

__all__ = ["write_report"]
