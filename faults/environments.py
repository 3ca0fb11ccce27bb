"""The part ``environments``: full disks, other users, tight limits, and names that mean harm."""

import csv
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from random import Random

from faults.bench import Attempt, Bench, Group
from faults.formats import ADD
from faults.oracles import changes, is_temporary, process_defects, tree_of
from faults.processes import Ended, command
from faults.specimens import PRETRAIN, TRAIN, environment
from faults.trees import NAMES

PICTURES = ("classify", "--support", "support", "--query", "query", "--model", "learned")
LEARN = ("memory", "learn", "--data", "folder:pictures", "--encoder", "run", "--json")
WRITERS = (
    command(*TRAIN, "--output", "out/run"),
    command(*PRETRAIN, "--output", "out/run"),
    command(*LEARN, "--output", "out/run"),
    command(*PICTURES, "--csv", "out/answers.csv"),
    command("memory", "merge", "learned", "learned", "--output", "out/memory.safetensors"),
    command("memory", "export", "learned", "out/memory.csv"),
    command("memory", "export", "learned", "out/memory.npz"),
    command("review", "support", "--model", "learned", "--output", "out/review.html"),
    command("study", "study.yaml", "--render", "out/page.md"),
)
READERS = (
    command(*PICTURES, "--json"),
    command("memory", "show", "learned"),
    command("evaluate", "learned", "--way", "3", "--queries", "2", "--episodes", "2"),
    command("data", "info", "folder:pictures"),
    command("models"),
    command("--help"),
)
SECRETS = (
    *("learned/config.yaml", "learned/model.safetensors", "learned/memory.safetensors", "learned"),
    *("learned/calibration.json", "query/0.png", "support/test0"),
)
NOBODY = 65534
BAR = "━"  # of progress, which goes on whoever reads the output
FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def groups() -> list[Group]:
    """Return every environment."""
    tried: dict[str, tuple[int, Callable[[Bench, int, Random], Attempt]]] = {
        "full disk": (27, _full_disk),
        "largest file": (18, _largest_file),
        "folder of somebody else": (18, _not_writable),
        "unreadable file": (8, _unreadable),
        "few open files": (16, _few_open_files),
        "no HOME": (6, partial(_without, ("HOME", "VSM_DATA"))),
        "LC_ALL=C": (6, partial(_in_a_process, LC_ALL="C", LANG="C")),
        "closed output": (6, _closed_output),
        "| head": (6, _broken_pipe),
        "Ctrl-C": (8, _interrupted),
        "hostile names": (30, _hostile_names),
    }
    return [Group("environments", name, *one) for name, one in tried.items()]


def _full_disk(bench: Bench, number: int, random: Random) -> Attempt:
    """Write to a disk that has some room, and not enough."""
    target, size = bench.folder / "out", random.choice([4096, 16384, 32768])
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(target)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return Attempt("a small disk cannot be mounted here", "same", (), tried=0)
    program = WRITERS[number % len(WRITERS)]
    try:
        ended = bench.run(program)
        left = [name for name in tree_of(target) if is_temporary(name)]
    finally:
        subprocess.run(["umount", "-l", str(target)], check=False)
    return _told(f"{size} bytes of disk; {program}", ended, {1}, "out", left)


def _largest_file(bench: Bench, number: int, random: Random) -> Attempt:
    """Write where no file may be large."""
    size, program = random.choice([1024, 4096]), WRITERS[number % len(WRITERS)]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python begins
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    # What it prints goes to files, too, but is shorter.
    ended = bench.run(program, prepare=limit)
    left = [name for name in tree_of(bench.folder) if is_temporary(name)]
    return _told(f"files of at most {size} bytes; {program}", ended, {1}, None, left)


def _not_writable(bench: Bench, number: int, _: Random) -> Attempt:
    """Write as somebody who may only read."""
    program = WRITERS[number % len(WRITERS)]
    before = tree_of(bench.folder)
    ended = bench.run(program, prepare=_become_nobody)
    changed = changes(before, tree_of(bench.folder))
    return _told(f"may not write; {program}", ended, {1, 2}, None, changed)


def _unreadable(bench: Bench, number: int, random: Random) -> Attempt:
    """Read what one may not."""
    name, program = random.choice(SECRETS), READERS[number % 3]
    (bench.folder / name).chmod(0)
    ended = bench.run(program, prepare=_become_nobody)
    defects = []
    if ended.code != 0 and not re.search("ermission", ended.errors):
        defects.append(f"does not say that it may not read: {ended.errors.strip()[-150:]}")
    told = _told(f"may not read {name}; {program}", ended, {1, 2}, None, [])
    return Attempt(told.what, told.outcome, (*told.defects, *defects))


def _few_open_files(bench: Bench, number: int, random: Random) -> Attempt:
    more, programs = random.choice([2, 4, 8, 16]), (*READERS[:4], *WRITERS)
    program = programs[number % len(programs)]

    def limit() -> None:
        most = max(map(int, os.listdir("/proc/self/fd"))) + more  # noqa: PTH208 - numbers
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    ended = bench.run(program, prepare=limit)
    left = [name for name in tree_of(bench.folder) if is_temporary(name)]
    return _told(f"{more} more open files; {program}", ended, {1, 2}, None, left)


