"""A process that does one job: ``python -m vsm_lab.worker ROOT KEY``.

Exit codes: 0 done, 2 failed (the job's folder says why), 128 + signal when stopped after saving.
"""

import importlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vsm.errors import DocumentError, RunError
from vsm.system.allocator import keep_allocations
from vsm.system.documents import read_object
from vsm.system.interruption import Interrupted
from vsm_lab.execution import execute
from vsm_lab.jobs import Job


def work(root: str, key: str) -> int:
    """Do the job that ``job.json`` in its folder describes, and return the exit code."""
    keep_allocations()
    described = Path(root) / "jobs" / key / "job.json"
    try:
        job = Job.from_dict(read_object(described))
        execute(Path(root), job)
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        return interruption.exit_code
    except (RunError, DocumentError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


@dataclass(frozen=True)
class SubmittedWork:
    """A job in a scheduler's queue; it goes back there when its time is up."""

    root: str
    key: str

    def __call__(self) -> int:
        """Do it; if time is running out, ask for another turn after saving."""
        ask_again = signal.getsignal(signal.SIGUSR2)  # submitit's; training takes its place
        code = work(self.root, self.key)
        if code == 128 + signal.SIGUSR2 and callable(ask_again):
            ask_again(signal.SIGUSR2, None)
        return code

    def checkpoint(self) -> Any:
        """Return what submitit puts into the queue when time runs out: the same again."""
        return importlib.import_module("submitit.core.utils").DelayedSubmission(self)


if __name__ == "__main__":
    sys.exit(work(*sys.argv[1:]))
