"""What people see: progress bars and tables on a terminal, or one JSON object for programs."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from vsm.errors import SettingsError
from vsm.system.files import finite
from vsm.system.progress import Progress

EXTRAS = {"plots": ["matplotlib"], "serve": ["fastapi", "uvicorn", "python_multipart"]}
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a cursor, changes colors, turns the direction of writing, or is no letter at all."""


def printable(text: object, lines: bool = True) -> str:
    r"""Return a text, of one or several ``lines``, with ``\x1b`` for what commands a terminal."""
    shown = str(text) if lines else str(text).replace("\n", "\\n")
    return _CONTROLS.sub(_escape, shown)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def say(text: object = "", file: TextIO | None = None) -> None:
    """Print a text on standard output, or on ``file``, as :func:`printable` has it."""
    print(printable(text), file=file)


def print_json(value: Mapping[str, Any]) -> None:
    """Print exactly one JSON object on standard output; numbers that JSON lacks become null."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    print(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


class ProgressBar(Progress):
    """A bar per stage with the time left and a note, and lines above it; a context manager.

    A bar that never moved disappears with the error that ended the block.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._progress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=sys.stderr, markup=False),
            disable=quiet,
        )
        self._title = ""
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not any(task.completed for task in self._progress.tasks):
            self._progress.live.transient = True
            self._progress.live.stop()
            self._progress.disable = True  # what is left of it would be an empty line
        self._progress.stop()

    def start(self, title: str, total: int | None) -> None:
        self._title = title = printable(title, lines=False)
        if title in self._stages:  # it starts again
            self._progress.update(self._stages[title], total=total, completed=0)
        else:
            self._stages[title] = self._progress.add_task(title, total=total, note="")

    def advance(self, count: int = 1, note: str = "") -> None:
        shown = printable(note, lines=False)
        self._progress.update(self._stages[self._title], advance=count, note=shown)

    def message(self, text: str) -> None:
        if not self._progress.disable:
            self._progress.console.print(printable(f"{self._title} {text}"), highlight=False)


@contextmanager
def progress_bar(title: str, total: int | None, quiet: bool) -> Iterator[ProgressBar]:
    """Show one bar that counts to ``total`` while the block runs."""
    with ProgressBar(quiet) as bar:
        bar.start(title, total)
        yield bar


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: bool = False
) -> None:
    """Print a table on standard output: names in the first column, then numbers, or words."""
    table = Table(title=Text(printable(title), "italic"), title_justify="left")
    for position, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if position and not words else "left"
        table.add_column(Text(printable(column)), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # names are no markup
    Console(file=sys.stdout).print(table)


def in_words(value: Any) -> str:
    """Format plain values for people: a line for each text of a list."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {in_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        apart = "\n" if any(isinstance(item, str) for item in value) else ", "
        return apart.join(in_words(item) for item in value)
    if isinstance(value, float):
        return f"{value:.5g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def require_extra(what: str, extra: Literal["plots", "serve"]) -> None:
    """Raise if a package of the extra that ``what`` needs is missing, and name both."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing).replace("_", "-")
        raise SettingsError(
            f"{what} needs {names}: pip install 'variational-semantic-memory[{extra}]'"
        )
