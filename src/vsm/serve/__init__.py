"""An HTTP server: images in, answers out, with tasks and memory in a persistent store.

A request passes :mod:`middleware` (token, limits), :mod:`app` (what each address does),
:mod:`schemas` (validation, decoding) and :mod:`batching` (batches, classifiers, answers).
:mod:`server` runs the application. Its limits are here, where nothing imports torch or FastAPI.
"""

from dataclasses import dataclass, fields

from vsm.errors import SettingsError

MINIMUM = {"seconds": 0.001, "batch_milliseconds": 0.0}  # others: 1
MAX_PIXELS = 89_478_485  # above which Pillow warns of decompression bombs


@dataclass(frozen=True)
class Limits:
    """How much one request, and all together, may ask for."""

    file_bytes: int = 20_000_000
    """Bytes of one uploaded file."""
    request_bytes: int = 100_000_000
    """Bytes of one request with all its files."""
    pixels: int = 50_000_000
    """Pixels of one image, by its header; larger ones are refused before they are decoded."""
    files: int = 64
    """Files of one request."""
    examples: int = 1000
    """Examples of one task."""
    tasks: int = 1000
    """Tasks in the store."""
    queue: int = 128
    """Requests under way; more are turned away with 429."""
    seconds: float = 30.0
    """Seconds until a request is given up with 503."""
    batch: int = 64
    """Images that pass the model at once."""
    batch_milliseconds: float = 2.0
    """How long the first image of a batch waits for others."""
    fitted_tasks: int = 32
    """Tasks whose classifiers are kept ready."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            minimum = MINIMUM.get(field.name, 1)
            if not minimum <= value < float("inf"):
                raise SettingsError(f"limits.{field.name}: must be at least {minimum}, got {value}")
        if self.pixels > MAX_PIXELS:
            raise SettingsError(f"limits.pixels: must be at most {MAX_PIXELS:,}, got {self.pixels}")
