"""Settings with some values changed by their dotted names."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from vsm.errors import SettingsError
from vsm.runs.configuration import ReadSettings

Changes = Mapping[str, Any]
"""Dotted names of settings and their values, e.g. ``{"memory.update": "mean"}``."""


def with_changes(settings: ReadSettings, changes: Changes, prefix: str = "") -> ReadSettings:
    """Return ``settings`` with the values that dotted names give, checked when all are in place.

    Raises:
        SettingsError: if there is no such setting, or a value is not valid; ``prefix`` goes before
            its name.
    """
    known = [one.name for one in fields(settings)] if is_dataclass(settings) else []
    parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if first not in known:
            raise SettingsError(
                f"unknown setting {prefix}{name}; known there: {', '.join(known) or 'none'}"
            )
        parts.setdefault(first, {})[rest] = value
    values = {}
    for name, part in parts.items():
        nested = getattr(settings, name)
        values[name] = part[""] if "" in part else with_changes(nested, part, f"{prefix}{name}.")
    return replace(settings, **values)
