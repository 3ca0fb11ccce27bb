"""What people see: progress bars and tables on a terminal, or one JSON object for programs."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from vsm.errors import SettingsError

if TYPE_CHECKING:
    from vsm.evaluation.evaluator import Advance, Evaluation
    from vsm.evaluation.statistics import Estimate
    from vsm.pretraining.loop import FewShotScores


def print_json(value: Mapping[str, Any]) -> None:
    """Print exactly one JSON object on standard output."""
    print(json.dumps(value, ensure_ascii=False))


def console() -> Console:
    """Return the console for everything that is not a result; square brackets are just that."""
    return Console(file=sys.stderr, markup=False)


def _bar(quiet: bool) -> Progress:
    return Progress(
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


class _StepBar:
    """A bar with time left and the smoothed loss."""

    def __init__(self, title: str, num_steps: int | None, quiet: bool = False) -> None:
        self._progress = _bar(quiet)
        self._task = self._progress.add_task(title, total=num_steps, note="")
        self._title = title
        self._loss: float | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def step(self, step: int, loss: float) -> None:
        """Move the bar."""
        self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        self._progress.update(self._task, completed=step, note=f"loss {self._loss:.3f}")

    def _print_validation(self, when: str, scores: str, is_best: bool) -> None:
        if self._progress.disable:
            return
        best = " (best so far)" if is_best else ""
        self._progress.console.print(
            f"{self._title} {when}: validation {scores}{best}", highlight=False
        )


class TrainingBar(_StepBar):
    """A bar with time left, the smoothed loss, and a line for each validation."""

    def validated(self, step: int, evaluation: "Evaluation", is_best: bool) -> None:
        """Print a validation above the bar."""
        self._print_validation(f"step {step}", _percent(evaluation.accuracy), is_best)


class PretrainingBar(_StepBar):
    """The same; steps are counted once the data are known, and validations have several shots."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        super().__init__(title, None, quiet)

    def started(self, num_steps: int) -> None:
        """Set the end of the bar."""
        self._progress.update(self._task, total=num_steps)

    def scored(self, epoch: int, scores: "FewShotScores", is_best: bool) -> None:
        """Print a validation above the bar."""
        each = [f"{shot}-shot {_percent(score)}" for shot, score in scores.accuracies.items()]
        self._print_validation(f"epoch {epoch}", ", ".join(each), is_best)


def _percent(score: "Estimate") -> str:
    return f"{score.mean:.1%} ± {score.ci95:.1%}"


@contextmanager
def counting(title: str, total: int, quiet: bool) -> Iterator["Advance"]:
    """Show a bar that counts to ``total`` while the block runs.

    One that never moved leaves with the error that ended the block.
    """
    with _bar(quiet) as progress:
        task = progress.add_task(title, total=total, note="")
        try:
            yield lambda count: progress.advance(task, count)
        except BaseException:
            if not progress.tasks[0].completed:
                progress.live.transient = True
                progress.live.stop()
                progress.disable = True  # what is left of it would be an empty line
            raise


@contextmanager
def counting_changes(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each thing that is reported as (what, how much, of how much)."""
    with _bar(quiet) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, note="")
            progress.update(tasks[what], completed=done, total=total)

        yield report


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
