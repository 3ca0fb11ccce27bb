"""Files: atomic writes, locks, and YAML and JSON documents, which are untrusted.

Only regular files of limited size are read; depth and aliases are checked before anything is built;
messages quote no value in full. What the package writes holds a digest of the rest, which is
checked when it is read; documents that people write have none.
"""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from vsm.errors import DocumentError, RunError

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of cells that a spreadsheet computes."""
SQLITE = b"SQLite format 3\0"
MAX_YAML_BYTES, MAX_JSON_BYTES = 2**20, 256 * 2**20
MAX_DEPTH = 300  # of brackets within brackets; the sources of merged memories are nested, too
MAX_LETTERS = 300  # of a message
DIGEST_KEY = "digest"
_DIGEST_LINE = re.compile(r"# digest of the lines above: ([0-9a-f]{64})\n\Z")
_NESTED = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


def user_folder(kind: Literal["cache", "data"]) -> Path:
    """Return ``$VSM_DATA``, or the platform's folder for files that can be recreated, or cannot."""
    if chosen := os.environ.get("VSM_DATA"):
        return Path(chosen).expanduser()
    import platformdirs  # noqa: PLC0415 - 35 ms that most commands need not spend

    if kind == "cache":
        return platformdirs.user_cache_path("vsm", appauthor=False, opinion=False)
    return platformdirs.user_data_path("vsm", appauthor=False)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}")


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to ``target``, or copy it to a device, if all goes well."""
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
    """Yield a temporary folder; rename it to ``target`` unless another process made that first."""
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

    The system releases the lock however the process ends. If another process holds it, raise a
    :class:`RunError` with the text ``refusal``, or wait if that is None.
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


def shortened(message: object, most: int = MAX_LETTERS) -> str:
    """Return a message in one line, without the middle of what is long."""
    line = " ".join(str(message).split())
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the contents of a regular file of at most ``most_bytes``."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for somebody to write to it
        raise DocumentError(path, "is not a regular file")
    if status.st_size > most_bytes:
        raise DocumentError(path, f"has {status.st_size:,} bytes, but at most {most_bytes:,}")
    with path.open("rb") as file:
        return file.read(most_bytes)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file, without its digest, which must be right if there is one."""
    return parse_json(read_file(path, MAX_JSON_BYTES), path)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DocumentError(path, f"expected a JSON object, got {_kind(value)}")
    return value


def parse_json(text: str | bytes, source: Path | str, verify: bool = True) -> Any:
    """Return the value of a JSON text; ``verify`` checks and removes a digest if there is one."""
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        depth = 0
        may_be_deep = text.count("[") + text.count("{") > MAX_DEPTH
        for found in _NESTED.finditer(text) if may_be_deep else ():  # strings and brackets
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
            if depth > MAX_DEPTH:
                raise DocumentError(source, f"is nested deeper than {MAX_DEPTH} levels")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(source, _reason(error, "JSON")) from error
    if verify and isinstance(value, dict) and DIGEST_KEY in value:
        stored = value.pop(DIGEST_KEY)
        if stored != digest_of(value):
            raise DocumentError(source, "was changed: its digest belongs to other contents")
    return value


def write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON object with its digest atomically."""
    write_text(path, json.dumps(with_digest(value), ensure_ascii=False, indent=indent) + "\n")


def with_digest(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with its digest, ready for JSON."""
    return {**value, DIGEST_KEY: digest_of(value)}


def digest_of(value: Mapping[str, Any]) -> str:
    """Return a SHA-256 of an object as JSON keeps it, whatever the order of its keys."""
    kept = json.loads(json.dumps(value))  # where keys are strings
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def finite(value: Any) -> Any:
    """Return plain values with null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_digest_line(text: str) -> str:
    """Return lines of YAML and, as a comment, their digest."""
    return f"{text}# digest of the lines above: {hashlib.sha256(text.encode()).hexdigest()}\n"


def read_yaml(path: Path, verify: bool = True) -> Any:
    """Return the value in a YAML file; ``verify`` checks the digest in its last line, if any."""
    try:
        text = read_file(path, MAX_YAML_BYTES).decode("utf-8")
        depth = 0
        for event in yaml.parse(text, _Loader):  # builds nothing, and needs no stack
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if event.anchor is not None:  # aliases in it would multiply what it stands for
                    raise DocumentError(path, "has an alias for a list or mapping; write it out")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                raise DocumentError(path, f"is nested deeper than {MAX_DEPTH} levels")
        found = _DIGEST_LINE.search(text) if verify else None
        if found and with_digest_line(text[: found.start()]) != text:
            hint = "undo that, or remove its last line to keep the change"
            raise DocumentError(path, f"was changed or damaged; {hint}")
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DocumentError(path, _reason(error, "YAML")) from error


def read_mapping(path: Path, verify: bool = True) -> dict[str, Any]:
    """Return the mapping from names in a YAML file."""
    value = read_yaml(path, verify)
    if not isinstance(value, dict):
        raise DocumentError(path, f"expected a mapping, as in 'way: 5', got {_kind(value)}")
    for name in value:
        if not isinstance(name, str):
            raise DocumentError(path, f"expected names of settings, got {shortened(repr(name))}")
    return value


def _reason(error: Exception, kind: str) -> str:
    if isinstance(error, DocumentError):
        return error.reason
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text (byte {error.start})"
    return f"is not {kind}: {shortened(error)}"


def _kind(value: object) -> str:
    kinds = {str: "a text", list: "a list", dict: "an object", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads ``1e-3`` as a number, and a date as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - of PyYAML
        first: [pair for pair in pairs if pair[0].rpartition(":")[2] not in ("timestamp", "float")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*(?:[eE][-+]?\d+)?"
        r"|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"
    ),
    list("-+0123456789."),
)
