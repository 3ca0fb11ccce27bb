"""Databases by path or address, their dialects, and a pool of connections to them.

Drivers follow Python's DB-API, so one :class:`Connection` serves both.
"""

import importlib.util
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vsm.errors import StoreError, StoreUnavailableError
from vsm.memory.named import EncoderIdentity
from vsm.system.files import is_sqlite, user_folder

ADDRESSES = ("postgresql://", "postgres://")
SUFFIX = ".sqlite"
SQLITE_TIMEOUT = 30.0  # seconds to wait for another process that is writing


class Connection:
    """A connection in autocommit mode; SQL has ``?`` as placeholders."""

    def __init__(self, raw: Any, placeholder: str = "?") -> None:
        self.raw, self._placeholder = raw, placeholder
        self.close = raw.close

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a query and return all rows."""
        found: list[tuple[Any, ...]] = self.raw.execute(self._translate(sql), values).fetchall()
        return found

    def change(self, sql: str, *values: Any) -> int:
        """Run a statement and return how many rows it changed."""
        count: int = self.raw.execute(self._translate(sql), values).rowcount
        return count

    def change_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each row of values."""
        self.raw.cursor().executemany(self._translate(sql), rows)

    def _translate(self, sql: str) -> str:
        return sql.replace("?", self._placeholder)


class Database(ABC):
    """How to connect to a database, and its dialect.

    Attributes:
        name: for messages; without the password.
        errors: what its driver raises.
        advice: what to check after such an error.
        types: SQL types by the names in :mod:`vsm.stores.schema`.
        distance: SQL for the distance of a column ``mean`` to ``?``.
        begin_reading: starts a transaction that sees one state of all tables.
        begin_writing: starts one that may change them.
        lock: excludes other transactions that run it, where ``begin_writing`` does not.
    """

    name: str
    errors: tuple[type[Exception], ...]
    advice: str
    types: dict[str, str]
    distance: str
    begin_reading: str
    begin_writing: str
    lock: str | None = None

    @abstractmethod
    def connect(self) -> Connection:
        """Open a connection."""

    def prepare(self, connection: Connection) -> None:  # noqa: B027 - not all need it
        """Do what migrations require, within their transaction."""

    @abstractmethod
    def encode_vector(self, row: Any) -> Any:
        """Return ``row [D]`` of float32 as the driver stores it."""

    @abstractmethod
    def decode_vector(self, vector: Any) -> Any:
        """Invert :meth:`encode_vector`."""


class SqliteDatabase(Database):
    """An SQLite file; one transaction at a time writes.

    With ``synchronous = FULL`` the log is flushed at every commit: neither a killed process nor a
    power cut loses what was committed.
    """

    errors = (sqlite3.Error,)
    advice = "may the file be written, and does no other program hold it?"
    types = {"integer": "INTEGER", "vector": "BLOB", "blob": "BLOB"}  # noqa: RUF012 - constant
    distance = "vsm_distance(mean, ?)"
    begin_reading = "BEGIN"
    begin_writing = "BEGIN IMMEDIATE"

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def connect(self) -> Connection:
        """Open the file, with write-ahead log."""
        raw = sqlite3.connect(
            self.path, timeout=SQLITE_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        try:
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                raw.execute(f"PRAGMA {pragma}")
            raw.create_function("vsm_distance", 2, self._distance, deterministic=True)
        except sqlite3.Error:
            raw.close()
            raise
        return Connection(raw)

    def encode_vector(self, row: Any) -> Any:
        """Return the bytes of ``row [D]``."""
        return np.asarray(row, np.float32).tobytes()

    def decode_vector(self, vector: Any) -> Any:
        """Invert :meth:`encode_vector`."""
        return np.frombuffer(vector, np.float32)

    def _distance(self, first: bytes, second: bytes) -> float:
        return float(np.linalg.norm(self.decode_vector(first) - self.decode_vector(second)))


class Pool:
    """Connections to a database, each used by one thread at a time."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Lend a connection in a transaction that sees one state of all tables."""
        with self._lend(self.database.begin_reading) as connection:
            yield connection

    @contextmanager
    def writing(self, *, exclusive: bool = False) -> Iterator[Connection]:
        """Lend a connection in a transaction; ``exclusive`` ones run one after the other."""
        with self._lend(self.database.begin_writing) as connection:
            if exclusive and self.database.lock is not None:
                connection.rows(self.database.lock)
            yield connection

    @contextmanager
    def single(self) -> Iterator[Connection]:
        """Lend a connection for a single query, which needs no transaction."""
        with self._lend(None) as connection:
            yield connection

    def close(self) -> None:
        """Close all connections; those in use are closed when they are returned."""
        self._is_closed = True
        self._close_idle()

    @contextmanager
    def _lend(self, begin: str | None) -> Iterator[Connection]:
        try:
            connection = self._begin(begin)
            try:
                yield connection
                if begin is not None:
                    connection.change("COMMIT")
            except BaseException:
                try:
                    connection.change("ROLLBACK")
                except self.database.errors:
                    connection.close()
                else:
                    self._give_back(connection)
                raise
            self._give_back(connection)
        except self.database.errors as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise StoreUnavailableError(
                f"store: {self.database.name} cannot be used now ({reason}); {self.database.advice}"
            ) from error

    def _begin(self, begin: str | None) -> Connection:
        """Take a connection and begin; idle connections that broke meanwhile are replaced."""
        with self._lock:
            if self._is_closed:
                raise StoreUnavailableError(f"store: {self.database.name} is closed")
            idle = self._idle.pop() if self._idle else None
        connection = idle or self.database.connect()
        try:
            if begin is not None:
                connection.change(begin)
        except BaseException as error:
            connection.close()
            if idle is None or not isinstance(error, self.database.errors):
                raise
            self._close_idle()
            return self._begin(begin)
        return connection

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def is_store(target: str) -> bool:
    """Whether a path or an address names a store."""
    path = Path(target)
    return (
        target.startswith(ADDRESSES)
        or path.suffix == SUFFIX
        or (path.is_file() and is_sqlite(path))
    )


def default_store(model: str, encoder: EncoderIdentity) -> Path:
    """Return the file of a model's store in the user's data folder; it may not exist yet.

    The encoder is part of its name, since the features are of no use to another one. The folder is
    not the cache, which may be emptied.
    """
    return user_folder("data") / "stores" / f"{Path(model).name}-{encoder.fingerprint[:12]}{SUFFIX}"


def open_database(target: str, create: bool) -> Database:
    """Return the database at a path or an address; see :func:`vsm.stores.open_store`."""
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
    path = Path(target).expanduser()
    if path.is_dir():
        raise StoreError(f"store: {path} is a folder; name a file in it that ends in {SUFFIX}")
    if not create and not path.is_file():
        raise StoreError(f"store: there is none at {path}; vsm serve --store {path} creates one")
    if path.is_file() and path.stat().st_size and not is_sqlite(path):
        raise StoreError(
            f"store: {path} is not a store, which is a file of SQLite; name another, or a new one "
            f"that ends in {SUFFIX}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return SqliteDatabase(path)
