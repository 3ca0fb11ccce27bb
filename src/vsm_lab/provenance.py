"""How a run came about: commands that make it again, the time it took, versions it depends on."""

import hashlib
import json
import platform
import shlex
import subprocess
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from vsm import __version__
from vsm.errors import RunError
from vsm.runs.directory import (
    Directory,
    PretrainingDirectory,
    RunDirectory,
    find_run,
    is_shipped,
    read_card,
)
from vsm.settings import (
    GaussianSettings,
    ModelSettings,
    PretrainSettings,
    RunSettings,
    default_values,
    flatten,
    is_frozen_encoder,
    own_code,
)

PACKAGE = Path(__file__).parents[1]
LEARN = "vsm memory learn"
LIBRARIES = ("torch", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """Return the versions of vsm, of Python, and of the libraries that numbers depend on."""
    found = {"vsm": __version__, "python": platform.python_version()}
    return found | {name: version(name) for name in LIBRARIES}


def measured_code() -> dict[str, str | None]:
    """Return the commit of the code, and a hash of its source.

    The commit is marked if the package was changed since, and None outside a repository of its own.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(PACKAGE), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()

    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    try:
        changed = "-dirty" if git("status", "--porcelain", ".") else ""
        commit = git("rev-parse", "HEAD") + changed if git("ls-files", ".") else None
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {"commit": commit, "source": digest.hexdigest()}


def was_learned(run: RunDirectory) -> bool:
    """Whether a run is a memory of given features, for which nothing was trained."""
    is_gaussian = run.settings().inference == "gaussian"
    return is_gaussian and not any(row["step"] for row in run.read_metrics())


def training_commands(
    settings: RunSettings, output: str, is_learned: bool | None = None
) -> list[str]:
    """Return the commands that make a run of these settings in ``output``, the first one first.

    ``is_learned`` says whether a memory was learned and nothing trained; unset: with gaussian
    inference it was.

    Raises:
        RunError: if the directory of the backbone that it began with is gone.
    """
    if settings.inference == "gaussian" if is_learned is None else is_learned:
        return _learning_commands(settings, output)
    path, train = _beginning(settings), command("train", portable(settings, output), output)
    if path is None:
        return [train]
    if not RunDirectory(path).exists():
        raise RunError(
            f"init: the run began with the backbone of {path}, which is gone, so how it was made "
            "cannot be told; put that directory back"
        )
    return [*_commands_of(path, f"{output}-backbone"), train]


def _commands_of(path: Path, output: str) -> list[str]:
    """Return the commands that make a run or a pre-training again."""
    run = RunDirectory(path)
    if run.model.is_file():
        return training_commands(run.settings(), output, was_learned(run))
    return pretraining_commands(path, output)


def pretraining_commands(path: Path, output: str) -> list[str]:
    """Return the commands that make the pre-training in ``path`` in ``output``, its teacher first.

    Raises:
        RunError: if the teacher is gone.
    """
    settings = PretrainingDirectory(path).settings()
    if settings.distillation.teacher is None:
        return [command("pretrain", settings, output)]
    teacher = f"{output}-teacher"
    before = pretraining_commands(Path(settings.distillation.teacher), teacher)
    taught = replace(settings.distillation, teacher=teacher)
    return [*before, command("pretrain", replace(settings, distillation=taught), output)]


def _learning_commands(settings: RunSettings, output: str) -> list[str]:
    """Return the commands that made the encoder, and the one that learned the memory."""
    learn = learn_command(settings, output)
    if settings.init is None or _is_named(settings.init):
        return [learn]
    path, encoder = find_run(settings.init), f"{output}-encoder"
    card = read_card(path)
    if card is None:
        before = _commands_of(path, encoder)
    else:  # its commands make runs/NAME, or runs/NAME-encoder and then a memory
        before = [one for one in card["commands"][:-1] if not one.startswith(LEARN)]
        is_learned = len(before) < len(card["commands"]) - 1
        name = f"runs/{card['name']}" + ("-encoder" if is_learned else "")
        before = [one.replace(name, encoder) for one in before]
    return [*before, learn.replace(shlex.quote(settings.init), shlex.quote(encoder), 1)]


def _is_named(init: str | None) -> bool:
    """Whether the encoder has a name rather than a directory, or there is none."""
    return init is None or is_frozen_encoder(init) or own_code(init) is not None


def learn_command(settings: RunSettings, output: str | None = None) -> str:
    """Return the command that learns a memory with these settings."""
    words = [*LEARN.split(), "--data", settings.data]
    if settings.init is not None:
        words += ["--encoder", settings.init, *_views(settings)]
    if settings.seed:
        words += ["--seed", str(settings.seed)]
    for name, value in asdict(settings.gaussian).items():
        if value != getattr(GaussianSettings(), name):
            words += [f"--gaussian.{name}", str(value).lower()]
    return shlex.join(words if output is None else [*words, "--output", output])


def _views(settings: RunSettings) -> list[str]:
    """Return the options by which features differ from those that the encoder was trained for."""
    encoder, words = ModelSettings(adapter=settings.model.adapter), []
    if not _is_named(settings.init):
        run = RunDirectory(find_run(settings.init or ""))
        if run.model.is_file():
            encoder = run.settings().model
    for name in ("mirror", "shift"):
        if getattr(encoder, name) != (asked := getattr(settings.model, name)):
            words += [f"--{name}", str(asked).lower()]
    if encoder.adapter != settings.model.adapter:
        words += ["--adapter", "false"]
    return words


def portable(settings: RunSettings, output: str) -> RunSettings:
    """Return the settings with ``init`` as :func:`training_commands` for ``output`` name it."""
    if settings.inference == "gaussian" and settings.init is not None:
        return settings if _is_named(settings.init) else replace(settings, init=f"{output}-encoder")
    is_own = _beginning(settings) is not None
    return replace(settings, init=f"{output}-backbone") if is_own else settings


def _beginning(settings: RunSettings) -> Path | None:
    """Return the directory that the run's backbone came from, if it is one of the user's."""
    if settings.init is None or is_shipped(settings.init):
        return None
    path = Path(settings.init)
    return path.parent if path.is_file() else path


def training_record(path: Path, settings: RunSettings) -> dict[str, Any]:
    """Return how a run of ``settings`` was trained, or its memory was learned.

    Raises:
        RunError: if its training is not at its end.
    """
    run, init = RunDirectory(path), settings.init
    record = {"run": str(path), "init": init, "seconds": logged_seconds(path)}
    if settings.inference == "gaussian" and was_learned(run):
        if not run.memory.is_file():
            raise RunError(f"{path} holds no memory; learn it again with vsm memory learn")
        settings = replace(run.settings(), init=init, seed=RunSettings().seed)
        return record | {
            "method": settings.method,
            "steps": 0,
            "tasks": 0,
            "init_seconds": None if _is_named(init) else logged_seconds(find_run(str(init))),
            "command": learn_command(settings),
        }
    done = max((int(row["step"]) for row in run.read_metrics()), default=0)
    if done < settings.steps or not run.model.is_file():
        raise RunError(
            f"{path} is at step {done} of {settings.steps}; finish it with vsm train --output "
            f"{path} --resume, and ask again"
        )
    return record | {
        "method": settings.method,
        "steps": settings.steps,
        "tasks": settings.tasks,
        "validations": [
            [row["step"], row["validation"]["accuracy"], row["validation"]["ci95"]]
            for row in run.read_validations()
        ],
        "init_seconds": None if init is None else logged_seconds(Path(init)),
        "command": command("train", replace(settings, seed=RunSettings().seed)),
    }


def logged_seconds(path: Path) -> float | None:
    """Add up the wall clock of a log; it begins at zero again where the run was resumed."""
    times = [float(row["seconds"]) for row in Directory(path).read_metrics() if "seconds" in row]
    ends = [now for now, after in pairwise(times) if after < now]
    return sum(ends) + times[-1] if times else None


def command(name: str, settings: RunSettings | PretrainSettings, output: str | None = None) -> str:
    """Return a command for a shell with all settings that differ from their defaults."""
    words, usual = ["vsm", name], default_values(type(settings))
    for option, value in flatten(settings).items():
        if value != usual[option]:
            word = value if isinstance(value, str) else json.dumps(value)
            word = "inf" if value == inf else word
            words += [f"--{option.replace('_', '-')}", word]
    return shlex.join(words if output is None else [*words, "--output", output])
