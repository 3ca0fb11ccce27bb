"""The folder of samples in which cases run, and the definition of a case."""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from faults import samples
from faults.mutations import CANARY_FILE, CANARY_PIPE
from faults.oracles import Outcome
from faults.processes import Completed, Program, Running, start

CANARY_TEXT = "content of the canary"


@dataclass
class Sandbox:
    """A folder of samples below ``root``, restored before every case.

    ``folder`` is the working directory of programs, ``scratch`` is for everything else, and
    ``baselines`` keeps results of programs without faults.
    """

    root: Path
    baselines: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder, self.scratch = self.root / "world", self.root / "scratch"

    def build(self, quick: bool = False) -> None:
        """Write the samples, or those that take little time, and keep a copy."""
        samples.build(self.folder, self.scratch, quick)
        for folder in (self.root, self.root.parent):
            folder.chmod(0o755)  # some cases run as another user
        shutil.copytree(self.folder, self.root / "pristine")

    def restore(self) -> None:
        """Restore the samples."""
        self.remove("")
        shutil.copytree(self.root / "pristine", self.folder)
        (self.folder / CANARY_FILE).write_text(CANARY_TEXT)
        os.mkfifo(self.folder / CANARY_PIPE)

    def remove(self, name: str) -> None:
        """Remove a sample; ``rm`` also removes folders that are too deep for Python."""
        subprocess.run(["rm", "-rf", str(self.folder / name)], check=False)

    def baseline(self, key: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what ``measure`` finds without faults; it is called once for every key."""
        if key not in self.baselines:
            self.baselines[key] = measure()
            self.restore()
        return self.baselines[key]

    def run(self, program: Program, **options: Any) -> Completed:
        """Run a program among the samples."""
        return self.start(program, **options).wait()

    def start(self, program: Program, place: str = "", **options: Any) -> Running:
        """Start a program among the samples; ``place`` separates the output of several."""
        options = {"variables": samples.environment(self.folder), **options}
        return start(program, self.folder, self.scratch / place, **options)


@dataclass(frozen=True)
class Result:
    """The outcome of one case of a group."""

    part: str
    group: str
    number: int
    outcome: Outcome


@dataclass(frozen=True)
class Group:
    """Cases of one kind: ``run`` is called with the sandbox, a number and a random generator."""

    part: str
    name: str
    cases: int
    run: Callable[[Sandbox, int, Random], Outcome]

    def result(self, sandbox: Sandbox, number: int, seed: int) -> Result:
        """Run one case, determined by seed, group and number."""
        random = Random(f"{seed} {self.part} {self.name} {number}")
        sandbox.restore()
        return Result(self.part, self.name, number, self.run(sandbox, number, random))
