"""The reference of the command line, read off the parsers that ``vsm`` itself uses."""

import argparse
from collections.abc import Iterator
from typing import Any

from vsm.cli.main import COMMANDS, open_command

HIDDEN = ("help",)  # every command has it
WITHOUT_TITLE = ("positional arguments", "options")


def command_reference() -> str:
    """Return Markdown: a section for each command, and in it one for each of its subcommands."""
    return "\n".join(line for name in COMMANDS for line in _command(name))


def _command(name: str) -> Iterator[str]:
    _, parser = open_command(name)
    yield from (f"## vsm {name}", "", f"{_sentence(COMMANDS[name])}", "")
    yield from _arguments(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand, subparser in action.choices.items():
                yield from (f"### vsm {name} {subcommand}", "", f"{subparser.description}", "")
                yield from _arguments(subparser)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Return a table for each group of arguments; those without a title of their own share one."""
    tables: dict[str, list[str]] = {}
    for group in parser._action_groups:
        title = "" if group.title in WITHOUT_TITLE else group.title or ""
        tables.setdefault(title, []).extend(_rows(group))
    for title, rows in tables.items():
        if rows and title:
            yield from (f"**{title}**", "")
        if rows:
            yield from ("| argument | default | what it does |", "|---|---|---|", *rows, "")


def _rows(group: argparse._ArgumentGroup) -> list[str]:
    return [
        f"| {_name(action)} | {_default(action)} | {_cell(action.help or '')} |"
        for action in group._group_actions
        if action.dest not in HIDDEN and not isinstance(action, argparse._SubParsersAction)
    ]


def _name(action: argparse.Action) -> str:
    """Return how the argument is written: ``RUN``, ``--way INT``, ``--split {train,test}``."""
    if not action.option_strings:
        return f"`{_repeated(action, action.dest.upper())}`"
    option = max(action.option_strings, key=len).replace("_", "-")
    if action.nargs == 0:
        return f"`{option}`"
    return f"`{option} {_repeated(action, _value(action))}`"


def _repeated(action: argparse.Action, value: str) -> str:
    return {"+": f"{value} …", "*": f"[{value} …]", "?": f"[{value}]"}.get(str(action.nargs), value)


def _value(action: argparse.Action) -> str:
    """Return what stands for the value: its choices, or the name of its kind."""
    if isinstance(action.metavar, str):
        return "".join(filter(str.isascii, action.metavar))  # jsonargparse adds invisible marks
    kind = getattr(action, "_typehint", None)
    choices = [choice for part in _parts(kind) for choice in getattr(part, "__args__", ())]
    if choices and all(isinstance(choice, str) for choice in choices):
        return "{" + ",".join(choices) + "}"
    names = [getattr(part, "__name__", "value") for part in _parts(kind)]
    return "|".join(names).upper() or "VALUE"


def _parts(kind: Any) -> list[Any]:
    """Return the alternatives of a union, without ``None``."""
    if kind is None:
        return []
    alternatives = getattr(kind, "__args__", ()) if _is_union(kind) else (kind,)
    return [part for part in alternatives if part is not type(None)]


def _is_union(kind: Any) -> bool:
    return type(None) in getattr(kind, "__args__", ())


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    value = action.default
    if value is None or value == argparse.SUPPRESS or action.nargs == 0:
        return ""
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{value}`" if str(value) else ""


def _cell(text: str) -> str:
    """Return a text that a cell of a table can hold."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", r"\<")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
