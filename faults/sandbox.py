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
from faults.processes import Completed, Options, Program, Running, start

CANARY_TEXT = "content of the canary"


@dataclass
class Sandbox:
    """A folder of samples, restored before every case.

    Attributes:
        root: of everything that is written.
        baselines: results of programs without faults.
    """

    root: Path
    baselines: dict[Any, dict[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The working directory of programs."""
        return self.root / "world"

    @property
    def scratch(self) -> Path:
        """For everything else."""
        return self.root / "scratch"

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

    def run(self, program: Program, **options: Any) -> Completed:
        """Run a program among the samples."""
        return self.start(program, **options).wait()

    def start(self, program: Program, place: str = "", **options: Any) -> Running:
        """Start a program among the samples; its output goes to ``place``."""
        variables = options.pop("variables", samples.environment(self.folder))
        return start(program, self.folder, self.scratch / place, Options(variables, **options))


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        fault: description of the fault.
        kind: ``same``, ``refused`` or ``other``, as in :class:`faults.oracles.Verdict`.
        defects: everything that is wrong.
        tried: number of faults, where one case injects several.
    """

    fault: str
    kind: str
    defects: tuple[str, ...]
    tried: int = 1


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
