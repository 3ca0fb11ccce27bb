"""Modules of the model: distributions, networks, batch norm over processes."""
