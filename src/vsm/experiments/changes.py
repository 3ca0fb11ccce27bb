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
    """Return ``settings`` with the values that dotted names give.

    Raises:
        UnknownSettingError: if this version has no such setting.
    """
    for name, value in changes.items():
        settings = _with_change(settings, name.split("."), value, name)
    return settings


def _with_change(settings: Any, path: list[str], value: Any, name: str) -> Any:
    known = [one.name for one in fields(settings)] if is_dataclass(settings) else []
    if path[0] not in known:
        raise UnknownSettingError(f"setting {name}")
    if len(path) > 1:
        value = _with_change(getattr(settings, path[0]), path[1:], value, name)
    return replace(settings, **{path[0]: value})
