"""Settings to and from YAML, with unknown keys and bad values named."""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import jsonargparse
import yaml

from vsm.errors import SettingsError
from vsm.settings import PretrainSettings, RunSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnySettings = TypeVar("AnySettings", RunSettings, PretrainSettings)
ReadSettings = TypeVar("ReadSettings", bound="DataclassInstance")

PRESETS = Path(__file__).parents[1] / "presets"


def preset_paths(name: str) -> list[Path]:
    """Return the files of a shipped preset, general before special, or say which there are.

    A preset ``paper-…`` is a cell of the paper's tables; it adds to what ``paper`` says of all.
    """
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(preset.stem for preset in PRESETS.glob("*.yaml")))
        raise SettingsError(f"preset: unknown preset {name!r}; known: {known}")
    return [PRESETS / "paper.yaml", path] if name.startswith("paper-") else [path]


def settings_to_yaml(settings: RunSettings | PretrainSettings) -> str:
    """Return the settings as YAML, in the order of their declaration."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False, allow_unicode=True)


def settings_from_files(*paths: Path) -> RunSettings:
    """Read the settings of a training run from YAML files; later files override earlier ones."""
    return read_settings(RunSettings, *paths)


def read_settings(kind: type[ReadSettings], *paths: Path) -> ReadSettings:
    """Read settings of one kind from YAML files; later files override earlier ones."""
    words = [part for path in paths for part in ("--config", str(path))]
    try:
        return instantiate(kind, _reader(kind).parse_args(words))
    except (argparse.ArgumentError, jsonargparse.ArgumentError) as error:
        raise SettingsError(f"{', '.join(map(str, paths))}: {error}") from error


@functools.cache
def _reader(kind: type) -> jsonargparse.ArgumentParser:
    """Return the parser of one kind of settings; making it takes longer than reading with it."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    parser.add_argument("--config", action="config")
    return parser


def check_settings(kind: type[ReadSettings], values: Any, source: Path) -> ReadSettings:
    """Check the nested plain values of settings of one kind, as stored in ``source``."""
    try:
        return instantiate(kind, _reader(kind).parse_object(values))
    except (argparse.ArgumentError, jsonargparse.ArgumentError, TypeError) as error:
        raise SettingsError(f"{source}: {error}") from error


def instantiate(kind: type[ReadSettings], parsed: jsonargparse.Namespace) -> ReadSettings:
    """Turn a parsed namespace into settings, checking every value."""
    values, types = parsed.as_dict(), get_type_hints(kind)
    return kind(
        **{
            field.name: types[field.name](**values[field.name])
            if dataclasses.is_dataclass(types[field.name])
            else values[field.name]
            for field in dataclasses.fields(kind)
        }
    )
