"""Atomic writes: a reader sees the old file or the new one, never half of either."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vsm.errors import RunError

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How cells begin that a spreadsheet computes."""
SQLITE = b"SQLite format 3\0"


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it onto ``target`` if the block succeeds.

    Into a device or a pipe, such as ``/dev/stdout``, it is copied: renaming would replace that.
    """
    with naming(target):
        if target.exists() and not target.is_file() and not target.is_dir():
            with tempfile.TemporaryDirectory(prefix="vsm-") as folder:
                yield Path(folder, "written")
                with Path(folder, "written").open("rb") as file, target.open("wb") as device:
                    shutil.copyfileobj(file, device)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """Let what the system refuses name ``target``: a full disk names nothing."""
    try:
        yield
    except OSError as error:
        beside = f".{target.name}."
        if error.filename is None or Path(os.fsdecode(error.filename)).name.startswith(beside):
            error.filename = str(target)
        raise


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Keep other processes that ask for ``target`` waiting until the block is left.

    The lock is on an empty file beside it, since ``target`` itself is replaced; whoever leaves the
    block removes it. Where there is no ``flock`` nobody waits.
    """
    try:
        import fcntl  # noqa: PLC0415 - not on every system
    except ImportError:
        yield
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    while True:
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
            if not _is_at(file.fileno(), lock):  # who had it before has removed it
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[None]:
    """Refuse to enter the block while another process is in it for the same folder.

    The lock is on the folder itself, and the system gives it back whatever ends the process, so
    nothing is left behind. Where there is no ``flock`` nobody is refused.

    Raises:
        RunError: with the text ``refusal``.
    """
    try:
        import fcntl  # noqa: PLC0415 - not on every system
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(refusal) from None
        yield
    finally:
        os.close(descriptor)


def write_text(target: Path, text: str) -> None:
    r"""Write ``text`` to ``target`` atomically, as UTF-8.

    Of names that are not, bytes are written as ``\udcff``, which JSON reads as the same name.
    """
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def is_sqlite(path: Path) -> bool:
    """Tell whether a file is a database of SQLite, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(SQLITE)) == SQLITE


def as_cell(value: object) -> str:
    """Return a cell of a CSV file that no spreadsheet takes for a formula."""
    text = str(value)
    return f"'{text}" if text.startswith(FORMULA) else text


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary folder; move it to ``target`` if the block succeeds.

    If another process puts ``target`` there first, its folder is kept and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
