"""A process that does one job: ``python -m vsm.reproduction.worker ROOT KEY``.

Exit codes: 0 done, 2 failed (the job's folder says why), 128 + signal when stopped after saving.
"""

import json
import sys
from pathlib import Path

from vsm.errors import RunError
from vsm.interruption import Interrupted
from vsm.reproduction.execution import execute
from vsm.reproduction.jobs import Job
from vsm.runtime import keep_allocations


def work(root: str, key: str) -> int:
    """Do the job that ``job.json`` in its folder describes, and return the exit code."""
    keep_allocations()
    described = Path(root) / "jobs" / key / "job.json"
    job = Job.from_dict(json.loads(described.read_text(encoding="utf-8")))
    try:
        execute(Path(root), job)
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        return interruption.exit_code
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(work(*sys.argv[1:]))
