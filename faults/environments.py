"""The part ``environments``: full disks, other users, tight limits, malicious names."""

import csv
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from faults.mutations import ODD_NAMES, rename_to_bytes
from faults.oracles import changed_files, is_temporary, process_defects, snapshot
from faults.processes import POLL_SECONDS, Command, Completed
from faults.samples import LEARN, PRETRAIN, TRAIN, environment
from faults.sandbox import Group, Outcome, Sandbox

CLASSIFY = "classify --support support --query query --model learned"
WRITERS = tuple(
    Command(words)
    for words in (
        f"{TRAIN} --output out/run",
        f"{PRETRAIN} --output out/run",
        f"{LEARN} --encoder run --output out/run",
        f"{CLASSIFY} --csv out/answers.csv",
        "memory merge learned learned --output out/memory.safetensors",
        "memory export learned out/memory.csv",
        "memory export learned out/memory.npz",
        "review support --model learned --output out/review.html",
        "study study.yaml --render out/page.md",
    )
)
READERS = tuple(
    Command(words)
    for words in (
        f"{CLASSIFY} --json",
        "memory show learned",
        "evaluate learned --way 3 --queries 2 --episodes 2",
        "data info folder:images",
        "models",
        "--help",
    )
)
NAMED = tuple(
    Command(words)
    for words in (
        f"{CLASSIFY} --csv out.csv",
        CLASSIFY,
        "review support --model learned --output out.html",
        "memory add learned --images support",
        "suggest --support support --unlabeled query --model learned",
    )
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


def _outcome(
    fault: str,
    completed: Completed,
    codes: set[int],
    named: str = "",
    left: Sequence[str] = (),
) -> Outcome:
    """Check for success, or one message with an exit code of ``codes`` and no partial files."""
    defects = process_defects(completed)
    message = completed.errors.strip()[-150:]
    if not defects and completed.code not in {0, *codes}:
        defects.append(f"exit code {completed.code}: {message}")
    if not defects and completed.code != 0 and named not in completed.errors:
        defects.append(f"does not mention {named}: {message}")
    defects += [f"has left {name}" for name in left[:1]]
    return Outcome(fault, "refused" if completed.code else "same", tuple(defects))


def _temporary_files(sandbox: Sandbox) -> list[str]:
    return [name for name in snapshot(sandbox.folder) if is_temporary(name)]


def _full_disk(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    target, size = sandbox.folder / "out", random.choice([4096, 16384, 32768])
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(target)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return Outcome("a small disk cannot be mounted here", "same", (), tried=0)
    program = WRITERS[number % len(WRITERS)]
    try:
        completed = sandbox.run(program)
        left = [name for name in snapshot(target) if is_temporary(name)]
    finally:
        subprocess.run(["umount", "-l", str(target)], check=False)
    return _outcome(f"{size} bytes of disk; {program}", completed, {1}, "out", left)


def _largest_file(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    size, program = random.choice([1024, 4096]), WRITERS[number % len(WRITERS)]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Python's default
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    completed = sandbox.run(program, prepare=limit)  # its output is shorter than the limit
    fault = f"files of at most {size} bytes; {program}"
    return _outcome(fault, completed, {1}, left=_temporary_files(sandbox))


def _not_writable(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    program = WRITERS[number % len(WRITERS)]
    before = snapshot(sandbox.folder)
    completed = sandbox.run(program, prepare=_become_nobody)
    changed = changed_files(before, snapshot(sandbox.folder))
    return _outcome(f"may not write; {program}", completed, {1, 2}, left=changed)


def _unreadable(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    name, program = random.choice(SECRETS), READERS[number % 3]
    (sandbox.folder / name).chmod(0)
    completed = sandbox.run(program, prepare=_become_nobody)
    return _outcome(f"may not read {name}; {program}", completed, {1, 2}, named="ermission")


def _few_open_files(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    more, programs = random.choice([2, 4, 8, 16]), (*READERS[:4], *WRITERS)
    program = programs[number % len(programs)]

    def limit() -> None:
        most = max(map(int, os.listdir("/proc/self/fd"))) + more  # noqa: PTH208 - numbers
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    completed = sandbox.run(program, prepare=limit)
    fault = f"{more} more open files; {program}"
    return _outcome(fault, completed, {1, 2}, left=_temporary_files(sandbox))


def _no_home(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    program, variables = READERS[number % len(READERS)], environment(sandbox.folder)
    del variables["HOME"], variables["VSM_DATA"]
    variables["XDG_CACHE_HOME"] = str(sandbox.folder / "home")
    return _outcome(f"without HOME; {program}", sandbox.run(program, variables=variables), {2})


def _c_locale(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    program = READERS[number % len(READERS)]
    (sandbox.folder / "support" / "test0").rename(sandbox.folder / "support" / "Bäume")
    variables = environment(sandbox.folder) | {"LC_ALL": "C", "LANG": "C"}
    completed = sandbox.run(program, variables=variables, prepare=program.execute)
    return _outcome(f"LC_ALL=C; {program}", completed, set())


def _closed_output(sandbox: Sandbox, number: int, _: Random) -> Outcome:
    program = READERS[number % len(READERS)]

    def close() -> None:
        os.close(1)
        program.execute()

    completed = sandbox.run(program, prepare=close)
    return _outcome(f"standard output is closed; {program}", completed, {1})


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
    pressed, seconds, polls = [False], random.uniform(0.05, 4), [0]

    def press(process: int) -> None:
        polls[0] += 1
        if not pressed[0] and polls[0] * POLL_SECONDS > seconds:
            os.kill(process, signal.SIGINT)
            pressed[0] = True

    completed = sandbox.run(program, watch=press, prepare=program.execute)
    fault = f"Ctrl-C after {seconds:.1f} seconds; {program}"
    ours = "Traceback" in completed.errors and f"{os.sep}vsm{os.sep}" in completed.errors
    if completed.code in (1, 130, -signal.SIGINT) and not ours:
        return Outcome(fault, "refused", ())  # before our code runs, Python prints its own message
    return _outcome(fault, completed, {130})


def _malicious_names(sandbox: Sandbox, number: int, random: Random) -> Outcome:
    """Name a class with terminal escapes, spreadsheet formulas or HTML."""
    name, program = random.choice(ODD_NAMES), NAMED[number % len(NAMED)]
    rename_to_bytes(sandbox.folder / "support" / "test0", name)
    outcome = _outcome(f"class {name!r}; {program}", sandbox.run(program), {2})
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
