"""A store in PostgreSQL with pgvector, which many servers and machines can share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import psycopg
from pgvector import Vector
from pgvector.psycopg import register_vector
from psycopg.conninfo import conninfo_to_dict
from psycopg.types import TypeInfo

from vsm.errors import StoreError
from vsm.stores.connections import Connection, Database

LOCK = 0x76736D  # "vsm": the advisory lock of migrations, and of what must happen once
OPTIONS = (
    "-c synchronous_commit=on -c statement_timeout=60s -c lock_timeout=30s "
    "-c idle_in_transaction_session_timeout=60s -c client_min_messages=warning"
)


class PostgresConnection(Connection):
    """A connection; every commit is in the server's log on its disk before it returns."""

    def __init__(self, address: str) -> None:
        given = conninfo_to_dict(address).get("options") or ""
        self._raw = psycopg.connect(
            address, autocommit=True, connect_timeout=10, options=f"{given} {OPTIONS}".strip()
        )
        try:
            if TypeInfo.fetch(self._raw, "vector") is not None:
                register_vector(self._raw)
        except BaseException:
            self._raw.close()
            raise

    def register(self) -> None:
        """Let vectors pass, once the extension is there."""
        register_vector(self._raw)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """See :class:`Connection`."""
        return self._raw.execute(_with_their_marks(sql), values).fetchall()

    def change(self, sql: str, *values: Any) -> int:
        """See :class:`Connection`."""
        return self._raw.execute(_with_their_marks(sql), values or None).rowcount

    def change_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """See :class:`Connection`."""
        with self._raw.cursor() as cursor:
            cursor.executemany(_with_their_marks(sql), rows)

    def close(self) -> None:
        """See :class:`Connection`."""
        self._raw.close()


class PostgresDatabase(Database):
    """The dialect of PostgreSQL."""

    errors = (psycopg.Error,)
    advice = "is it running, and may it be written?"
    types = {"integer": "BIGINT", "vector": "vector", "blob": "BYTEA"}  # noqa: RUF012 - constant
    distance = "mean <-> ?"
    begin_reading = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    begin_writing = "BEGIN ISOLATION LEVEL READ COMMITTED"

    def __init__(self, address: str) -> None:
        try:
            known = conninfo_to_dict(address)
        except psycopg.Error as error:
            raise StoreError(
                "store: expected postgresql://USER:PASSWORD@HOST/DATABASE, got something that "
                f"PostgreSQL cannot read ({type(error).__name__})"
            ) from error
        self.address = address
        self.name = f"postgresql://{known.get('host') or 'localhost'}/{known.get('dbname') or ''}"

    def connect(self) -> PostgresConnection:
        """See :class:`Database`."""
        return PostgresConnection(self.address)

    def lock(self, connection: Connection) -> None:
        """See :class:`Database`."""
        connection.rows("SELECT pg_advisory_xact_lock(?)", LOCK)

    def prepare(self, connection: Connection) -> None:
        """See :class:`Database`: vectors need pgvector."""
        assert isinstance(connection, PostgresConnection)
        try:
            connection.change("CREATE EXTENSION IF NOT EXISTS vector")
        except psycopg.Error as error:
            reason = (str(error).splitlines() or [""])[0]
            raise StoreError(
                f"store: {self.name} lacks the extension vector ({reason}); install pgvector, and "
                "let its owner run CREATE EXTENSION vector"
            ) from error
        connection.register()

    def vector(self, row: Any) -> Any:
        """See :class:`Database`."""
        return Vector(np.asarray(row, np.float32))

    def row(self, vector: Any) -> Any:
        """See :class:`Database`."""
        found = vector.to_numpy() if isinstance(vector, Vector) else vector
        return np.asarray(found, np.float32)


def _with_their_marks(sql: str) -> str:
    return sql.replace("?", "%s")
