"""What a long computation reports to whoever watches; the command line draws bars from it."""

from typing import Protocol


class Progress(Protocol):
    """Told of stages, of steps within them, and of lines worth reading."""

    def start(self, title: str, total: int | None) -> None:
        """A stage of ``total`` steps begins; None: their number is not known."""

    def advance(self, count: int = 1, note: str = "") -> None:
        """``count`` more steps are done; ``note`` is shown beside the bar."""

    def message(self, text: str) -> None:
        """Something happened that deserves a line of its own."""


class NullProgress:
    """Reports to nobody."""

    def start(self, title: str, total: int | None) -> None:
        """Do nothing."""

    def advance(self, count: int = 1, note: str = "") -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""


NULL_PROGRESS = NullProgress()
