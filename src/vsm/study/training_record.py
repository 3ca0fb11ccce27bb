"""What a run directory tells of its training: the command, and the time it took."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from vsm.errors import RunError
from vsm.runs.directory import METRICS_NAME, Directory
from vsm.runs.provenance import command
from vsm.runs.trained_model import RunDirectory
from vsm.settings import RunSettings


def training_record(path: Path, data: str) -> dict[str, Any]:
    """Return how a run was trained.

    Raises:
        RunError: if there is no run, it is of other data, or its training is not at its end.
    """
    run = RunDirectory(path)
    settings = run.settings()
    if settings.data != data:
        raise RunError(f"{path} was trained on {settings.data}, but the study is of {data}")
    rows = run.read_metrics()
    done = max((int(row["step"]) for row in rows), default=0)
    if done < settings.steps or not run.model.is_file():
        raise RunError(
            f"{path} is at step {done} of {settings.steps}; finish it with vsm train --output "
            f"{path} --resume, and ask again"
        )
    return {
        "run": str(path),
        "method": settings.method,
        "steps": settings.steps,
        "tasks": settings.tasks,
        "seconds": _seconds(rows),
        "init": settings.init,
        "init_seconds": _seconds_of_backbone(settings.init),
        "command": command("train", replace(settings, seed=RunSettings().seed)),
    }


def _seconds(rows: list[dict[str, Any]]) -> float | None:
    """Add up the wall clock of a log; it begins at zero again where the run was resumed."""
    times = [float(row["seconds"]) for row in rows if "seconds" in row]
    if not times:
        return None
    ends = [now for now, after in pairwise(times) if after < now]
    return sum(ends) + times[-1]


def _seconds_of_backbone(init: str | None) -> float | None:
    if init is None or not (Path(init) / METRICS_NAME).is_file():
        return None
    return _seconds(Directory(Path(init)).read_metrics())
