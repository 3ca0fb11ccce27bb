"""The part ``environments``: full disks, other users, tight limits, malicious names."""

import csv
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from faults.mutations import ODD_NAMES, rename_to_bytes
from faults.oracles import Outcome, changed_files, is_temporary, process_defects, snapshot
from faults.processes import POLL_SECONDS, Command
from faults.samples import LEARN, PRETRAIN, TRAIN
from faults.sandbox import Group, Sandbox

CLASSIFY = "classify --support support --query query --model learned"
WRITERS = (
    Command(f"{TRAIN} --output out/run"),
    Command(f"{PRETRAIN} --output out/run"),
    Command(f"{LEARN} --encoder run --output out/run"),
    Command(f"{CLASSIFY} --csv out/answers.csv"),
    Command("memory merge learned learned --output out/memory.safetensors"),
    Command("memory export learned out/memory.csv"),
    Command("memory export learned out/memory.npz"),
    Command("review support --model learned --output out/review.html"),
    Command("study study.yaml --render out/page.md"),
)
READERS = (
    Command(f"{CLASSIFY} --json"),
    Command("memory show learned"),
    Command("evaluate learned --way 3 --queries 2 --episodes 2"),
    Command("data info folder:images"),
    Command("models"),
    Command("--help"),
)
NAMED = (
    Command(f"{CLASSIFY} --csv out.csv"),
    Command(CLASSIFY),
    Command("review support --model learned --output out.html"),
    Command("memory add learned --images support"),
    Command("suggest --support support --unlabeled query --model learned"),
)
SECRETS = (
    *("learned/config.yaml", "learned/model.safetensors", "learned/memory.safetensors", "learned"),
    *("learned/calibration.json", "query/0.png", "support/test0"),
)
NOBODY = 65534
PROGRESS_BAR = "━"
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?\d+)?")


def groups() -> list[Group]:
    """Return every environment."""
    cases: dict[str, tuple[int, Callable[[Sandbox, int, Random], Outcome]]] = {
        "full disk": (27, _full_disk),
        "largest file": (18, _largest_file),
        "folder of somebody else": (18, _not_writable),
        "unreadable file": (8, _unreadable),
        "few open files": (16, _few_open_files),
        "no HOME": (6, _no_home),
        "LC_ALL=C": (6, _c_locale),
        "closed output": (6, _closed_output),
        "| head": (6, _broken_pipe),
        "Ctrl-C": (8, _interrupted),
        "malicious names": (30, _malicious_names),
    }
    return [Group("environments", name, *one) for name, one in cases.items()]


def _run(
    sandbox: Sandbox,
    fault: str,
    program: Command,
    codes: set[int],
    named: str = "",
    writes: bool = False,
    **options: Any,
) -> Outcome:
    """Run a program: it must succeed, or print one message and exit with one of ``codes``.

    A message must contain ``named``; a program that ``writes`` must leave no temporary files.
    """
    completed = sandbox.run(program, **options)
    defects = process_defects(completed)
    message = completed.errors.strip()[-150:]
    if not defects and completed.code not in {0, *codes}:
        defects.append(f"exit code {completed.code}: {message}")
    if not defects and completed.code != 0 and named not in completed.errors:
        defects.append(f"does not mention {named}: {message}")
    if writes:
        left = [name for name in snapshot(sandbox.folder) if is_temporary(name)]
        defects += [f"has left {name}" for name in left[:1]]
    kind = "refused" if completed.code else "same"
    return Outcome(f"{fault}; {program}", kind, tuple(defects))


