"""Arguments that several commands have."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from vsm.cli.output import printable
from vsm.system.documents import shortened

INFINITE = ("--gaussian.epsilon", "--gaussian.beta")
"""Options that are often infinite: ``inf`` for people and in what we print, ``.inf`` in YAML."""


class CommandParser(ArgumentParser):
    """Says what is wrong in one line, whatever was given; takes ``inf`` as a number."""

    def parse_args(self, args: Iterable[str] | None = None, *more: Any, **options: Any) -> Any:
        """See :class:`jsonargparse.ArgumentParser`."""
        words = None if args is None else [_in_yaml(*pair) for pair in pairwise(["", *args])]
        return super().parse_args(words, *more, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """See :class:`jsonargparse.ArgumentParser`."""
        super().error(printable(shortened(message)), ex)


def _in_yaml(before: str, word: str) -> str:
    """Return ``word``, which came after ``before``, as YAML has it."""
    if before in INFINITE and word == "inf":
        return ".inf"
    option, _, value = word.partition("=")
    return f"{option}=.inf" if option in INFINITE and value == "inf" else word


def add_action(actions: Any, name: str, purpose: str) -> ArgumentParser:
    """Declare a subcommand among ``actions`` and return the parser of its arguments."""
    parser = CommandParser(description=purpose)
    actions.add_subcommand(name, parser, help=purpose)
    return parser


def add_json_argument(parser: ArgumentParser) -> None:
    """Declare that the answer is for a program."""
    parser.add_argument("--json", action="store_true", help="Print exactly one JSON object.")


def add_support_argument(parser: ArgumentParser) -> None:
    """Declare the examples of every class."""
    parser.add_argument(
        "--support",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        help="A folder with a folder of examples per class, or a CSV file with the columns path "
        "and label; several are taken together.",
    )


def add_backbone_argument(parser: ArgumentParser) -> None:
    """Declare the backbone that may be imported."""
    parser.add_argument(
        "--backbone",
        type=str | None,
        help="Name the run's own backbone module:attribute again, to allow that it is imported; or "
        "where its encoder hf:PATH or onnx:FILE is now.",
    )


def add_backbones_argument(parser: ArgumentParser) -> None:
    """Declare the backbones that may be imported."""
    parser.add_argument(
        "--backbone",
        type=str,
        action="append",
        default=[],
        help="Name a run's own backbone module:attribute again, to allow that it is imported; "
        "may be repeated.",
    )


def add_memory_argument(parser: ArgumentParser) -> None:
    """Declare a memory to use with a model."""
    parser.add_argument(
        "--memory", type=Path | None, help="A memory file in place of the model's own."
    )


def add_protocol_arguments(parser: ArgumentParser) -> None:
    """Declare what a list of episodes is made of, but for the support."""
    parser.add_argument("--way", type=int | None, help="Classes of an episode; unset: the run's.")
    parser.add_argument("--queries", type=int, default=15, help="Query images per class.")
    parser.add_argument("--episodes", type=int, default=2000, help="Of each measurement.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the list of episodes.")
