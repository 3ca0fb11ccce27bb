"""Where cases are tried: a folder of specimens that is made anew for each of them."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from faults import specimens
from faults.mutations import CANARY_FILE, CANARY_PIPE
from faults.processes import Around, Ended, Program, Running, start

CANARY_TEXT = "what nobody asked for"


@dataclass
class Bench:
    """Specimens, and what programs do with them undisturbed.

    Attributes:
        root: of all that is written.
        folder: where programs run; as the specimens were, at the beginning of every case.
    """

    root: Path
    undisturbed: dict[Any, dict[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return where programs run."""
        return self.root / "world"

    @property
    def scratch(self) -> Path:
        """Return where everything else goes."""
        return self.root / "scratch"

    def build(self, quick: bool = False) -> None:
        """Make the specimens, or those that take little time, and keep a copy of them."""
        specimens.build(self.folder, self.scratch, quick)
        for folder in (self.root, self.root.parent):
            folder.chmod(0o755)  # other users are tried, too
        shutil.copytree(self.folder, self.root / "pristine")

    def restore(self) -> None:
        """Put everything back as it was."""
        _remove(self.folder)
        shutil.copytree(self.root / "pristine", self.folder)
        (self.folder / CANARY_FILE).write_text(CANARY_TEXT)
        os.mkfifo(self.folder / CANARY_PIPE)

    def remove(self, name: str) -> None:
        """Remove one of the specimens."""
        _remove(self.folder / name)

    def run(self, program: Program, **around: Any) -> Ended:
        """Run a program among the specimens."""
        return self.start(program, **around).wait()

    def start(self, program: Program, place: str = "", **around: Any) -> Running:
        """Start a program among the specimens; what it prints goes to ``place``."""
        variables = around.pop("variables", specimens.environment(self.folder))
        return start(program, self.folder, self.scratch / place, Around(variables, **around))


@dataclass(frozen=True)
class Attempt:
    """What was done, and what became of it.

    Attributes:
        what: was done.
        outcome: ``same``, ``refused`` or ``other``, as :class:`faults.oracles.Verdict` has it.
        defects: all that is wrong with it.
        tried: how often something was tried, where one case tries it often.
    """

    what: str
    outcome: str
    defects: tuple[str, ...]
    tried: int = 1


@dataclass(frozen=True)
class Result:
    """What became of the case of a group and number."""

    part: str
    group: str
    number: int
    attempt: Attempt


@dataclass(frozen=True)
class Group:
    """Cases of one kind.

    Attributes:
        part: of the campaign.
        name: within the part.
        cases: how many the whole campaign has.
        attempt: tries the case of a number.
    """

    part: str
    name: str
    cases: int
    attempt: Callable[[Bench, int, Random], Attempt]

    def result(self, bench: Bench, number: int, seed: int) -> Result:
        """Try one case; the same case whenever its seed, group and number are."""
        random = Random(f"{seed} {self.part} {self.name} {number}")
        bench.restore()
        return Result(self.part, self.name, number, self.attempt(bench, number, random))


def _remove(folder: Path) -> None:
    """Remove a folder, however deep and whatever was done to it."""
    if folder.exists():
        os.system(f"rm -rf '{folder}'")
