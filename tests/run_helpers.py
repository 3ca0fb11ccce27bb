"""What tests of training and of pre-training share: stopping a run, and reading its log."""

import json
import signal
from pathlib import Path
from typing import Any


class AskedToStop:
    """Asks the process to stop at a step, as Ctrl-C does."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self.at, self.number = step, number

    def step(self, step: int, loss: float) -> None:
        if step == self.at:
            signal.raise_signal(self.number)


def rows(run: Path) -> list[dict[str, Any]]:
    """Metrics without the wall clock."""
    listed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in listed]


def assert_same_run(one: Path, two: Path, *files: str) -> None:
    """Both runs have the same of ``files``, bit for bit, and logged the same."""
    for name in files:
        assert (one / name).exists() == (two / name).exists()
        if (one / name).exists():
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert rows(one) == rows(two)
