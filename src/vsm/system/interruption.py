"""Stopping on Ctrl-C, termination, or a scheduler's warning that time is up."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR2") if hasattr(signal, name)
)


class Interrupted(Exception):  # noqa: N818 - it is a request that was honored, not an error
    """Training stopped on request after saving; ``exit_code`` is the shell's 128 + signal."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopRequest:
    """Whether, and by which signal, the process was asked to stop."""

    signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn the first SIGINT, SIGTERM or SIGUSR2 into a request; a second one acts at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # signals can only be handled in the main thread
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, _: FrameType | None) -> None:
        request.signal_number = number
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
