"""The parts ``kills``, ``sharing`` and ``requests``: killed writers, several processes on one run.

After a kill, the same command must leave the same files as if nothing had happened, except for
times. Temporary files of the killed process may stay if they do no harm.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from faults.oracles import (
    Outcome,
    Snapshot,
    changed_files,
    digest_without_times,
    process_defects,
    snapshot,
)
from faults.processes import Command, Completed
from faults.samples import LEARN, PRETRAIN, TRAIN
from faults.sandbox import Group, Sandbox

ROOT = Path(__file__).parents[1]
TEST_SECONDS = 900
WRITERS, READERS = 4, 3
SHOW = Command("memory show learned --json")
CLASSIFY = Command("classify --support support --query query --model learned --json")
MERGE = "memory merge learned learned --output out.safetensors"
REPRODUCE = (
    "reproduce table-1 --output out --budget tiny --seeds 1 --rows protonet --data folder:images "
    "--json"
)


@dataclass(frozen=True)
class Writer:
    """A command that is killed."""

    name: str
    words: str
    writes: str = "out"  # prefix of the files that are compared
    cases: int = 12
    repeat: str = ""  # option that is added when the command is repeated
    clear: str | None = None  # a sample that is removed before
    once: bool = False  # the command must not be repeated if it has succeeded

    def measure(self, sandbox: Sandbox) -> dict[str, Any]:
        """Return the files that are written without a kill, and the time it takes."""
        if self.clear is not None:
            sandbox.remove(self.clear)
        begin = time.monotonic()
        completed = sandbox.run(Command(self.words))
        if completed.code != 0:
            raise RuntimeError(f"{self.name} fails without kill: {completed.errors}")
        return {"seconds": time.monotonic() - begin, "files": self.files(sandbox)}

    def files(self, sandbox: Sandbox) -> Snapshot:
        """Return digests of the files that are compared."""
        paths = {name: sandbox.folder / name for name in snapshot(sandbox.folder)}
        return {
            name: digest_without_times(path)
            for name, path in paths.items()
            if name.startswith(self.writes) and not path.name.startswith(".") and path.is_file()
        }


KILLED = (
    Writer("train", f"{TRAIN} --output out --resume", cases=20),
    Writer("pretrain", f"{PRETRAIN} --output out --resume"),
    Writer("memory learn", f"{LEARN} --encoder run --output out", repeat=" --overwrite"),
    Writer("memory add", "memory add learned --images support --json", "learned/", once=True),
    Writer("memory forget", "memory forget learned train0 --json", "learned/", once=True),
    Writer("memory merge", MERGE, repeat=" --overwrite"),
    Writer("data prepare", "data prepare folder:images --json", "data/folder-", clear="data"),
    Writer("export", "export learned --onnx out --json", cases=4, repeat=" --overwrite"),
    Writer("classify --csv", f"{CLASSIFY.words} --csv out.csv".replace(" --json", "")),
    Writer("reproduce", REPRODUCE, "out/jobs", cases=6),
)


def groups() -> list[Group]:
    """Return kills, concurrent processes, and malformed requests."""
    databases = ("sqlite", "postgresql")
    return [
        *(Group("kills", one.name, one.cases, partial(_kill, one)) for one in KILLED),
        *(
            Group("kills", f"store, {kind}", 1, partial(_tests, "store_kills", kind, 20, 1))
            for kind in databases
        ),
        Group("sharing", "memory add × memory show", 6, _writers_and_readers),
        Group("sharing", "classify while the memory changes", 6, _readers_of_a_run),
        Group("sharing", "two train --resume", 6, partial(_trainings, "resumed")),
        Group("sharing", "two train --resume from nothing", 4, partial(_trainings, "fresh")),
        *(
            Group(
                *("requests", f"every endpoint, {kind}", 1),
                partial(_tests, "serving_fuzz", kind, 40, 18),
            )
            for kind in databases
        ),
    ]


def _tests(
    name: str, words: str, repeats: int, tests: int, sandbox: Sandbox, _: int, __: Random
) -> Outcome:
    """Run the tests of ``tests/test_NAME.py`` whose names contain ``words``.

    Their number is ``tests``, and each repeats itself as an environment variable says.
    """
    fault = f"{repeats * tests} of test_{name}.py, {words}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", words]
    command += [f"--basetemp={sandbox.scratch / 'pytest'}", f"tests/test_{name}.py"]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    variables = dict.fromkeys(("VSM_KILLS", "VSM_FUZZ"), str(repeats)) | {"PYTHONPATH": path}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=TEST_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))][:2]
        return Outcome(fault, "same", (" ".join(failed or lines[-1:])[:300],))
    if "skipped" in lines[-1] and "passed" not in lines[-1]:
        return Outcome(f"{fault}: skipped here", "same", tried=0)
    return Outcome(fault, "same", tried=repeats * tests)


def _kill(writer: Writer, sandbox: Sandbox, _: int, random: Random) -> Outcome:
    baseline = sandbox.baseline(writer, lambda: writer.measure(sandbox))
    if writer.clear is not None:
        sandbox.remove(writer.clear)
    before = writer.files(sandbox)
    delay = random.uniform(0, 1.1 * baseline["seconds"])
    moment = time.monotonic() + delay

    def kill(process: int) -> None:
        if time.monotonic() >= moment:
            os.kill(process, signal.SIGKILL)

    completed = sandbox.run(Command(writer.words), watch=kill)
    defects = [] if completed.code == -signal.SIGKILL else process_defects(completed)
    found = writer.files(sandbox)
    if writer.once and found not in (before, baseline["files"]):
        defects.append("leaves neither the old nor the new files")
    if not writer.once or found == before:
        again = sandbox.run(Command(writer.words + writer.repeat))
        defects += [f"repeated: {one}" for one in process_defects(again)]
        if again.code != 0 and not defects:
            defects.append(f"cannot be repeated: {again.errors.strip()[-150:]}")
    if not defects:
        changed = changed_files(baseline["files"], writer.files(sandbox))
        if changed:
            defects.append(f"differs from a run without kill: {', '.join(changed)[:120]}")
    fault = f"killed after {delay:.2f} of {baseline['seconds']:.2f} seconds"
    return Outcome(fault, "same", tuple(defects))


def _run_together(sandbox: Sandbox, programs: list[Command]) -> tuple[list[Completed], list[str]]:
    """Run programs at the same time; return their results and defects."""
    running = [sandbox.start(one, f"{place}") for place, one in enumerate(programs)]
    completed = [one.wait() for one in running]
    defects = [defect for one in completed for defect in process_defects(one)]
    defects += [f"fails: {one.errors.strip()[-120:]}" for one in completed if one.code]
    return completed, defects


def _writers_and_readers(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    """Add a class in each of several processes; all must be remembered."""
    images = sorted((sandbox.folder / "support").glob("*/*.png"))
    for writer in range(WRITERS):
        folder = sandbox.folder / f"new{writer}" / f"added{writer}"
        folder.mkdir(parents=True)
        shutil.copy(random.choice(images), folder)
    words = "memory add learned --images new{} --json"
    programs = [Command(words.format(writer)) for writer in range(WRITERS)] + [SHOW] * READERS
    random.shuffle(programs)
    _, defects = _run_together(sandbox, programs)
    if not defects:
        names = {slot["name"] for slot in json.loads(sandbox.run(SHOW).output)["slots"]}
        lost = {f"added{writer}" for writer in range(WRITERS)} - names
        defects += [f"{len(lost)} of {WRITERS} classes are lost"] if lost else []
    fault = f"{WRITERS} writers, {READERS} readers, order {number}"
    return Outcome(fault, "same", tuple(defects))


def _readers_of_a_run(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    """Classify while a class is forgotten; every answer is the one before or after."""
    forget = Command(f"memory forget learned train{number} --json")
    before = sandbox.run(CLASSIFY).output
    completed, defects = _run_together(sandbox, [CLASSIFY, forget, CLASSIFY])
    after = sandbox.run(CLASSIFY).output
    if not defects and not {completed[0].output, completed[2].output} <= {before, after}:
        defects.append("gives an answer that is neither the old nor the new one")
    return Outcome(f"forget train{number} while classifying", "same", tuple(defects))


def _trainings(folder: str, sandbox: Sandbox, number: int, random: Random) -> Outcome:
    """Resume one run in two processes: one continues, the other is refused or comes later."""
    writer = Writer("train", f"{TRAIN} --output {folder} --resume", f"{folder}/")
    baseline = sandbox.baseline(writer, lambda: writer.measure(sandbox))
    program = Command(writer.words)
    seconds = random.uniform(0, 0.5)
    first = sandbox.start(program, "first")
    second = sandbox.start(program, "second", prepare=partial(time.sleep, seconds))
    completed = [first.wait(), second.wait()]
    defects = [defect for one in completed for defect in process_defects(one)]
    if all(one.code for one in completed):
        defects.append("both fail")
    if not defects and writer.files(sandbox) != baseline["files"]:
        defects.append("both wrote: the run differs from a single training")
    kind = "refused" if any(one.code for one in completed) else "same"
    return Outcome(f"the second {seconds:.2f} seconds later, number {number}", kind, tuple(defects))
