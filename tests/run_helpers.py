"""What tests of training and of pre-training share: stopping a run, and reading its log."""

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vsm.runs.directory import RunDirectory
from vsm.settings import RunSettings
from vsm.system.progress import Progress
from vsm.training import train


def train_run(settings: RunSettings, output: Path, **options: Any) -> RunDirectory:
    """Train without the closing memory, and return the run directory."""
    train(settings, output, learn_memory=False, **options)
    return RunDirectory(output)


class AtStep(Progress):
    """Does something as soon as a step is done, which is before the step is saved."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action
        self.done = 0

    def start(self, title: str, total: int | None) -> None:
        self.done = 0

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        if self.done == self.step:
            self.action()


def signal_at(step: int, number: signal.Signals = signal.SIGINT) -> AtStep:
    """Ask the process to stop at ``step``, as Ctrl-C does."""
    return AtStep(step, partial(signal.raise_signal, number))


def power_cut_at(step: int) -> AtStep:
    """Fail at ``step`` without saving anything."""

    def fail() -> None:
        raise OSError("power cut")

    return AtStep(step, fail)


def rows(run: Path) -> list[dict[str, Any]]:
    """Metrics without the wall clock."""
    listed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "digest")} for row in listed]


def edit_config(run: Path, old: str, new: str) -> None:
    """Change the settings of a run by hand, and say that this is meant."""
    *lines, _ = (run / "config.yaml").read_text().splitlines(keepends=True)
    (run / "config.yaml").write_text("".join(lines).replace(old, new, 1))


def assert_same_run(one: Path, two: Path, *files: str) -> None:
    """Both runs have the same of ``files``, bit for bit, and logged the same."""
    for name in files:
        assert (one / name).exists() == (two / name).exists()
        if (one / name).exists():
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert rows(one) == rows(two)
