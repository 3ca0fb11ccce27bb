"""The part ``kills``: SIGKILL at any moment of what writes, and then going on.

After the kill the same command, told to go on or to replace what is there, must leave the same
files as if nothing had happened, byte for byte but for times (:func:`faults.oracles.timeless`).
Temporary files of the killed process may stay, if nothing stumbles over them.
"""

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from faults.bench import Attempt, Bench, Group
from faults.oracles import Tree, process_defects, timeless, tree_of
from faults.processes import Command, Program, command
from faults.specimens import PRETRAIN, TRAIN
from faults.suites import suite


@dataclass(frozen=True)
class Work:
    """Something that writes.

    Attributes:
        name: what it is.
        begin: runs, and is killed.
        go_on: what people do next.
        writes: how the names of the files begin that count.
        cases: kills in the whole campaign.
        clear: what is removed before it begins.
        once: whether it must not be done again if it was done, which the files tell.
    """

    name: str
    begin: Command
    go_on: Program
    writes: tuple[str, ...]
    cases: int = 12
    clear: str | None = None
    once: bool = False


def _again(name: str, *words: str, more: tuple[str, ...] = (), **other: Any) -> Work:
    return Work(name, command(*words), command(*words, *more), **other)


OUT = ("out",)
LEARNED = ("learned/",)
PICTURES = ("--support", "support", "--query", "query", "--model", "learned")
TABLE = ("--budget", "tiny", "--seeds", "1", "--rows", "protonet", "--data", "folder:pictures")
WORKS = (
    _again("train", *TRAIN, "--output", "out", "--resume", writes=OUT, cases=20),
    _again("pretrain", *PRETRAIN, "--output", "out", "--resume", writes=OUT, cases=12),
    _again(
        *("memory learn", "memory", "learn", "--data", "folder:pictures", "--encoder", "run"),
        *("--output", "out", "--json"),
        more=("--overwrite",),
        writes=OUT,
    ),
    _again(
        *("memory add", "memory", "add", "learned", "--images", "support", "--json"),
        writes=LEARNED,
        once=True,
    ),
    _again(
        *("memory forget", "memory", "forget", "learned", "train0", "--json"),
        writes=LEARNED,
        once=True,
    ),
    _again(
        *("memory merge", "memory", "merge", "learned", "learned", "--output", "out.safetensors"),
        more=("--overwrite",),
        writes=OUT,
    ),
    _again(
        *("data prepare", "data", "prepare", "folder:pictures", "--json"),
        writes=("data/folder-",),
        clear="data",
    ),
    _again(
        *("export", "export", "run", "--onnx", "out", "--json"),
        more=("--overwrite",),
        writes=OUT,
        cases=4,
    ),
    _again("classify --csv", "classify", *PICTURES, "--csv", "out.csv", writes=OUT),
    _again(
        *("reproduce", "reproduce", "table-1", "--output", "out", *TABLE, "--json"),
        writes=("out/jobs",),
        cases=6,
    ),
)


def groups() -> list[Group]:
    """Return the kills of every work, and those of both kinds of stores."""
    works = [Group("kills", one.name, one.cases, partial(_attempt, one)) for one in WORKS]
    stores = [
        Group(
            *("kills", f"store, {kind}", 1),
            suite("test_store_kills.py", kind, "VSM_KILLS", 20, f"kills of a writer to {kind}"),
        )
        for kind in ("sqlite", "postgresql")
    ]
    return [*works, *stores]


def _attempt(work: Work, bench: Bench, _: int, random: Random) -> Attempt:
    undisturbed = _undisturbed(work, bench)
    _clear(work, bench)
    before = _files(work, bench)
    after_seconds = random.uniform(0, 1.1 * undisturbed["seconds"])
    moment = time.monotonic() + after_seconds

    def kill(process: int) -> None:
        if time.monotonic() >= moment:
            os.kill(process, signal.SIGKILL)

    ended = bench.run(work.begin, watch=kill)
    what = f"killed after {after_seconds:.2f} of {undisturbed['seconds']:.2f} seconds"
    defects = [] if ended.code == -signal.SIGKILL else process_defects(ended)
    found = _files(work, bench)
    if work.once and found not in (before, undisturbed["files"]):
        defects.append("has left neither what was there nor what should be")
    if not work.once or found == before:
        again = bench.run(work.go_on)
        defects += [f"going on: {one}" for one in process_defects(again)]
        if again.code != 0 and not defects:
            defects.append(f"cannot go on: {again.errors.strip()[-150:]}")
    if not defects:
        defects += _differences(undisturbed["files"], _files(work, bench))
    return Attempt(what, "same", tuple(defects))


def _undisturbed(work: Work, bench: Bench) -> dict[str, Any]:
    """Return what is written without a kill, and how long that takes."""
    if work not in bench.undisturbed:
        _clear(work, bench)
        begin = time.monotonic()
        ended = bench.run(work.begin)
        if ended.code != 0:
            raise RuntimeError(f"{work.name} fails undisturbed: {ended.errors}")
        seconds = time.monotonic() - begin
        bench.undisturbed[work] = {"files": _files(work, bench), "seconds": seconds}
        bench.restore()
    return bench.undisturbed[work]


def _clear(work: Work, bench: Bench) -> None:
    if work.clear is not None:
        bench.remove(work.clear)


def _files(work: Work, bench: Bench) -> Tree:
    """Return digests of what counts."""
    paths = {name: bench.folder / name for name in tree_of(bench.folder)}
    return {
        name: timeless(path)
        for name, path in paths.items()
        if name.startswith(work.writes) and not path.name.startswith(".") and path.is_file()
    }


def _differences(expected: Tree, found: Tree) -> list[str]:
    names = sorted(expected.keys() | found.keys())
    wrong = [name for name in names if expected.get(name) != found.get(name)]
    return [f"differs from an undisturbed one: {', '.join(wrong)[:120]}"] if wrong else []
