"""Single measurements on disk, named by what they are of, so that none is made twice."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vsm.reproduction.jobs import RESULTS_VERSION
from vsm.system.files import write_text

RUN_FILES = ("config.yaml", "model.safetensors", "memory.safetensors")


class Parts:
    """A folder with one JSON file for each measurement.

    A name is the digest of all that the measurement depends on. A file that cannot be read is as
    good as none: it is measured again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = 0
        self.measured = 0

    def get(self, of: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what was found ``of`` something, measuring it if that was not yet done."""
        of = {**of, "version": RESULTS_VERSION}
        key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:24]
        path = self.folder / f"{key}.json"
        found = _read(path)
        if found is not None:
            self.kept += 1
            return found
        # Through JSON, so that a kept measurement and a fresh one are the same.
        text = json.dumps({"of": of, "found": measure()}, ensure_ascii=False)
        write_text(path, text)
        self.measured += 1
        fresh: dict[str, Any] = json.loads(text)["found"]
        return fresh


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["found"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def digest_of_run(path: Path) -> str:
    """Return the digest of a run's settings, model and memory."""
    digest = hashlib.sha256()
    for name in RUN_FILES:
        if (path / name).is_file():
            digest.update((path / name).read_bytes())
        digest.update(b"\x1f")
    return digest.hexdigest()
