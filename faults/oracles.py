"""What no program may do, whatever its input; independent of the implementation."""

import hashlib
import json
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.processes import MOST_BYTES, Completed

EXIT_CODES = (0, 1, 2)  # of commands without a signal; docs/commands.md
MOST_LINES, MOST_CHARACTERS = 3, 2000  # of an error message
LARGE_FILE = 1 << 24
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
CACHE = ("data/embeddings", "home")  # files that any program may write
VOLATILE = ("seconds", "location", "at", "digest")
Snapshot = dict[str, str]
"""A digest of every file by its relative path."""


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    fault: str
    kind: str  # the "same" answer, another valid answer ("other"), or "refused"
    defects: tuple[str, ...] = ()
    tried: int = 1  # number of faults, where one case injects several


def snapshot(folder: Path) -> Snapshot:
    """Return a digest of every file below ``folder``."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        name, status = str(path.relative_to(folder)), path.lstat()
        if not stat.S_ISREG(status.st_mode):
            found[name] = str(stat.S_IFMT(status.st_mode))
        elif status.st_size > LARGE_FILE:
            found[name] = f"{status.st_size} bytes"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def digest_without_times(path: Path) -> str:
    """Return a digest of a file that ignores times in logs and in memories."""
    content = path.read_bytes()
    try:
        if path.name == "metrics.jsonl":
            lines = [_without_volatile(json.loads(line)) for line in content.splitlines()]
            content = json.dumps(lines).encode("utf-8", "surrogatepass")
        elif path.suffix == ".json":
            document = _without_volatile(json.loads(content))
            content = json.dumps(document).encode("utf-8", "surrogatepass")
        elif path.suffix == ".safetensors":
            (size,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + size])
            metadata = _without_volatile(json.loads(header.pop("__metadata__")["vsm"]))
            text = json.dumps([header, metadata]).encode("utf-8", "surrogatepass")
            content = text + content[8 + size :]
    except (ValueError, KeyError, struct.error):
        pass  # not what its name says: all of its bytes count
    return hashlib.sha256(content).hexdigest()


def process_defects(completed: Completed) -> list[str]:
    """Return the defects of an exit code and of the output."""
    printed = completed.output + completed.errors
    found = [event for event in completed.events if event.startswith("opened")]
    if completed.hung:
        return [*found, "hangs"]
    if found:  # it was killed for it
        return found
    if "Traceback (most recent call last)" in printed:
        last = [line for line in printed.splitlines() if line.strip()][-1]
        found.append(f"traceback: {last[:100]}")
    elif completed.code < 0:
        found.append(f"crashes: signal {-completed.code}")
    elif completed.code not in EXIT_CODES:
        found.append(f"exit code {completed.code}")
    if completed.peak_bytes > MOST_BYTES:
        found.append(f"takes {completed.peak_bytes / (1 << 30):.1f} GB")
    if CONTROL.search(printed):
        found.append("prints control characters")
    if not found and completed.code != 0:
        lines = completed.errors.strip().splitlines()
        if not lines:
            found.append("fails without a message")
        elif len(lines) > MOST_LINES or len(completed.errors) > MOST_CHARACTERS:
            found.append(f"long message: {len(lines)} lines, {len(completed.errors)} characters")
    return found


def parse_answer(completed: Completed) -> Any:
    """Return the output without volatile values.

    Raises:
        ValueError: if it begins like JSON but is invalid.
    """
    if not completed.output.lstrip().startswith("{"):
        return completed.output
    return _without_volatile(json.loads(completed.output, parse_constant=_refuse_constant))


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is invalid in JSON")


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_volatile(v) for k, v in value.items() if k not in VOLATILE}
    return [_without_volatile(one) for one in value] if isinstance(value, list) else value


def changed_files(before: Snapshot, after: Snapshot, allowed: tuple[str, ...] = ()) -> list[str]:
    """Return created, changed and removed files, except those that begin with ``allowed``."""
    names = sorted(before.keys() | after.keys())
    changed = [n for n in names if before.get(n) != after.get(n)]
    # SQLite's readers share -shm files, which hold no data.
    return [n for n in changed if not n.startswith(allowed or "\0") and not n.endswith("-shm")]


def check(
    fault: str,
    completed: Completed,
    before: Snapshot,
    after: Snapshot,
    results: Mapping[str, str],
    baseline: Mapping[str, Any],
    may_differ: bool,
    writes: tuple[str, ...],
) -> Outcome:
    """Check what a program did with a damaged file, from all files ``before`` and ``after``.

    ``results`` are digests of the files it should have written, ``baseline`` is ``answer``,
    ``files`` and ``events`` of the same program without damage, ``may_differ`` says whether
    another answer is valid, and files that begin with ``writes`` may change if it succeeds.
    """
    defects = process_defects(completed)
    defects += [e for e in completed.events if e not in baseline["events"] and e not in defects]
    if defects or completed.code != 0:
        killed = completed.hung or completed.code < 0
        left = [] if killed else changed_files(before, after, CACHE)
        defects += [f"refuses, but has changed {name}" for name in left[:1]]
        return Outcome(fault, "refused", tuple(defects))
    try:
        answer = parse_answer(completed)
    except ValueError as error:
        return Outcome(fault, "other", (f"prints invalid JSON: {str(error)[:80]}",))
    left = changed_files(before, after, (*writes, *CACHE))
    defects += [f"has changed {name}" for name in left[:1]]
    created = changed_files(before, after, CACHE)
    defects += [f"has left {n}" for n in created if n not in before and is_temporary(n)][:1]
    if (answer, results) == (baseline["answer"], baseline["files"]):
        return Outcome(fault, "same", tuple(defects))
    if not may_differ:
        defects.append("gives another answer without a message")
    return Outcome(fault, "other", tuple(defects))


def is_temporary(name: str) -> bool:
    """Whether a file is named like those of writers that have not finished."""
    return name.rpartition("/")[2].startswith(".")
