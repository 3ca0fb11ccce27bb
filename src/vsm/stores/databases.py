"""SQLite and PostgreSQL behind one interface: a pool of connections with transactions.

Both drivers follow Python's DB-API, so one :class:`Connection` serves both.
"""

import importlib.util
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vsm.encoders import EncoderIdentity
from vsm.errors import StoreError, StoreUnavailableError
from vsm.system.files import is_sqlite, user_folder

ADDRESSES = ("postgresql://", "postgres://")
SUFFIX = ".sqlite"
SQLITE_TIMEOUT = 30.0  # seconds to wait for another process that is writing
POSTGRES_OPTIONS = (
    "-c synchronous_commit=on -c statement_timeout=60s -c lock_timeout=30s "
    "-c idle_in_transaction_session_timeout=60s -c client_min_messages=warning"
)


class Connection:
    """A connection in autocommit mode; SQL has ``?`` as placeholders."""

    def __init__(self, raw: Any, placeholder: str) -> None:
        self.raw, self._placeholder = raw, placeholder
        self.close = raw.close

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a query and return all rows."""
        found: list[tuple[Any, ...]] = self._execute(sql, values).fetchall()
        return found

    def change(self, sql: str, *values: Any) -> int:
        """Run a statement and return how many rows it changed."""
        count: int = self._execute(sql, values).rowcount
        return count

    def change_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each row of values."""
        self.raw.cursor().executemany(sql.replace("?", self._placeholder), rows)

    def _execute(self, sql: str, values: tuple[Any, ...]) -> Any:
        return self.raw.execute(sql.replace("?", self._placeholder), values)


@dataclass
class Database:
    """A database and a pool of connections to it, each used by one thread at a time."""

    name: str  # for messages; without the password
    connect: Callable[[], Any]  # opens a connection of the driver, in autocommit mode
    errors: tuple[type[Exception], ...]  # what the driver raises
    advice: str  # what to check after such an error
    placeholder: str  # for values in SQL
    begin_reading: str  # starts a transaction that sees one state of all tables
    begin_writing: str  # starts one that may change them
    lock: str | None = None  # excludes others that run it, where begin_writing does not

    def __post_init__(self) -> None:
        self._idle: list[Connection] = []
        self._is_closed = False

    def reading(self) -> AbstractContextManager[Connection]:
        """Lend a connection in a transaction that sees one state of all tables."""
        return self._lend(self.begin_reading)

    def writing(self, *, exclusive: bool = False) -> AbstractContextManager[Connection]:
        """Lend a connection in a transaction; ``exclusive`` ones run one after the other."""
        return self._lend(self.begin_writing, self.lock if exclusive else None)

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a single query, which needs no transaction, and return all rows."""
        with self._lend(None) as connection:
            return connection.rows(sql, *values)

    def close(self) -> None:
        """Close all connections; those in use are closed when they are returned."""
        self._is_closed = True
        self._close_idle()

    @contextmanager
    def _lend(self, begin: str | None, lock: str | None = None) -> Iterator[Connection]:
        try:
            connection = self._begin(begin)
            try:
                if lock is not None:
                    connection.rows(lock)
                yield connection
                if begin is not None:
                    connection.change("COMMIT")
            except BaseException:
                connection.close()  # which rolls back
                raise
            self._idle.append(connection)
            if self._is_closed:
                self._close_idle()
        except self.errors as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise StoreUnavailableError(
                f"store: {self.name} cannot be used now ({reason}); {self.advice}"
            ) from error

    def _begin(self, begin: str | None) -> Connection:
        """Take a connection and begin; idle connections that broke meanwhile are replaced."""
        if self._is_closed:
            raise StoreUnavailableError(f"store: {self.name} is closed")
        idle = self._take_idle()
        connection = idle or Connection(self.connect(), self.placeholder)
        try:
            if begin is not None:
                connection.change(begin)
        except self.errors:
            connection.close()
            if idle is None:
                raise
            self._close_idle()
            return self._begin(begin)
        return connection

    def _take_idle(self) -> Connection | None:
        try:
            return self._idle.pop()  # atomic, so threads need no lock
        except IndexError:
            return None

    def _close_idle(self) -> None:
        while (connection := self._take_idle()) is not None:
            connection.close()


def sqlite_database(path: Path) -> Database:
    """Return an SQLite file as a database; one transaction at a time writes.

    With ``synchronous = FULL`` the log is flushed at every commit: neither a killed process nor a
    power cut loses what was committed.
    """
    # A damaged file may give messages that are not UTF-8, which sqlite3 does not decode.
    errors = (sqlite3.Error, UnicodeDecodeError)

    def connect() -> sqlite3.Connection:
        raw = sqlite3.connect(
            path, timeout=SQLITE_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        try:
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                raw.execute(f"PRAGMA {pragma}")
        except errors:
            raw.close()
            raise
        return raw

    advice = "may the file be written, and does no other program hold it?"
    return Database(str(path), connect, errors, advice, "?", "BEGIN", "BEGIN IMMEDIATE")


def postgres_database(address: str) -> Database:
    """Return a PostgreSQL database; every commit is in the log on the server's disk."""
    if importlib.util.find_spec("psycopg") is None:
        raise StoreError(
            "store: PostgreSQL needs psycopg: pip install 'variational-semantic-memory[postgres]'"
        )
    import psycopg  # noqa: PLC0415 - an extra
    from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415

    try:
        known = conninfo_to_dict(address)
    except psycopg.Error as error:
        raise StoreError(
            "store: expected postgresql://USER:PASSWORD@HOST/DATABASE, got something that "
            f"PostgreSQL cannot read ({type(error).__name__})"
        ) from error
    options = f"{known.get('options') or ''} {POSTGRES_OPTIONS}".strip()
    return Database(
        f"postgresql://{known.get('host') or 'localhost'}/{known.get('dbname') or ''}",
        partial(psycopg.connect, address, autocommit=True, connect_timeout=10, options=options),
        (psycopg.Error,),
        "is it running, and may it be written?",
        placeholder="%s",
        begin_reading="BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
        begin_writing="BEGIN ISOLATION LEVEL READ COMMITTED",
        lock=f"SELECT pg_advisory_xact_lock({0x76736D})",  # "vsm"
    )


def is_store(target: str) -> bool:
    """Whether a path or an address names a store."""
    path = Path(target)
    is_file = path.suffix == SUFFIX or (path.is_file() and is_sqlite(path))
    return is_file or target.startswith(ADDRESSES)


def default_store(model: str, encoder: EncoderIdentity) -> Path:
    """Return the file of a model's store in the user's data folder, which is not emptied as caches.

    The encoder is part of its name, since the features are of no use to another one.
    """
    return user_folder("data") / "stores" / f"{Path(model).name}-{encoder.fingerprint[:12]}{SUFFIX}"


def open_database(target: str, create: bool) -> Database:
    """Return the database at a path or an address; see :func:`vsm.stores.open_store`."""
    if target.startswith(ADDRESSES):
        return postgres_database(target)
    path = Path(target).expanduser()
    if "://" in target:
        raise StoreError(f"store: expected a path or postgresql://…, got {target}")
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
    return sqlite_database(path)