def _full_disk(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    target, size = sandbox.folder / "out", random.choice([4096, 16384, 32768])
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(target)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return Outcome("a small disk cannot be mounted here", "same", (), tried=0)
    program = WRITERS[number % len(WRITERS)]
    try:
        return _run(sandbox, f"{size} bytes of disk", program, {1}, "out", writes=True)
    finally:
        subprocess.run(["umount", "-l", str(target)], check=False)


def _largest_file(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    size, program = random.choice([1024, 4096]), WRITERS[number % len(WRITERS)]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Python's default
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # longer than its output

    fault = f"files of at most {size} bytes"
    return _run(sandbox, fault, program, {1}, writes=True, prepare=limit)


def _not_writable(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    program, before = WRITERS[number % len(WRITERS)], snapshot(sandbox.folder)
    outcome = _run(sandbox, "may not write", program, {1, 2}, prepare=_become_nobody)
    changed = changed_files(before, snapshot(sandbox.folder))
    left = [f"has left {name}" for name in changed[:1]]
    return replace(outcome, defects=(*outcome.defects, *left))


def _unreadable(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    name, program = random.choice(SECRETS), READERS[number % 3]
    (sandbox.folder / name).chmod(0)
    fault = f"may not read {name}"
    return _run(sandbox, fault, program, {1, 2}, "ermission", prepare=_become_nobody)


def _few_open_files(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    more, programs = random.choice([2, 4, 8, 16]), (*READERS[:4], *WRITERS)
    program = programs[number % len(programs)]

    def limit() -> None:
        most = max(map(int, os.listdir("/proc/self/fd"))) + more  # noqa: PTH208 - numbers
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    fault = f"{more} more open files"
    return _run(sandbox, fault, program, {1, 2}, writes=True, prepare=limit)


def _no_home(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    variables = sandbox.variables() | {"XDG_CACHE_HOME": str(sandbox.folder / "home")}
    del variables["HOME"], variables["VSM_DATA"]
    return _run(sandbox, "without HOME", READERS[number % len(READERS)], {2}, variables=variables)


def _c_locale(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    program = READERS[number % len(READERS)]
    (sandbox.folder / "support" / "test0").rename(sandbox.folder / "support" / "Bäume")
    variables = sandbox.variables() | {"LC_ALL": "C", "LANG": "C"}
    options: Any = {"variables": variables, "prepare": program.execute}
    return _run(sandbox, "LC_ALL=C", program, set(), **options)


def _closed_output(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    program = READERS[number % len(READERS)]

    def close() -> None:
        os.close(1)
        program.execute()

    return _run(sandbox, "standard output is closed", program, {1}, prepare=close)


def _broken_pipe(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    """Print into a pipe that nobody reads: the program must end without a message."""
    program = READERS[number % len(READERS)]

    def end() -> None:
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(read)
        os.close(write)
        program.execute()

    completed = sandbox.run(program, prepare=end)
    defects = process_defects(replace(completed, code=0, output=""))
    lines = completed.errors.splitlines()
    messages = [line for line in lines if line.strip() and PROGRESS_BAR not in line]
    if messages and not defects:
        defects.append(f"does not end quietly: {messages[-1][-120:]}")
    if completed.code not in (0, 1, 128 + signal.SIGPIPE, -signal.SIGPIPE):
        defects.append(f"exit code {completed.code}")
    return Outcome(f"{program} | head -0", "same", tuple(defects))


def _interrupted(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    """Press Ctrl-C at a random moment, mostly during imports."""
    program = (*READERS[:4], *WRITERS[:3])[number % 7]
    seconds = random.uniform(0.05, 4)
    polls = count(1)

    def press(process: int) -> None:
        if next(polls) == round(seconds / POLL_SECONDS):
            os.kill(process, signal.SIGINT)

    completed = sandbox.run(program, watch=press, prepare=program.execute)
    fault, code = f"Ctrl-C after {seconds:.1f} seconds; {program}", completed.code
    ours = "Traceback" in completed.errors and f"{os.sep}vsm{os.sep}" in completed.errors
    if code in (1, 130, -signal.SIGINT) and not ours:
        return Outcome(fault, "refused")  # before our code runs, Python prints its own message
    defects = process_defects(completed) or ([f"exit code {code}"] if code else [])
    return Outcome(fault, "refused" if code else "same", tuple(defects))


def _malicious_names(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    """Name a class with terminal escapes, spreadsheet formulas or HTML."""
    name, program = random.choice(ODD_NAMES), NAMED[number % len(NAMED)]
    rename_to_bytes(sandbox.folder / "support" / "test0", name)
    outcome = _run(sandbox, f"class {name!r}", program, {2})
    defects = list(outcome.defects)
    table, page = sandbox.folder / "out.csv", sandbox.folder / "out.html"
    if table.is_file():
        with table.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        unsafe = [c for c in cells if c.startswith(FORMULAS) and not NUMBER.fullmatch(c)]
        defects += [f"writes the formula {one[:40]!r}" for one in unsafe[:1]]
    if page.is_file() and b"<script>alert" in page.read_bytes():
        defects.append("writes a name as HTML")
    return replace(outcome, defects=tuple(defects))


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
