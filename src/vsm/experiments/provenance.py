"""How a run came about: the commands that make it again, and the versions it was made with."""

import json
import platform
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vsm import __version__
from vsm.errors import RunError
from vsm.pretraining.loop import PretrainingDirectory
from vsm.runs.directory import RunDirectory
from vsm.runs.shipped import is_shipped
from vsm.settings import PretrainSettings, RunSettings

LIBRARIES = ("torch", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """Return the versions of vsm, of Python, and of the libraries that numbers depend on."""
    found = {"vsm": __version__, "python": platform.python_version()}
    return found | {name: version(name) for name in LIBRARIES}


def training_commands(settings: RunSettings, output: str) -> list[str]:
    """Return the commands that make a run of these settings in ``output``, the first one first.

    Raises:
        RunError: if the directory of the backbone that it began with is gone.
    """
    before = _beginning(settings)
    commands = [] if before is None else _commands_of(before, _backbone_folder(output))
    return [*commands, command("train", portable(settings, output), output)]


def portable(settings: RunSettings, output: str) -> RunSettings:
    """Return the settings with ``init`` as :func:`training_commands` for ``output`` name it."""
    if _beginning(settings) is None:
        return settings
    return replace(settings, init=_backbone_folder(output))


def _beginning(settings: RunSettings) -> Path | None:
    """Return the directory that the run's backbone came from, if it is one of the user's."""
    if settings.init is None or is_shipped(settings.init):
        return None
    path = Path(settings.init)
    return path.parent if path.is_file() else path


def _backbone_folder(output: str) -> str:
    return f"{output}-backbone"


def _commands_of(path: Path, output: str) -> list[str]:
    run = RunDirectory(path)
    if not run.exists():
        raise RunError(
            f"init: the run began with the backbone of {path}, which is gone, so how it was made "
            "cannot be told; put that directory back"
        )
    if run.model.is_file():
        return training_commands(run.settings(), output)
    return [command("pretrain", PretrainingDirectory(path).settings(), output)]


def command(name: str, settings: RunSettings | PretrainSettings, output: str | None = None) -> str:
    """Return a command for a shell with all settings that differ from their defaults."""
    usual = dict(_options(asdict(type(settings)())))
    words = ["vsm", name]
    for option, value in _options(asdict(settings)):
        if value != usual[option]:
            words += [f"--{option.replace('_', '-')}", _word(value)]
    return shlex.join(words if output is None else [*words, "--output", output])


def _options(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _options(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
