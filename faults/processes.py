"""Runs programs in forked processes with limits on time and memory.

Importing torch takes seconds and there are more than a thousand cases, so one process imports
everything once and is forked for every case.
"""

import ctypes
import importlib
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
EXTRA_BYTES = 3 << 30  # address space beyond what a case begins with
POLL_SECONDS = 0.005
PR_SET_PDEATHSIG = 1  # of prctl(2)
OWN_INTERPRETER_EVERY = 40  # cases, of which one starts a new interpreter
OWN_INTERPRETER_AT = 10  # the number of that case: every format has it, the slice does not
CANARY = "canary"
"""Part of the names of files that no program has a reason to open."""
CODE_EXECUTION = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")


@dataclass(frozen=True)
class Completed:
    """The result of a program."""

    code: int  # exit code, or the negative signal number
    output: str
    errors: str
    peak_bytes: int  # largest resident memory
    hung: bool = False  # killed because it took too long
    events: tuple[str, ...] = ()  # suspicious audit events


@dataclass(frozen=True)
class Command:
    """The command ``vsm WORDS``, words separated by spaces."""

    words: str

    def __call__(self) -> int:
        """Run it in this process; return its exit code."""
        from vsm.cli.main import main

        return main(self.words.split())

    def execute(self) -> None:
        """Replace this process by a new interpreter that runs the command."""
        path = os.pathsep.join(filter(None, sys.path))
        variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        arguments = [sys.executable, "-m", "vsm", *self.words.split()]
        os.execve(sys.executable, arguments, variables)

    def __str__(self) -> str:
        return f"vsm {self.words}"


def import_everything() -> None:
    """Import all that a case may need, with one torch thread, since forks lose threads."""
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


@dataclass(frozen=True)
class Running:
    """A started program; its output, errors and events are written to ``files``."""

    process: int
    files: list[Path]
    seconds: float
    watch: Callable[[int], None] | None

    def wait(self) -> Completed:
        """Wait until it ends; kill it if it hangs or opens a canary."""
        last, hung = time.monotonic(), False
        deadline = last + self.seconds
        while True:
            found, status, usage = os.wait4(self.process, os.WNOHANG)
            if found:
                break
            if self.watch is not None:
                self.watch(self.process)
            now = time.monotonic()
            if now - last > 1:  # this process itself was suspended
                deadline += now - last
            last = now
            opened = "opened" in self.files[2].read_text(errors="replace")
            if not hung and (now > deadline or opened):
                hung = now > deadline
                os.kill(self.process, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        output, errors, events = (
            file.read_bytes().decode("utf-8", "surrogateescape") for file in self.files
        )
        return Completed(
            code=os.waitstatus_to_exitcode(status),
            output=output,
            errors=errors,
            peak_bytes=usage.ru_maxrss * 1024,
            hung=hung,
            events=tuple(dict.fromkeys(events.splitlines())),
        )


def start(
    program: Program,
    folder: Path,
    scratch: Path,
    variables: Mapping[str, str] | None = None,
    seconds: float = HANG_SECONDS,
    prepare: Callable[[], None] | None = None,
    watch: Callable[[int], None] | None = None,
) -> Running:
    """Start a program in a forked process.

    Args:
        program: what runs.
        folder: its working directory.
        scratch: folder for files with its output.
        variables: replace all environment variables.
        seconds: after which it counts as hanging.
        prepare: called in its process before it begins.
        watch: called with its process id while it runs.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    files = [scratch / name for name in ("output", "errors", "events")]
    for file in files:
        file.write_bytes(b"")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    process = os.fork()
    if process == 0:
        _run_child(program, folder, files, variables, prepare)  # does not return
    return Running(process, files, seconds, watch)


def _run_child(
    program: Program,
    folder: Path,
    files: list[Path],
    variables: Mapping[str, str] | None,
    prepare: Callable[[], None] | None,
) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        _redirect(files)
        os.chdir(folder)
        if variables is not None:
            os.environ.clear()
            os.environ.update(variables)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        log = os.open(files[2], os.O_WRONLY | os.O_APPEND)
        if prepare is not None:
            prepare()
        _log_suspicious_events(log)
        try:
            code = program() or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _redirect(files: list[Path]) -> None:
    for descriptor, path in enumerate([Path(os.devnull), *files[:2]]):
        opened = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - stays open
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - stays open
    sys.stderr = open(  # noqa: SIM115 - stays open
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


def _log_suspicious_events(log: int) -> None:
    """Log when a canary is opened or code is executed."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in CODE_EXECUTION:
            os.write(log, f"ran {event} {str(arguments[0])[:80]!r}\n".encode())
        elif event == "open" and CANARY in str(arguments[0]):
            os.write(log, f"opened {Path(str(arguments[0])).name!r}\n".encode())

    sys.addaudithook(hook)
