"""What ``train`` and ``pretrain`` share: a run's arguments, its output, resuming, and stopping."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_type_hints

import jsonargparse

from vsm.cli.processes import is_first_process
from vsm.errors import SettingsError
from vsm.runs.configuration import AnySettings, instantiate, read_settings, settings_to_dict
from vsm.runs.directory import CONFIG_NAME, METRICS_NAME, RESUME_NAME, require_made_by
from vsm.runs.shipped import is_shipped
from vsm.settings import RunSettings
from vsm.system.interruption import Interrupted


def add_run_arguments(parser: jsonargparse.ArgumentParser, kind: type[AnySettings]) -> None:
    """Declare a run's settings and where it goes."""
    parser.add_argument("--output", type=Path, required=True, help="The run directory to write.")
    parser.add_argument(
        "--config",
        action="config",
        help="YAML settings, may be repeated; whatever comes later on the line wins.",
    )
    parser.add_argument(
        "--resume", action="store_true", help="Go on from the last state in --output, if any."
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace a run that --output already holds."
    )
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object when done, and no progress."
    )
    parser.add_class_arguments(kind)


def parse_run(
    parser: jsonargparse.ArgumentParser,
    arguments: Sequence[str],
    kind: type[AnySettings],
    command: str,
    may_change: Callable[[str, AnySettings], bool] | None = None,
) -> tuple[jsonargparse.Namespace, AnySettings]:
    """Parse the arguments, make way in the output, and return both them and the settings.

    Args:
        parser: with what :func:`add_run_arguments` declared.
        arguments: the words after the command.
        kind: which settings.
        command: its name, for messages.
        may_change: whether a resumed run may be given another value of a setting; none by default.
    """
    arguments = with_bare_switches(arguments, kind)
    parsed = parser.parse_args(arguments)
    if parsed.resume and parsed.overwrite:
        raise SettingsError("--resume and --overwrite contradict each other; give one of them")
    stored = parsed.output / CONFIG_NAME
    _check_output(parsed.output, parsed.resume, command)
    resumed = parsed.resume and stored.is_file()
    if resumed:
        parsed = parser.parse_args(["--config", str(stored), *arguments])
    settings = instantiate(kind, parsed)
    settings = _findable(settings)
    if resumed:
        _refuse_changes(settings, read_settings(kind, stored), parsed.output, may_change)
    submits = parsed.get("launcher", "none") != "none"  # then the job makes way itself
    if parsed.overwrite and is_first_process() and not submits:
        stored.unlink(missing_ok=True)
    return parsed, settings


def with_bare_switches(words: Sequence[str], kind: type[AnySettings]) -> list[str]:
    """Let ``--freeze_backbone`` stand for ``--freeze_backbone true``, and so for every switch."""
    switches = set(_switches(kind, "--"))
    return [
        f"{word}=true" if word in switches and after.startswith("--") else word
        for word, after in pairwise([*words, "--"])
    ]


def _switches(kind: type, prefix: str) -> Iterator[str]:
    """Name the options of all settings that are true or false."""
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from _switches(cast(type, hint), f"{prefix}{name}.")
        elif hint is bool:
            yield prefix + name


def _findable(settings: AnySettings) -> AnySettings:
    """Make the paths of ``folder:PATH``, ``features:PATH`` and ``init`` absolute for later runs."""
    kind, _, path = settings.data.partition(":")
    if kind in ("folder", "features") and path:
        settings = replace(settings, data=f"{kind}:{_absolute(path)}")
    if isinstance(settings, RunSettings) and settings.init is not None:
        init = settings.init if is_shipped(settings.init) else _absolute(settings.init)
        settings = replace(settings, init=init)
    return settings


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def require_trusted_backbone(own: str | None, words: Sequence[str], option: str) -> None:
    """Let files choose among our backbones, but only the command line name other code to import.

    Args:
        own: the user's own backbone ``module:attribute`` that the settings name, or None.
        words: the arguments.
        option: the name under which the backbone is given.
    """
    following = zip(words, [*words[1:], ""], strict=True)
    named = {after for word, after in following if word == option}
    named |= {word.partition("=")[2] for word in words if word.startswith(f"{option}=")}
    if own is not None and own not in named:
        raise SettingsError(
            f"{option.lstrip('-')}: a settings file names code that is not part of vsm, {own}; if "
            f"you trust it, add --backbone {own}"
        )


@contextmanager
def exit_when_stopped(command: str) -> Iterator[None]:
    """Say in one line that a run was stopped, and exit with the shell's code for the signal."""
    try:
        yield
    except Interrupted as interruption:
        if is_first_process():
            print(f"vsm {command}: {interruption}", file=sys.stderr)
        sys.exit(interruption.exit_code)


def _check_output(output: Path, resume: bool, command: str) -> None:
    """Refuse places where a run would be lost or would bury something else."""
    if output == Path():
        raise SettingsError("output: give the run a folder of its own, got the current one")
    require_made_by(command, output)
    if not resume:
        return
    has_run = (output / METRICS_NAME).exists() or any(output.glob("*.safetensors"))
    if has_run and not (output / CONFIG_NAME).is_file():
        raise SettingsError(f"output: {output} has no {CONFIG_NAME}, so it cannot be resumed")
    if not (output / RESUME_NAME).is_file() and is_first_process():
        print(f"vsm {command}: nothing to resume in {output}, starting anew", file=sys.stderr)


def _refuse_changes(
    settings: AnySettings,
    before: AnySettings,
    output: Path,
    may_change: Callable[[str, AnySettings], bool] | None,
) -> None:
    """A resumed run keeps its settings, but for those that change nothing that was done."""
    stored = _flat(settings_to_dict(before))
    for key, value in _flat(settings_to_dict(settings)).items():
        if value != stored[key] and not (may_change and may_change(key, settings)):
            raise SettingsError(
                f"{key}: the run in {output} was begun with {stored[key]!r}, got {value!r}; "
                "leave it out to resume, or choose another --output"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
