"""Processes that are forked from one which has imported torch, and so begin without delay.

A process that imports torch and trains is busy for four seconds before its first step, and tests
of signals, kills and jobs of several processes need many of them. Here one process for all tests
imports what they need, and is forked for each.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

PRELOADED = [
    *("vsm.training", "vsm.pretraining", "vsm.cli.train", "jsonargparse"),
    "torch._dynamo",  # which torch imports when the first optimizer is made
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOADED)


class ForkedPython:
    """``python WORDS`` with these environment variables, used like a ``subprocess.Popen``."""

    def __init__(self, variables: dict[str, str], *words: str | Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._printed = [Path(self._folder.name) / name for name in ("output", "errors")]
        given = (list(map(str, words)), {**os.environ, **variables}, Path.cwd(), self._printed)
        self._process = _CONTEXT.Process(target=_run, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join()
        self._folder.cleanup()

    @property
    def returncode(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process.exitcode is not None
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until it ends; return what it printed on standard output and error."""
        self._process.join(timeout)
        if self._process.is_alive():
            assert timeout is not None
            raise subprocess.TimeoutExpired("forked python", timeout)
        output, errors = (path.read_text(encoding="utf-8") for path in self._printed)
        self._folder.cleanup()
        return output, errors


def _run(words: list[str], variables: dict[str, str], folder: Path, printed: list[Path]) -> None:
    """Become ``python WORDS``."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for descriptor, path in enumerate((Path(os.devnull), *printed)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), descriptor)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
