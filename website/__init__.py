"""Builds the documentation site out of ``docs``: `make docs`."""
