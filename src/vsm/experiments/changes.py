"""Settings with some values changed by their dotted names."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from vsm.errors import SettingsError
from vsm.settings import RunSettings

Changes = Mapping[str, Any]
"""Dotted names of settings and their values, e.g. ``{"memory.update": "mean"}``."""


class UnknownSettingError(SettingsError):
    """This version has no such setting."""


def with_changes(settings: RunSettings, changes: Changes) -> RunSettings:
    """Return ``settings`` with the values that dotted names give, checked when all are in place.

    Raises:
        UnknownSettingError: if this version has no such setting.
    """
    changed: RunSettings = _changed(settings, changes, "")
    return changed


def _changed(settings: Any, changes: Changes, prefix: str) -> Any:
    known = [one.name for one in fields(settings)] if is_dataclass(settings) else []
    parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if first not in known:
            raise UnknownSettingError(f"setting {prefix}{name}")
        parts.setdefault(first, {})[rest] = value
    values = {
        name: part[""]
        if "" in part
        else _changed(getattr(settings, name), part, f"{prefix}{name}.")
        for name, part in parts.items()
    }
    return replace(settings, **values)
