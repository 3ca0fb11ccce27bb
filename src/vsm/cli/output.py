"""What people see: progress bars and tables on a terminal, or one JSON object for programs."""

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

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


def print_json(value: Mapping[str, Any]) -> None:
    """Print exactly one JSON object on standard output."""
    print(json.dumps(value, ensure_ascii=False))


def console() -> Console:
    """Return the console for everything that is not a result; square brackets are just that."""
    return Console(file=sys.stderr, markup=False)


class ProgressBar:
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
            console=console(),
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
        """See :class:`vsm.system.progress.Progress`; a stage that was begun before begins anew."""
        self._title = title
        if title in self._stages:
            self._progress.update(self._stages[title], total=total, completed=0)
        else:
            self._stages[title] = self._progress.add_task(title, total=total, note="")

    def advance(self, count: int = 1, note: str = "") -> None:
        """See :class:`vsm.system.progress.Progress`."""
        self._progress.update(self._stages[self._title], advance=count, note=note)

    def message(self, text: str) -> None:
        """See :class:`vsm.system.progress.Progress`."""
        if not self._progress.disable:
            self._progress.console.print(f"{self._title} {text}", highlight=False)


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
    table = Table(title=Text(title, "italic"), title_justify="left")
    for position, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if position and not words else "left"
        table.add_column(Text(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # names are no markup
    Console(file=sys.stdout).print(table)


def need_matplotlib(what: str) -> None:
    """Say how to install the extra that ``what`` needs, if it is not there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError(
            f"{what} needs matplotlib: pip install 'variational-semantic-memory[plots]'"
        )
