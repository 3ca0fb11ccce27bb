"""What a server accepts. Nothing here imports torch or FastAPI."""

from dataclasses import dataclass, fields

from vsm.errors import SettingsError

LEAST = {"seconds": 0.001, "batch_milliseconds": 0.0}  # others: 1
MOST_PIXELS = 89_478_485  # from where on Pillow warns of decompression bombs


@dataclass(frozen=True)
class Limits:
    """How much one request, and all together, may ask for."""

    file_bytes: int = 20_000_000
    """Of one uploaded file."""
    request_bytes: int = 100_000_000
    """Of one request with all its files."""
    pixels: int = 50_000_000
    """Of one picture, by its header; larger ones are refused before they are decoded."""
    files: int = 64
    """Of one request."""
    examples: int = 1000
    """Of one task."""
    tasks: int = 1000
    """In the store."""
    queue: int = 128
    """Requests under way; more are turned away with 429."""
    seconds: float = 30.0
    """Until a request is given up with 503."""
    batch: int = 64
    """Pictures that pass the model at once."""
    batch_milliseconds: float = 2.0
    """How long the first picture of a batch waits for others."""
    fitted_tasks: int = 32
    """Tasks whose classifiers are kept ready."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = LEAST.get(field.name, 1)
            if not least <= value < float("inf"):
                raise SettingsError(f"limits.{field.name}: must be at least {least}, got {value}")
        if self.pixels > MOST_PIXELS:
            raise SettingsError(
                f"limits.pixels: must be at most {MOST_PIXELS:,}, got {self.pixels}"
            )
