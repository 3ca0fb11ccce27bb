"""Open a store by its path or address."""

import importlib.util
import os
import sys
from pathlib import Path

from vsm.errors import StoreError
from vsm.memory.named import EncoderIdentity
from vsm.stores.connections import Database
from vsm.stores.contract import Store
from vsm.system.files import is_sqlite

ADDRESSES = ("postgresql://", "postgres://")
SUFFIX = ".sqlite"


def is_store(target: str) -> bool:
    """Tell whether a path or an address names a store."""
    path = Path(target)
    return (
        target.startswith(ADDRESSES)
        or path.suffix == SUFFIX
        or (path.is_file() and is_sqlite(path))
    )


def default_store(model: str, encoder: EncoderIdentity) -> Path:
    """Return the file of a model's store in the user's data folder; it may not exist yet.

    It is named by the encoder as well, since its features are of no use to another.
    """
    return _data_folder() / "stores" / f"{Path(model).name}-{encoder.fingerprint[:12]}{SUFFIX}"


def open_store(target: str | Path, *, create: bool = True) -> Store:
    """Open a store: ``postgresql://…``, or the path of an SQLite file.

    Args:
        target: what to open.
        create: make the file if there is none.

    Raises:
        StoreError: if it is no store, or of another version.
        StoreUnavailableError: if it cannot be reached.
    """
    from vsm.stores.sql import SqlStore  # noqa: PLC0415 - so that names are cheap to ask for

    return SqlStore(_database(str(target), create))


def _database(target: str, create: bool) -> Database:
    if target.startswith(ADDRESSES):
        missing = [one for one in ("psycopg", "pgvector") if importlib.util.find_spec(one) is None]
        if missing:
            raise StoreError(
                f"store: PostgreSQL needs {' and '.join(missing)}: pip install "
                "'variational-semantic-memory[postgres]'"
            )
        from vsm.stores.postgres import PostgresDatabase  # noqa: PLC0415 - an extra

        return PostgresDatabase(target)
    if "://" in target:
        raise StoreError(f"store: expected a path or postgresql://…, got {target}")
    from vsm.stores.sqlite import SqliteDatabase  # noqa: PLC0415 - as above

    path = Path(target).expanduser()
    if path.is_dir():
        raise StoreError(f"store: {path} is a folder; name a file in it that ends in {SUFFIX}")
    if not create and not path.is_file():
        raise StoreError(f"store: there is none at {path}; vsm serve --store {path} begins one")
    if path.is_file() and path.stat().st_size and not is_sqlite(path):
        raise StoreError(
            f"store: {path} is not a store, which is a file of SQLite; name another, or a new one "
            f"that ends in {SUFFIX}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return SqliteDatabase(path)


def _data_folder() -> Path:
    """Return where data of the user's own belong; not the cache, which may be emptied."""
    if chosen := os.environ.get("VSM_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "vsm"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "vsm"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "vsm"
