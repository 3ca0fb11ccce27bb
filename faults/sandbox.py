"""The folder of samples in which cases run, and the definition of a case."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from faults import samples
from faults.mutations import CANARY_FILE, CANARY_PIPE
from faults.oracles import Outcome
from faults.processes import Command, Completed, Program, Running, start

BUILD_SECONDS = 300
CANARY_TEXT = "content of the canary"


class Sandbox:
    """A folder of samples below ``root``, restored before every case.

    ``folder`` is the working directory of programs, ``scratch`` is for everything else, and
    ``baselines`` keeps results of programs without faults.
    """

    def __init__(self, root: Path, quick: bool = False) -> None:
        """Write the samples, or only those that take little time, and keep a copy."""
        self.root, self.folder, self.scratch = root, root / "world", root / "scratch"
        self.baselines: dict[Any, Any] = {}
        (self.folder / "home").mkdir(parents=True)
        samples.write_files(self.folder)
        for program in samples.QUICK_PROGRAMS if quick else samples.PROGRAMS:
            done = self.run(program, seconds=BUILD_SECONDS)
            if done.code != 0:
                raise RuntimeError(f"cannot write a sample: {done.errors or done.output}")
        for name, words in () if quick else samples.INTERRUPTED.items():
            saved = self.folder / name / "resume.safetensors"

            def kill_when_saved(process: int, saved: Path = saved) -> None:
                if saved.exists():
                    os.kill(process, signal.SIGKILL)

            program = Command(f"{words} --output {name}")
            self.run(program, seconds=BUILD_SECONDS, watch=kill_when_saved)
            (self.folder / name / ".lock").unlink(missing_ok=True)  # left by the kill, and empty
        for folder in (root, root.parent):
            folder.chmod(0o755)  # some cases run as another user
        shutil.copytree(self.folder, root / "pristine")

    def variables(self) -> dict[str, str]:
        """Return the environment variables of programs."""
        names = ("PATH", "LD_LIBRARY_PATH")
        return {name: os.environ[name] for name in names if name in os.environ} | {
            "HOME": str(self.folder / "home"),
            "VSM_DATA": str(self.folder / "data"),
            "OMP_NUM_THREADS": "1",
            "MPLCONFIGDIR": str(self.folder / "home"),
            "LANG": "C.UTF-8",
        }

    def restore(self) -> None:
        """Restore the samples."""
        self.remove("")
        shutil.copytree(self.root / "pristine", self.folder)
        (self.folder / CANARY_FILE).write_text(CANARY_TEXT)
        os.mkfifo(self.folder / CANARY_PIPE)

    def remove(self, name: str) -> None:
        """Remove a sample; ``rm`` also removes folders that are too deep for Python."""
        subprocess.run(["rm", "-rf", str(self.folder / name)], check=False)

    def baseline(self, key: Any, measure: Callable[[], Any]) -> Any:
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
        options = {"variables": self.variables(), **options}
        return start(program, self.folder, self.scratch / place, **options)


@dataclass(frozen=True)
class Group:
    """Cases of one kind: ``run`` is called with the sandbox, a number and a random generator."""

    part: str
    name: str
    cases: int
    run: Callable[[Sandbox, int, Random], Outcome]
