"""What no program may do, whatever it is given; none of it knows how the program works."""

import hashlib
import json
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.processes import MOST_BYTES, Ended

EXIT_CODES = (0, 1, 2)
"""Of commands that no signal reached; docs/commands.md."""
MOST_LINES, MOST_LETTERS = 3, 2000  # of an error
LARGE_FILE = 1 << 24
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
VOLATILE = ("seconds", "location", "at", "digest")
Tree = dict[str, str]


@dataclass(frozen=True)
class Verdict:
    """What became of a case: ``same`` answer, ``other`` answer that is right, or ``refused``."""

    outcome: str
    defects: tuple[str, ...] = ()


def tree_of(folder: Path) -> Tree:
    """Return a digest of every file below ``folder``, by its relative path."""
    found: Tree = {}
    for path in sorted(folder.rglob("*")):
        name, status = str(path.relative_to(folder)), path.lstat()
        if not stat.S_ISREG(status.st_mode):
            found[name] = str(stat.S_IFMT(status.st_mode))
        elif status.st_size > LARGE_FILE:
            found[name] = f"{status.st_size} bytes"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def timeless(path: Path) -> str:
    """Return a digest of a file without times and what depends on them.

    Those are the wall clock in logs, and in memories when each change was made.
    """
    content = path.read_bytes()
    try:
        if path.name == "metrics.jsonl":
            text = json.dumps(
                [_without_volatile(json.loads(line)) for line in content.splitlines()]
            )
        elif path.suffix == ".json":
            text = json.dumps(_without_volatile(json.loads(content)))
        elif path.suffix == ".safetensors":
            (size,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + size])
            metadata = json.loads(header.pop("__metadata__")["vsm"])
            text = json.dumps([header, _without_volatile(metadata)])
            text += hashlib.sha256(content[8 + size :]).hexdigest()
        else:
            return hashlib.sha256(content).hexdigest()
    except (ValueError, KeyError, struct.error):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def process_defects(ended: Ended) -> list[str]:
    """Return what is wrong with how a program ended and with what it printed."""
    printed = ended.output + ended.errors
    found = [f"{event}" for event in ended.events if event.startswith("opened")]
    if ended.hung:
        return [*found, "hangs"]
    if found:  # it was ended for it
        return found
    if "Traceback (most recent call last)" in printed:
        last = [line for line in printed.splitlines() if line.strip()][-1]
        found.append(f"traceback: {last[:100]}")
    elif ended.code < 0:
        found.append(f"crashes: signal {-ended.code}")
    elif ended.code not in EXIT_CODES:
        found.append(f"exit code {ended.code}")
    if ended.peak_bytes > MOST_BYTES:
        found.append(f"takes {ended.peak_bytes / (1 << 30):.1f} GB")
    if CONTROL.search(printed):
        found.append("prints control characters")
    if not found and ended.code != 0:
        lines = ended.errors.strip().splitlines()
        if not lines:
            found.append("fails without a word")
        elif len(lines) > MOST_LINES or len(ended.errors) > MOST_LETTERS:
            found.append(f"floods: {len(lines)} lines, {len(ended.errors)} letters")
    return found


def answer_of(ended: Ended) -> Any:
    """Return what was printed, without what differs from run to run.

    Raises:
        ValueError: if it begins like JSON and is none that every program reads.
    """
    if not ended.output.lstrip().startswith("{"):
        return ended.output
    return _without_volatile(json.loads(ended.output, parse_constant=_refuse))


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_volatile(v) for k, v in value.items() if k not in VOLATILE}
    return [_without_volatile(one) for one in value] if isinstance(value, list) else value


def changes(before: Tree, after: Tree, allowed: tuple[str, ...] = ()) -> list[str]:
    """Name files that were made, changed or removed, apart from those below ``allowed``."""
    names = sorted(before.keys() | after.keys())
    changed = [n for n in names if before.get(n) != after.get(n)]
    # What ends so is SQLite's memory, which its readers share; it holds nothing.
    return [n for n in changed if not n.startswith(allowed or "\0") and not n.endswith("-shm")]


def judge(
    ended: Ended,
    before: Tree,
    after: Tree,
    results: Mapping[str, str],
    undisturbed: Mapping[str, Any],
    may_differ: bool,
    writes: tuple[str, ...],
    cache: tuple[str, ...],
) -> Verdict:
    """Judge what a program did with a damaged file.

    Args:
        ended: how it ended.
        before: all files when it began.
        after: all files now.
        results: digests of what it should have written.
        undisturbed: ``answer``, ``files`` and ``events`` of the same program without damage.
        may_differ: whether another answer is right.
        writes: how the names of files begin that it may write if it succeeds.
        cache: how those begin that it may write at any time, for they hold nothing of their own.
    """
    defects = process_defects(ended)
    defects += [e for e in ended.events if e not in undisturbed["events"] and e not in defects]
    if defects or ended.code != 0:
        left = [] if ended.hung or ended.code < 0 else changes(before, after, cache)
        defects += [f"refuses, but has changed {name}" for name in left[:1]]
        return Verdict("refused", tuple(defects))
    try:
        answer = answer_of(ended)
    except ValueError as error:
        return Verdict("other", (f"prints no JSON: {str(error)[:80]}",))
    left = changes(before, after, (*writes, *cache))
    defects += [f"has changed {name}" for name in left[:1]]
    made = changes(before, after, cache)
    defects += [f"has left {n}" for n in made if n not in before and is_temporary(n)][:1]
    if (answer, results) == (undisturbed["answer"], undisturbed["files"]):
        return Verdict("same", tuple(defects))
    if not may_differ:
        defects.append("gives another answer without a word")
    return Verdict("other", tuple(defects))


def is_temporary(name: str) -> bool:
    """Tell whether a file has a name that writers give to what is not finished."""
    return name.rpartition("/")[2].startswith(".")
