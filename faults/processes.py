"""Programs in processes of their own: forked, bounded, and watched.

Importing torch takes seconds, and a campaign has more than a thousand cases. So one process imports
everything once, and is forked for every case; what a forked case does not cover is the imports.
"""

import ctypes
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Program = Callable[[], int | None]

HANG_SECONDS = 60.0
MOST_BYTES = 2 << 30  # resident
ROOM_BYTES = 3 << 30  # address space beyond what a case begins with, which keeps the machine alive
POLL_SECONDS = 0.005
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
TRUE_PROCESS_EVERY = 40  # cases, of which one begins with an interpreter of its own
CANARY = "canary"
"""What no program has a reason to open carries this in its name."""
CODE_RUNNING = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        code: exit code, or minus the signal that ended it.
        output: of standard output.
        errors: of standard error.
        peak_bytes: the most memory it had resident.
        hung: whether it was still running after the longest time, and was killed for it.
        events: what it did that programs have no reason to do.
    """

    code: int
    output: str
    errors: str
    peak_bytes: int
    hung: bool = False
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Around:
    """What a program runs in.

    Attributes:
        variables: of the environment, in place of all that there are.
        seconds: after which it counts as hanging.
        prepare: what else to do in its process before it begins.
        watch: called with its process id while it runs.
    """

    variables: Mapping[str, str] | None = None
    seconds: float = HANG_SECONDS
    prepare: Callable[[], None] | None = None
    watch: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Command:
    """The command line ``vsm WORDS`` as a program."""

    words: tuple[str, ...]

    def __call__(self) -> int:
        """Run it in this process, and return its exit code."""
        from vsm.cli.main import main

        return main(self.words)

    def in_a_process_of_its_own(self) -> None:
        """Become an interpreter that imports everything itself."""
        path = os.pathsep.join(filter(None, sys.path))
        variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "vsm", *self.words], variables)

    def __str__(self) -> str:
        return f"vsm {' '.join(self.words)}"


def command(*words: str) -> Command:
    """Return the command line ``vsm WORDS`` as a program."""
    return Command(words)


def import_everything() -> None:
    """Import all that a case may need, and let torch use no threads, which forks would lose."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    import vsm

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(vsm.__path__, "vsm."):
        if module.name != "vsm.__main__":
            importlib.import_module(module.name)
    others = ("torch._dynamo", "onnxruntime", "matplotlib.pyplot", "uvicorn", "PIL.Image")
    for name in (*others, "rich.progress", "uvicorn.lifespan.on", "uvicorn.protocols.http.auto"):
        importlib.import_module(name)
    from PIL import Image

    Image.init()


def run(program: Program, folder: Path, scratch: Path, around: Around | None = None) -> Ended:
    """Run a program in ``folder`` until it ends or hangs; what it prints goes to ``scratch``."""
    return start(program, folder, scratch, around).wait()


@dataclass(frozen=True)
class Running:
    """A program that was started."""

    process: int
    files: list[Path]
    around: Around

    def wait(self) -> Ended:
        """Wait until it ends or hangs."""
        status, usage, hung = _waited(self.process, self.files[2], self.around)
        output, errors, events = (
            file.read_bytes().decode("utf-8", "surrogateescape") for file in self.files
        )
        return Ended(
            code=os.waitstatus_to_exitcode(status),
            output=output,
            errors=errors,
            peak_bytes=usage.ru_maxrss * 1024,
            hung=hung,
            events=tuple(dict.fromkeys(events.splitlines())),
        )


def start(program: Program, folder: Path, scratch: Path, around: Around | None = None) -> Running:
    """Start a program in ``folder``; what it prints goes to ``scratch``."""
    scratch.mkdir(parents=True, exist_ok=True)
    files = [scratch / name for name in ("output", "errors", "events")]
    for file in files:
        file.write_bytes(b"")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    around = around or Around()
    process = os.fork()
    if process == 0:
        _become(program, folder, files, around)  # does not return
    return Running(process, files, around)


def _waited(process: int, events: Path, around: Around) -> tuple[int, resource.struct_rusage, bool]:
    """Wait for a process; kill it if it hangs, or has opened what it should not."""
    deadline, hung = time.monotonic() + around.seconds, False
    last = time.monotonic()
    while True:
        found, status, usage = os.wait4(process, os.WNOHANG)
        if found:
            return status, usage, hung
        if around.watch is not None:
            around.watch(process)
        now = time.monotonic()
        if now - last > 1:  # this process itself was stopped meanwhile
            deadline += now - last
        last = now
        if not hung and (now > deadline or "opened" in events.read_text(errors="replace")):
            hung = now > deadline
            os.kill(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _become(program: Program, folder: Path, files: list[Path], around: Around) -> None:
    """Run the program in this process, and end it."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        os.setsid()
        _redirect(files)
        os.chdir(folder)
        if around.variables is not None:
            os.environ.clear()
            os.environ.update(around.variables)
        _limit()
        log = os.open(files[2], os.O_WRONLY | os.O_APPEND)
        if around.prepare is not None:
            around.prepare()
        _watch_calls(log)
        code = _exit_code(program)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _exit_code(program: Program) -> int:
    """Run a program as the interpreter would, and return its exit code."""
    try:
        return program() or 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0


def _redirect(files: list[Path]) -> None:
    given = [Path(os.devnull), *files[:2]]
    for descriptor, path in enumerate(given):
        opened = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    sys.stderr = open(  # noqa: SIM115 - for good
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _watch_calls(log: int) -> None:
    """Write down files that were planted and are opened, and code that is run."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in CODE_RUNNING:
            os.write(log, f"ran {event} {str(arguments[0])[:80]!r}\n".encode())
        elif event == "open" and CANARY in str(arguments[0]):
            os.write(log, f"opened {Path(str(arguments[0])).name!r}\n".encode())

    sys.addaudithook(hook)


def as_json(value: object) -> None:
    """Print one JSON object, as programs of the campaign do that are no commands."""
    print(json.dumps(value, sort_keys=True))
