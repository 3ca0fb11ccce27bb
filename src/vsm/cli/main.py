"""Find the command, parse its arguments, run it."""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from vsm import __version__
from vsm.cli.processes import is_first_process, is_one_of_several
from vsm.errors import EpisodeError, RunError, SettingsError, VsmError
from vsm.system.interruption import Interrupted

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

COMMANDS = {
    "demo": "train three methods on built-in data, compare them on unseen classes, write a report",
    "data": "list, prepare and inspect datasets, and folders of your own pictures",
    "pretrain": "train a backbone on all training classes, for vsm train to begin with",
    "train": "train a model and leave a run directory",
    "evaluate": "measure a run on seeded episodes of unseen classes",
    "compare": "measure several runs on identical episodes, with paired differences",
    "models": "list the trained models that ship with vsm, show the card of one, or make one",
    "classify": "classify your own pictures by a few examples of each class",
    "review": "find wrong labels, outliers and near duplicates in a folder of labeled pictures",
    "suggest": "choose the unlabeled pictures whose labels would help most, and say why",
    "serve": "answer over HTTP, with tasks and memory in a store that lasts",
    "memory": "show, grow, cut, join and export what is remembered",
    "export": "write a trained model as ONNX, for programs without Python",
    "reproduce": "the paper's tables and figures, one command each, and a report",
    "study": "measure trained runs and their controls, and render a page of results",
    "bench": "measure speed on this machine, in a minute, or everything, or a server under load",
}
SHARED_COMMANDS = (("train",), ("memory", "learn"))
"""What several processes can do together."""
SAME_FOR_ALL = (EpisodeError, RunError, SettingsError, Interrupted)
"""What every process of a job meets, so that the first alone reports it."""
DESCRIPTION = (
    "Few-shot learning with a long-term memory (Learning to Learn Variational Semantic Memory)."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``vsm`` and return its exit code."""
    words = [_with_underscores(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    if not words or words[0] not in COMMANDS:
        return _top_level(words)
    name, *rest = words
    module, parser = open_command(name)
    try:
        shared = any(tuple(words[: len(one)]) == one for one in SHARED_COMMANDS)
        if is_one_of_several() and not shared:
            raise SettingsError(
                "works in one process, but WORLD_SIZE announces several; start it without "
                "torchrun, or unset WORLD_SIZE"
            )
        module.run(parser, rest)
    except (VsmError, Interrupted) as error:
        if is_first_process() or not isinstance(error, SAME_FOR_ALL):
            print(f"vsm {name}: {error}", file=sys.stderr)
        return error.exit_code
    except UnicodeDecodeError as error:
        print(f"vsm {name}: a settings file is not UTF-8 text ({error})", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"vsm {name}: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"vsm {name}: interrupted", file=sys.stderr)
        return 130
    return 0


def open_command(name: str) -> tuple[ModuleType, "ArgumentParser"]:
    """Return the module of a command, and a parser that knows its arguments.

    A module offers ``add_arguments(parser)``, and ``run(parser, words)``, which parses and works.
    """
    import jsonargparse  # here, so that `vsm --help` answers at once

    from vsm.cli.arguments import CommandParser

    module = importlib.import_module(f"vsm.cli.{name}")
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = CommandParser(prog=f"vsm {name}", usage=f"vsm {name} ...", description=COMMANDS[name])
    module.add_arguments(parser)
    return module, parser


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
