"""What ``train`` and ``pretrain`` share: a run's arguments, its output, and resuming."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, cast, get_type_hints

import jsonargparse

from vsm.cli.output import say
from vsm.cli.processes import is_first_process
from vsm.errors import SettingsError
from vsm.runs.configuration import (
    PRESETS,
    AnySettings,
    flat_values,
    preset_paths,
    read_sections,
    read_settings,
)
from vsm.runs.directory import (
    CONFIG_NAME,
    METRICS_NAME,
    RESUME_NAME,
    Directory,
    require_made_by,
)
from vsm.runs.shipped import is_shipped
from vsm.settings import (
    PretrainSettings,
    RunSettings,
    SlurmSettings,
    default_values,
    describe_conditions,
    effective_settings,
    flatten,
)


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
    for action in parser._actions:  # argparse offers no other way to its help
        if conditions := describe_conditions(kind).get(action.dest):
            action.help = f"{action.help} [{conditions}]"


def add_launcher_arguments(parser: jsonargparse.ArgumentParser, purpose: str) -> None:
    """Declare who starts processes, and what SLURM is asked for."""
    names = Literal["none", "local", "slurm"]
    parser.add_argument("--launcher", type=names, default="none", help=purpose)
    parser.add_class_arguments(SlurmSettings, "slurm")


def parse_run(
    parser: jsonargparse.ArgumentParser,
    arguments: Sequence[str],
    kind: type[AnySettings],
    command: str,
    presets: Path = PRESETS,
) -> tuple[jsonargparse.Namespace, AnySettings]:
    """Parse the words after ``command``, make way in the output, return arguments and settings."""
    arguments = with_bare_switches(arguments, kind)
    _check_files(arguments, kind)
    own, arguments = arguments, with_preset(arguments, presets)
    parsed = parser.parse_args(arguments)
    given = _given_names(parser, own, kind)
    if parsed.resume and parsed.overwrite:
        raise SettingsError("--resume and --overwrite contradict each other; give one of them")
    stored = parsed.output / CONFIG_NAME
    _check_output(parsed.output, parsed.resume, command)
    resumed = parsed.resume and stored.is_file()
    if resumed:
        begun = read_settings(kind, stored)
        parsed = parser.parse_args(["--config", str(stored), *arguments])
    settings = effective_settings(kind, flat_values(kind, parsed), given)
    settings = _findable(settings)
    if resumed:
        _refuse_changes(settings, begun, parsed.output)
    submits = parsed.get("launcher", "none") != "none"  # then the job makes way itself
    if parsed.overwrite and is_first_process() and not submits and stored.exists():
        with Directory(parsed.output).locked():
            stored.unlink()
    return parsed, settings


def _given_names(
    parser: jsonargparse.ArgumentParser, words: Sequence[str], kind: type[AnySettings]
) -> set[str]:
    """Return the settings that a user gave, and no preset, other than by their defaults."""
    own = [word for before, word in pairwise(["", *words]) if "--preset" not in (before, word)]
    own = [word for word in own if not word.startswith("--preset=")]
    values, usual = flat_values(kind, parser.parse_args(own)), default_values(kind)
    return {name for name, value in values.items() if value != usual[name]}


def _check_files(words: Sequence[str], kind: type[AnySettings]) -> None:
    """Refuse files of settings that would keep the parser busy, or make it open other files."""
    named = {after for word, after in pairwise(words) if word == "--config"}
    named |= {word.partition("=")[2] for word in words if word.startswith("--config=")}
    for path in map(Path, sorted(named)):
        if path.exists():
            values = read_sections(kind, path, verify=False)
            if "config" in values or not isinstance(values.get("slurm", {}), dict):
                raise SettingsError(f"{path}: holds the name of another file; give it as --config")


def with_preset(arguments: Sequence[str], folder: Path = PRESETS) -> list[str]:
    """Put the file of ``--preset NAME`` where it is named, as a ``--config``; of ``folder``."""
    words: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == "--preset":
            chosen = value if equals else next(remaining, "")
            words += [
                word for path in preset_paths(chosen, folder) for word in ("--config", str(path))
            ]
        else:
            words.append(word)
    return words


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
    """Make the paths of data, of ``init`` and of a teacher absolute, for later runs."""
    kind, _, path = settings.data.partition(":")
    if kind in ("folder", "features") and path:
        settings = replace(settings, data=f"{kind}:{Path(path).expanduser().resolve()}")
    if isinstance(settings, RunSettings) and settings.init and not is_shipped(settings.init):
        settings = replace(settings, init=str(Path(settings.init).expanduser().resolve()))
    if isinstance(settings, PretrainSettings) and settings.distillation.teacher:
        teacher = str(Path(settings.distillation.teacher).expanduser().resolve())
        taught = replace(settings.distillation, teacher=teacher)
        settings = replace(settings, distillation=taught)
    return settings


def require_trusted_backbone(own: str | None, words: Sequence[str], option: str) -> None:
    """Let files choose among our backbones, but only the command line name other code to import.

    ``own`` is the user's own backbone ``module:attribute`` in the settings, ``option`` the option
    by which ``words``, the arguments, must name it as well.
    """
    named = {after for word, after in pairwise(words) if word == option}
    named |= {word.partition("=")[2] for word in words if word.startswith(f"{option}=")}
    if own is not None and own not in named:
        raise SettingsError(
            f"{option.lstrip('-')}: a settings file names code that is not part of vsm, {own}; if "
            f"you trust it, add --backbone {own}"
        )


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
        say(f"vsm {command}: nothing to resume in {output}, starting from scratch", file=sys.stderr)


def _refuse_changes(settings: AnySettings, before: AnySettings, output: Path) -> None:
    """Keep the settings of a resumed run, but for ``steps`` where no schedule depends on them."""
    stored = flatten(before)
    for key, value in flatten(settings).items():
        may_change = (
            key == "steps"
            and isinstance(settings, RunSettings)
            and settings.optimizer.schedule != "cosine"
        )
        if value != stored[key] and not may_change:
            raise SettingsError(
                f"{key}: the run in {output} was begun with {stored[key]!r}, got {value!r}; "
                "leave it out to resume, or choose another --output"
            )
