"""Find the command, parse its arguments, run it."""

import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vsm import __version__
from vsm.errors import EpisodeError, RunError, SettingsError, VsmError
from vsm.system.interruption import Interrupted

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

COMMANDS = {
    "demo": "train three methods on built-in data, compare them on unseen classes, write a report",
    "data": "list, prepare and inspect datasets, and folders of your own images",
    "pretrain": "train a backbone on all training classes, for vsm train to begin with",
    "train": "train a model and leave a run directory",
    "evaluate": "measure a run on seeded episodes of unseen classes",
    "compare": "measure several runs on identical episodes, with paired differences",
    "models": "list the trained models that ship with vsm, show the card of one, or make one",
    "classify": "classify your own images by a few examples of each class",
    "review": "find wrong labels, outliers and near duplicates in a folder of labeled images",
    "suggest": "choose the unlabeled images whose labels would help most, and say why",
    "serve": "answer over HTTP, with tasks and memory in a store that lasts",
    "memory": "show, grow, cut, join and export what is remembered",
    "export": "write a trained model as ONNX, for programs without Python",
    "reproduce": "the paper's tables and figures, one command each, and a report",
    "study": "measure trained runs and their controls, and render a page of results",
    "bench": "measure speed on this machine, in a minute, or everything, or a server under load",
}
MODULES = {
    "compare": "evaluate",
    "export": "models",
    "pretrain": "train",
    "review": "classify",
    "suggest": "classify",
}
"""Commands that are not in a module of their own name."""
LAB_COMMANDS = ("demo", "reproduce", "study", "bench")
SHARED_COMMANDS = (("train",), ("memory", "learn"))
"""What several processes can do together."""
SAME_FOR_ALL = (EpisodeError, RunError, SettingsError, Interrupted)
"""What every process of a job meets, so that the first alone reports it."""
SIGPIPE = 13
DESCRIPTION = "Few-shot learning with a long-term memory: variational semantic memory."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``vsm`` and return its exit code."""
    words = [_with_underscores(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have letters that it cannot print
        sys.stdout.reconfigure(errors="backslashreplace")
    name = words[0] if words and words[0] in COMMANDS else ""
    try:
        code = _run(name, words[1:]) if name else _top_level(words)
        if sys.stdout is not None:  # it is None where it was closed from the start
            sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        _discard_output()
        return 128 + SIGPIPE
    except (VsmError, Interrupted) as error:
        if is_first_process() or not isinstance(error, SAME_FOR_ALL):
            _complain(name, error)
        return error.exit_code
    except (Exception, KeyboardInterrupt) as error:
        reason, code = _explain(error)
        _complain(name, reason)
    return code


def _run(name: str, rest: Sequence[str]) -> int:
    command, parser = open_command(name)
    shared = any((name, *rest)[: len(one)] == one for one in SHARED_COMMANDS)
    if is_one_of_several() and not shared:
        raise SettingsError(
            "works in one process, but WORLD_SIZE announces several; start it without torchrun, "
            "or unset WORLD_SIZE"
        )
    command.start(parser, rest)
    return 0


def is_one_of_several() -> bool:
    """Whether the environment announces other processes of the same job, as torchrun's does."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_first_process() -> bool:
    """Whether this process is alone, or the first of a job: the one that speaks."""
    return not is_one_of_several() or os.environ.get("RANK", "0") == "0"


def _explain(error: BaseException) -> tuple[object, int]:
    """Return why the system, or a user, ended a command, and the exit code; else raise it."""
    if _was_interrupted(error):
        return "interrupted", 130
    if isinstance(error, UnicodeDecodeError):
        return f"a settings file is not UTF-8 text ({error})", 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", 1
    runtime = str(error) if isinstance(error, RuntimeError) else ""
    if "Symlink loop" in runtime:  # of Path.resolve
        return error, 1
    if "allocate" in runtime or isinstance(error, MemoryError):
        return "there is not enough memory for this; ask for less, or use another machine", 1
    raise error


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is at the bottom of it; libraries report other errors of it in imports."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error is not None
    return _was_interrupted(error.__cause__ or error.__context__)


def _complain(name: str, what: object) -> None:
    from vsm.cli.output import printable

    with suppress(OSError):  # standard error is closed
        print(f"vsm {name}: {printable(what, lines=False)}", file=sys.stderr)


def _discard_output() -> None:
    """Let the interpreter flush the rest of the output to the null device."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())


def open_command(name: str) -> tuple[Any, "ArgumentParser"]:
    """Return a command, which ``start(parser, words)`` runs, and a parser with its arguments."""
    from vsm.cli.arguments import CommandParser  # here, so that `vsm --help` answers at once

    if name in LAB_COMMANDS:
        command: Any = lab_module(name)
    else:
        command = importlib.import_module(f"vsm.cli.{MODULES.get(name, name)}").COMMANDS[name]
    parser = CommandParser(prog=f"vsm {name}", usage=f"vsm {name} ...", description=COMMANDS[name])
    command.add_arguments(parser)
    return command, parser


def lab_module(name: str) -> ModuleType:
    """Import the module of a lab command, or say how to install the lab."""
    if importlib.util.find_spec("vsm_lab") is None:
        raise SettingsError(
            "the experiment tooling is not installed; clone the repository and install it with: "
            "pip install --editable '.[plots]'"
        )
    return importlib.import_module(f"vsm_lab.cli.{name}")


def _top_level(words: Sequence[str]) -> int:
    """Answer ``--help``, ``--version``, nothing at all, or an unknown command."""
    if words and words[0] == "--version":
        print(f"vsm {__version__}")
        return 0
    if words and words[0] not in ("--help", "-h"):
        print(f"vsm: unknown command {words[0]!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    listing = "\n".join(f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items())
    print(f"usage: vsm COMMAND ... | --help | --version\n\n{DESCRIPTION}\n\ncommands:\n{listing}")
    print("\nEach command has its own --help.")
    return 0 if words else 2


def _with_underscores(word: str) -> str:
    """Let ``--batch-norm`` stand for ``--batch_norm``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
