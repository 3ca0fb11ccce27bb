"""A store in one SQLite file."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vsm.stores.connections import Connection, Database

WAIT = 30.0  # seconds until another process is done writing


class SqliteConnection(Connection):
    """A connection to the file; every commit is on the disk before it returns.

    With ``synchronous = FULL`` the log is flushed at every commit: neither a killed process nor a
    power cut loses what was committed.
    """

    def __init__(self, path: Path) -> None:
        self._raw = sqlite3.connect(
            path, timeout=WAIT, isolation_level=None, check_same_thread=False
        )
        try:
            self._raw.execute("PRAGMA journal_mode = WAL")
            self._raw.execute("PRAGMA synchronous = FULL")
            self._raw.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error:
            self._raw.close()
            raise
        self._raw.create_function("vsm_distance", 2, _distance, deterministic=True)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """See :class:`Connection`."""
        return self._raw.execute(sql, values).fetchall()

    def change(self, sql: str, *values: Any) -> int:
        """See :class:`Connection`."""
        return self._raw.execute(sql, values).rowcount

    def change_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """See :class:`Connection`."""
        self._raw.executemany(sql, rows)

    def close(self) -> None:
        """See :class:`Connection`."""
        self._raw.close()


class SqliteDatabase(Database):
    """The dialect of SQLite. One transaction at a time writes, others wait up to ``WAIT``."""

    errors = (sqlite3.Error,)
    advice = "may the file be written, and does no other program hold it?"
    types = {"integer": "INTEGER", "vector": "BLOB", "blob": "BLOB"}  # noqa: RUF012 - constant
    distance = "vsm_distance(mean, ?)"
    begin_reading = "BEGIN"
    begin_writing = "BEGIN IMMEDIATE"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def connect(self) -> SqliteConnection:
        """See :class:`Database`."""
        return SqliteConnection(self.path)

    def lock(self, connection: Connection) -> None:
        """See :class:`Database`; who writes is alone already."""

    def prepare(self, connection: Connection) -> None:
        """See :class:`Database`; nothing is presumed."""

    def vector(self, row: Any) -> Any:
        """See :class:`Database`."""
        return np.asarray(row, np.float32).tobytes()

    def row(self, vector: Any) -> Any:
        """See :class:`Database`."""
        return np.frombuffer(vector, np.float32)


def _distance(first: bytes, second: bytes) -> float:
    apart = np.frombuffer(first, np.float32) - np.frombuffer(second, np.float32)
    return float(np.linalg.norm(apart))
