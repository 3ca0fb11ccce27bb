"""Start several processes as torchrun would, and wait for what they write."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from forked import ForkedPython

Process = subprocess.Popen[str] | ForkedPython

TINY = [
    *("--way", "5", "--queries", "2", "--tasks", "2", "--checkpoint-every", "5"),
    *("--model.channels", "4", "--model.hidden-units", "8"),
    *("--sampling.train-prototypes", "4", "--sampling.evaluation-prototypes", "4"),
    *("--validation.every", "10", "--validation.episodes", "5", "--learn-memory", "false"),
]


def start(count: int, *words: str | Path) -> list[Process]:
    """Fork ``python WORDS`` ``count`` times, with the environment of one job.

    Processes that join again and again find further ports in ``SPARE_PORTS``.
    """
    port, *spare = free_ports(8)
    job = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job["SPARE_PORTS"] = " ".join(spare)
    return [
        ForkedPython({**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}, *words)
        for rank in range(count)
    ]


def free_ports(count: int) -> list[str]:
    """Ports of this machine that nobody uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


def run(variables: dict[str, str], *words: str | Path) -> "subprocess.Popen[str]":
    """Start ``python WORDS`` with one thread and these environment variables."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: Sequence[Process]) -> list[tuple[int, str]]:
    """Wait for all; return their exit codes and what they said on standard error."""
    with ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)  # closes its pipes and waits for it
            stack.callback(process.kill)
        errors = [process.communicate(timeout=300)[1] for process in processes]
    return [(process.returncode, said) for process, said in zip(processes, errors, strict=True)]


def wait_for(path: Path, processes: Sequence[Process]) -> None:
    """Wait until ``path`` exists; if a process ends before that, or takes too long, end all."""
    deadline = time.monotonic() + 300
    while not path.exists():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            for process in processes:
                process.kill()
            raise AssertionError(f"{path} did not appear: {finish(processes)}")
        time.sleep(0.02)
