"""Atomic writes, locks, and where the user's files go."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from vsm.errors import RunError

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of cells that a spreadsheet computes."""
SQLITE = b"SQLite format 3\0"


def user_folder(kind: Literal["cache", "data"]) -> Path:
    """Return ``$VSM_DATA``, or the platform's folder for files that can be recreated, or cannot."""
    if chosen := os.environ.get("VSM_DATA"):
        return Path(chosen).expanduser()
    import platformdirs  # noqa: PLC0415 - 35 ms that most commands need not spend

    if kind == "cache":
        return platformdirs.user_cache_path("vsm", appauthor=False, opinion=False)
    return platformdirs.user_data_path("vsm", appauthor=False)


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it to ``target`` if the block succeeds.

    If ``target`` is a device or a pipe, such as ``/dev/stdout``, the file is copied into it.
    """
    with add_filename_to_errors(target):
        if target.exists() and not target.is_file() and not target.is_dir():
            with tempfile.TemporaryDirectory(prefix="vsm-") as folder:
                yield Path(folder, "written")
                with Path(folder, "written").open("rb") as file, target.open("wb") as device:
                    shutil.copyfileobj(file, device)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(target)
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to ``target`` if the block succeeds.

    If another process creates ``target`` first, its folder is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    temporary.mkdir()
    try:
        yield temporary
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    r"""Write ``text`` atomically as UTF-8; surrogates are escaped as ``\udcff``, as in JSON."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def add_filename_to_errors(target: Path) -> Iterator[None]:
    """Name ``target`` in an ``OSError`` that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        temporary = f".{target.name}."
        if error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(temporary):
            error.filename = str(target)
        raise


@contextmanager
def exclusive_lock(target: Path, refusal: str | None = None) -> Iterator[None]:
    """Keep other processes from entering the block for the same file or folder.

    The lock file is ``.lock`` in a folder, or ``.NAME.lock`` beside a file, and is removed at the
    end. The system releases the lock however the process ends. If another process holds it, raise
    a :class:`RunError` with the text ``refusal``, or wait if that is None.
    """
    import filelock  # noqa: PLC0415 - 75 ms that most commands need not spend

    file = _lock_file(target)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(file, blocking=refusal is None, poll_interval=0.01)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise RunError(str(refusal)) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove open files
            file.unlink()  # while it is locked: who waits then creates it again
        lock.release()


def is_locked(target: Path) -> bool:
    """Whether a process is inside :func:`exclusive_lock` for ``target``."""
    if not _lock_file(target).exists():
        return False
    try:
        with exclusive_lock(target, "locked"):
            return False
    except RunError:
        return True


def _lock_file(target: Path) -> Path:
    return target / ".lock" if target.is_dir() else target.with_name(f".{target.name}.lock")


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(SQLITE)) == SQLITE


def as_cell(value: object) -> str:
    """Return a CSV cell that no spreadsheet takes for a formula."""
    text = str(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}")
