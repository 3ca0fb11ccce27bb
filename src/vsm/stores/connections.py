"""Connections to a database, lent to one thread at a time, and transactions on them."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vsm.errors import StoreUnavailableError


class Connection(ABC):
    """A connection to a database; SQL has ``?`` where values go."""

    @abstractmethod
    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return what a query finds."""

    @abstractmethod
    def change(self, sql: str, *values: Any) -> int:
        """Run a statement and return how many rows it changed."""

    @abstractmethod
    def change_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each of many rows."""

    @abstractmethod
    def close(self) -> None:
        """Give it up; what was not committed is gone."""


class Database(ABC):
    """How to connect to a database, and its dialect.

    Attributes:
        name: for messages; it holds no password.
        errors: what its driver raises.
        advice: what to look at when it does.
        types: SQL types by the names that migrations use.
        distance: SQL of the distance of a column ``mean`` to the value ``?``.
        begin_reading: starts a transaction that sees one state of all tables.
        begin_writing: starts one that may change them.
    """

    name: str
    errors: tuple[type[Exception], ...]
    advice: str
    types: dict[str, str]
    distance: str
    begin_reading: str
    begin_writing: str

    @abstractmethod
    def connect(self) -> Connection:
        """Open a connection."""

    @abstractmethod
    def lock(self, connection: Connection) -> None:
        """Keep other processes that ask for the same waiting, until the transaction ends."""

    @abstractmethod
    def prepare(self, connection: Connection) -> None:
        """Do what migrations presume, within their transaction."""

    @abstractmethod
    def vector(self, row: Any) -> Any:
        """Return ``row [D]`` of float32 as the driver stores it."""

    @abstractmethod
    def row(self, vector: Any) -> Any:
        """Return what :meth:`vector` was given."""


class Pool:
    """As many connections as threads need at once."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._idle: list[Connection] = []
        self._guard = threading.Lock()
        self._is_closed = False

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Lend a connection in a transaction that sees one state of all tables."""
        with self._transaction(self.database.begin_reading) as connection:
            yield connection

    @contextmanager
    def writing(self, *, alone: bool = False) -> Iterator[Connection]:
        """Lend a connection in a transaction; ``alone`` excludes others that ask for that."""
        with self._transaction(self.database.begin_writing) as connection:
            if alone:
                self.database.lock(connection)
            yield connection

    @contextmanager
    def single(self) -> Iterator[Connection]:
        """Lend a connection for a single query, which needs no transaction."""
        with self._translated():
            connection = self._take()
            try:
                yield connection
            except self.database.errors:
                connection.close()
                raise
            except BaseException:
                self._give_back(connection)
                raise
            self._give_back(connection)

    def close(self) -> None:
        """Close all connections; those that are lent are closed when they come back."""
        with self._guard:
            idle, self._idle, self._is_closed = self._idle, [], True
        for connection in idle:
            connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        with self._translated():
            connection = self._begun(begin)
            try:
                yield connection
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

    def _begun(self, begin: str) -> Connection:
        """Begin on a connection that lives; nothing has happened yet if an idle one does not."""
        connection = self._take()
        try:
            connection.change(begin)
        except self.database.errors:
            connection.close()
            with self._guard:
                idle, self._idle = self._idle, []
            for other in idle:
                other.close()
            connection = self.database.connect()
            try:
                connection.change(begin)
            except BaseException:
                connection.close()
                raise
        return connection

    def _take(self) -> Connection:
        with self._guard:
            if self._is_closed:
                raise StoreUnavailableError(f"store: {self.database.name} is closed")
            if self._idle:
                return self._idle.pop()
        return self.database.connect()

    def _give_back(self, connection: Connection) -> None:
        with self._guard:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self.database.errors as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise StoreUnavailableError(
                f"store: {self.database.name} cannot be used now ({reason}); {self.database.advice}"
            ) from error
