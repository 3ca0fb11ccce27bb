"""Settings to and from YAML, with unknown keys and bad values named."""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import jsonargparse
import yaml

from vsm.errors import DocumentError, SettingsError
from vsm.settings import (
    PretrainSettings,
    RunSettings,
    effective_settings,
    effective_values,
    flatten_parts,
)
from vsm.system.files import read_mapping, shortened, with_digest_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnySettings = TypeVar("AnySettings", RunSettings, PretrainSettings)
AnyDataclass = TypeVar("AnyDataclass", bound="DataclassInstance")

PRESETS = Path(__file__).parents[1] / "presets"
PRETRAINING_PRESETS = PRESETS / "pretraining"


def preset_names(folder: Path = PRESETS) -> str:
    """Return the names of the shipped presets as one text."""
    return ", ".join(sorted(preset.stem for preset in folder.glob("*.yaml")))


def preset_paths(name: str, folder: Path = PRESETS) -> list[Path]:
    """Return the files of a shipped preset; those of ``paper-…`` add to what ``paper`` sets."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise SettingsError(f"preset: unknown preset {name!r}; known: {preset_names(folder)}")
    return [folder / "paper.yaml", path] if name.startswith("paper-") else [path]


def settings_to_yaml(settings: RunSettings | PretrainSettings) -> str:
    """Return the settings that have an effect as YAML, and a digest of that."""
    values: dict[str, Any] = {}
    for dotted, value in effective_values(settings).items():
        section, _, name = dotted.rpartition(".")
        part = values.setdefault(section, {}) if section else values
        part[name] = value
    return with_digest_line(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def read_settings(kind: type[AnyDataclass], *paths: Path) -> AnyDataclass:
    """Read settings of one kind from YAML files; later files override earlier ones.

    What has no effect is ignored, since presets serve several methods.
    """
    parsed = None
    for path in paths:
        parsed = _parsed(kind, read_sections(kind, path), path, parsed)
    assert parsed is not None
    return effective_settings(kind, flat_values(kind, parsed))


def read_sections(kind: type, path: Path, verify: bool = True) -> dict[str, Any]:
    """Read a YAML file of settings as it is, where the sections of ``kind`` are mappings.

    The parser would take a text in place of one for the name of a file, and open that.
    """
    try:
        values = read_mapping(path, verify)
    except DocumentError as error:
        raise SettingsError(str(error)) from error
    return require_sections(kind, values, path)


def require_sections(kind: type, values: Any, source: Path) -> dict[str, Any]:
    """Refuse values that are not mappings where settings have sections; leave out null values."""
    if not isinstance(values, dict):
        raise SettingsError(f"{source}: expected a mapping of settings, got {_shown(values)}")
    types, given = get_type_hints(kind), {}
    for name, value in values.items():
        if not isinstance(name, str) or name.startswith("__"):
            raise SettingsError(f"{source}: expected names of settings, got {_shown(name)}")
        if dataclasses.is_dataclass(types.get(name)):
            if not isinstance(value, dict):
                raise SettingsError(
                    f"{source}: {name} has settings of its own, as in '{name}: {{…}}', got "
                    f"{_shown(value)}"
                )
            given[name] = require_sections(types[name], value, source)
        elif value is not None:
            given[name] = value
    return given


def _parsed(
    kind: type, values: Any, source: Path, base: jsonargparse.Namespace | None = None
) -> jsonargparse.Namespace:
    """Check values, and return them over ``base``."""
    try:
        parsed: jsonargparse.Namespace = _reader(kind).parse_object(values, base)
    except (argparse.ArgumentError, jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise SettingsError(f"{source}: {shortened(error)}") from error
    return parsed


def _shown(value: object) -> str:
    return shortened(repr(value), 60)


@functools.cache
def _reader(kind: type) -> jsonargparse.ArgumentParser:
    """Return the parser of one kind of settings; making it takes longer than reading with it."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    return parser


def check_settings(kind: type[AnyDataclass], values: Any, source: Path) -> AnyDataclass:
    """Check the nested plain values of settings of one kind, as stored in ``source``."""
    parsed = _parsed(kind, require_sections(kind, values, source), source)
    return effective_settings(kind, flat_values(kind, parsed))


def flat_values(kind: type, parsed: jsonargparse.Namespace) -> dict[str, Any]:
    """Return the values of a parsed namespace by dotted names, checking every section."""
    values, types = parsed.as_dict(), get_type_hints(kind)
    parts = {
        field.name: types[field.name](**values[field.name])
        if dataclasses.is_dataclass(types[field.name])
        else values[field.name]
        for field in dataclasses.fields(kind)
    }
    return flatten_parts(parts)
