"""What a run directory says of its training: the command, and the time it took."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from vsm.errors import RunError
from vsm.experiments.provenance import command
from vsm.runs.directory import METRICS_NAME, Directory, RunDirectory
from vsm.settings import RunSettings


def training_record(path: Path, settings: RunSettings) -> dict[str, Any]:
    """Return how a run of ``settings`` was trained.

    Raises:
        RunError: if its training is not at its end.
    """
    run = RunDirectory(path)
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