def _without(names: tuple[str, ...], bench: Bench, number: int, _: Random) -> Attempt:
    kept = environment(bench.folder)
    for name in names:
        del kept[name]
    program = READERS[number % len(READERS)]
    kept["XDG_CACHE_HOME"] = str(bench.folder / "home")
    ended = bench.run(program, variables=kept)
    return _told(f"without {', '.join(names)}; {program}", ended, {2}, None, [])


def _in_a_process(bench: Bench, number: int, _: Random, **variables: str) -> Attempt:
    program = READERS[number % len(READERS)]
    (bench.folder / "support" / "test0").rename(bench.folder / "support" / "Bäume")
    given = environment(bench.folder) | variables
    ended = bench.run(program, variables=given, prepare=program.in_a_process_of_its_own)
    return _told(f"{variables}; {program}", ended, set(), None, [])


def _closed_output(bench: Bench, number: int, _: Random) -> Attempt:
    program = READERS[number % len(READERS)]

    def close() -> None:
        os.close(1)
        program.in_a_process_of_its_own()

    ended = bench.run(program, prepare=close)
    return _told(f"standard output is closed; {program}", ended, {1}, None, [])


def _broken_pipe(bench: Bench, number: int, _: Random) -> Attempt:
    """Print to somebody who does not listen any more, and see that nobody is told of it."""
    program = READERS[number % len(READERS)]

    def end() -> None:
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(read)
        os.close(write)
        program.in_a_process_of_its_own()

    ended = bench.run(program, prepare=end)
    quiet = Ended(0, "", ended.errors, ended.peak_bytes, ended.hung, ended.events)
    defects = process_defects(quiet)
    said = [line for line in ended.errors.splitlines() if line.strip() and BAR not in line]
    if said and not defects:
        defects.append(f"does not end quietly: {said[-1][-120:]}")
    if ended.code not in (0, 1, 128 + signal.SIGPIPE, -signal.SIGPIPE):
        defects.append(f"exit code {ended.code}")
    return Attempt(f"{program} | head -0", "same", tuple(defects))


def _interrupted(bench: Bench, number: int, random: Random) -> Attempt:
    """Press Ctrl-C at any moment, most of which are imports."""
    program = (*READERS[:4], *WRITERS[:3])[number % 7]
    pressed, seconds, polls = [False], random.uniform(0.05, 4), [0]

    def press(process: int) -> None:
        polls[0] += 1
        if not pressed[0] and polls[0] * 0.005 > seconds:
            os.kill(process, signal.SIGINT)
            pressed[0] = True

    ended = bench.run(program, watch=press, prepare=program.in_a_process_of_its_own)
    what = f"Ctrl-C after {seconds:.1f} seconds; {program}"
    ours = "Traceback" in ended.errors and f"{os.sep}vsm{os.sep}" in ended.errors
    if ended.code in (1, 130, -signal.SIGINT) and not ours:
        return Attempt(what, "refused", ())  # before our first line the interpreter speaks
    return _told(what, ended, {130}, None, [])


def _hostile_names(bench: Bench, number: int, random: Random) -> Attempt:
    """Give classes names that mean something to terminals, spreadsheets and browsers."""
    name = random.choice(NAMES)
    folder = os.fsencode(bench.folder / "support")
    os.rename(os.path.join(folder, b"test0"), os.path.join(folder, name))  # noqa: PTH104, PTH118 - bytes
    programs = (
        command(*PICTURES, "--csv", "out.csv"),
        command(*PICTURES),
        command("review", "support", "--model", "learned", "--output", "out.html"),
        command(*ADD[:-1]),
        command("suggest", "--support", "support", "--unlabeled", "query", "--model", "learned"),
    )
    program = programs[number % len(programs)]
    ended = bench.run(program)
    told = _told(f"class {name!r}; {program}", ended, {2}, None, [])
    defects = list(told.defects)
    table, page = bench.folder / "out.csv", bench.folder / "out.html"
    if table.is_file():
        with table.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        unsafe = [c for c in cells if c.startswith(FORMULAS) and not _is_number(c)]
        defects += [f"writes the formula {one[:40]!r}" for one in unsafe[:1]]
    if page.is_file() and b"<script>alert" in page.read_bytes():
        defects.append("writes a name as HTML")
    return Attempt(told.what, told.outcome, tuple(defects))


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?[0-9.]+(e[-+]?\d+)?", text) is not None


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def _told(what: str, ended: Ended, codes: set[int], named: str | None, left: list[str]) -> Attempt:
    """Judge: success, or one line and an exit code of ``codes``, and nothing half done."""
    defects = process_defects(ended)
    if not defects and ended.code not in {0, *codes}:
        defects.append(f"exit code {ended.code}: {ended.errors.strip()[-150:]}")
    if not defects and ended.code != 0 and named is not None and named not in ended.errors:
        defects.append(f"does not name the path: {ended.errors.strip()[-150:]}")
    defects += [f"has left {name}" for name in left[:1]]
    return Attempt(what, "refused" if ended.code else "same", tuple(defects))
