"""PostgreSQL with pgvector, which several servers and machines can share."""

from typing import Any

import numpy as np
import psycopg
from pgvector import Vector
from pgvector.psycopg import register_vector
from psycopg.conninfo import conninfo_to_dict
from psycopg.types import TypeInfo

from vsm.errors import StoreError
from vsm.stores.databases import Connection, Database

OPTIONS = (
    "-c synchronous_commit=on -c statement_timeout=60s -c lock_timeout=30s "
    "-c idle_in_transaction_session_timeout=60s -c client_min_messages=warning"
)


class PostgresDatabase(Database):
    """A PostgreSQL database; every commit is in the log on the server's disk."""

    errors = (psycopg.Error,)
    advice = "is it running, and may it be written?"
    types = {"integer": "BIGINT", "vector": "vector", "blob": "BYTEA"}  # noqa: RUF012 - constant
    distance = "mean <-> ?"
    begin_reading = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    begin_writing = "BEGIN ISOLATION LEVEL READ COMMITTED"
    lock = f"SELECT pg_advisory_xact_lock({0x76736D})"  # "vsm"

    def __init__(self, address: str) -> None:
        try:
            known = conninfo_to_dict(address)
        except psycopg.Error as error:
            raise StoreError(
                "store: expected postgresql://USER:PASSWORD@HOST/DATABASE, got something that "
                f"PostgreSQL cannot read ({type(error).__name__})"
            ) from error
        self.address = address
        self.options = f"{known.get('options') or ''} {OPTIONS}".strip()
        self.name = f"postgresql://{known.get('host') or 'localhost'}/{known.get('dbname') or ''}"

    def connect(self) -> Connection:
        """Connect, and register vectors if the extension is there already."""
        raw = psycopg.connect(
            self.address, autocommit=True, connect_timeout=10, options=self.options
        )
        try:
            if TypeInfo.fetch(raw, "vector") is not None:
                register_vector(raw)
        except BaseException:
            raw.close()
            raise
        return Connection(raw, "%s")

    def prepare(self, connection: Connection) -> None:
        """Create the extension for vectors."""
        try:
            connection.change("CREATE EXTENSION IF NOT EXISTS vector")
        except psycopg.Error as error:
            reason = (str(error).splitlines() or [""])[0]
            raise StoreError(
                f"store: {self.name} lacks the extension vector ({reason}); install pgvector, and "
                "let its owner run CREATE EXTENSION vector"
            ) from error
        register_vector(connection.raw)

    def encode_vector(self, row: Any) -> Any:
        """Return ``row [D]`` as a vector of pgvector."""
        return Vector(np.asarray(row, np.float32))

    def decode_vector(self, vector: Any) -> Any:
        """Invert :meth:`encode_vector`."""
        found = vector.to_numpy() if isinstance(vector, Vector) else vector
        return np.asarray(found, np.float32)
