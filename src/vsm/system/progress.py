"""What a long computation reports; the command line draws progress bars from it."""


class Progress:
    """Receives stages, steps within them, and messages; this one ignores them."""

    def start(self, title: str, total: int | None) -> None:
        """Begin a stage of ``total`` steps; None if their number is not known."""

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count ``count`` more steps; ``note`` is shown beside the bar."""

    def message(self, text: str) -> None:
        """Show a line of its own."""


NULL_PROGRESS = Progress()
