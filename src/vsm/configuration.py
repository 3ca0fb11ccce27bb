"""Settings to and from YAML, with unknown keys and bad values named."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from vsm.errors import SettingsError
from vsm.settings import (
    KanervaSettings,
    MannSettings,
    MemorySettings,
    ModelSettings,
    ObjectiveSettings,
    OptimiserSettings,
    RunSettings,
    SamplingSettings,
    ValidationSettings,
)

PRESETS = Path(__file__).parent / "presets"


def preset_paths(name: str) -> list[Path]:
    """Return the files of a shipped preset, general before special, or say which there are.

    A preset ``paper-…`` is a cell of the paper's tables; it adds to what ``paper`` says of all.
    """
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(preset.stem for preset in PRESETS.glob("*.yaml")))
        raise SettingsError(f"preset: unknown preset {name!r}; known: {known}")
    return [PRESETS / "paper.yaml", path] if name.startswith("paper-") else [path]


def settings_to_dict(settings: RunSettings) -> dict[str, Any]:
    """Return the settings as nested plain values."""
    return dataclasses.asdict(settings)


def settings_to_yaml(settings: RunSettings) -> str:
    """Return the settings as YAML, in the order of their declaration."""
    return yaml.safe_dump(settings_to_dict(settings), sort_keys=False, allow_unicode=True)


def settings_from_files(*paths: Path) -> RunSettings:
    """Read settings from YAML files; later files override earlier ones."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RunSettings)
    parser.add_argument("--config", action="config")
    try:
        parsed = parser.parse_args([part for path in paths for part in ("--config", str(path))])
        return instantiate(parsed)
    except (argparse.ArgumentError, jsonargparse.ArgumentError) as error:
        names = ", ".join(str(path) for path in paths)
        raise SettingsError(f"{names}: {error}") from error


def instantiate(parsed: jsonargparse.Namespace) -> RunSettings:
    """Turn a parsed namespace into settings, checking every value."""
    values = parsed.as_dict()
    groups = {
        "model": ModelSettings,
        "memory": MemorySettings,
        "mann": MannSettings,
        "kanerva": KanervaSettings,
        "sampling": SamplingSettings,
        "objective": ObjectiveSettings,
        "optimiser": OptimiserSettings,
        "validation": ValidationSettings,
    }
    return RunSettings(
        **{
            field.name: groups[field.name](**values[field.name])
            if field.name in groups
            else values[field.name]
            for field in dataclasses.fields(RunSettings)
        }
    )
