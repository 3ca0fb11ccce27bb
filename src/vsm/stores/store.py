"""The store, in SQL that SQLite and PostgreSQL share.

Two rules let several servers share a store. A transaction that changes a task, or the memory,
increments its version first, which locks that row until the transaction ends; a task is locked
before the memory, so there is no deadlock. And several tables are read in one transaction, which
sees one state of all of them.
"""

import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from vsm.errors import NotStoredError, StoreError, StoreFullError
from vsm.memory.codec import (
    ClassRow,
    Head,
    decode_rows,
    digest_values,
    encode_head,
    encode_rows,
    event_text,
    memory_digest,
)
from vsm.memory.named import Changes, EncoderIdentity, NamedMemory
from vsm.stores.databases import Connection, Database, Pool, open_database
from vsm.stores.records import (
    Consolidate,
    Example,
    NewExample,
    RememberedClass,
    Row,
    StoredMemory,
    Support,
    Task,
    Versions,
    name_error,
)
from vsm.stores.schema import migrate
from vsm.system.documents import shortened

ID = re.compile(r"[0-9a-f]{32}")
TASKS = "SELECT id, name, created, version FROM vsm_tasks"
COUNTS = "SELECT task, label, COUNT(*) FROM vsm_examples"
CLASS = "name, class_id, count, last_update, freedom, content, factors"
CLASS_COLUMNS = tuple(f"{CLASS}, folded, place, added, mean".split(", "))
UPDATED = ("class_id", "count", "last_update", "freedom", "content", "factors", "added", "mean")
UPDATE_CLASS = (
    f"ON CONFLICT (name) DO UPDATE SET {', '.join(f'{one} = excluded.{one}' for one in UPDATED)}"
)


class Store:
    """Tasks, examples and the memory of one encoder.

    Every method is one transaction: all of it is stored once it returns, whatever happens to the
    process, and none of it if it raises. Any thread may call any method; other processes may use
    the same store.

    Raises:
        NotStoredError: if there is no such task, example or class.
        StoreFullError: if a limit is reached.
        StoreUnavailableError: if the database cannot be reached or written.
        StoreError: if a name is invalid, or stored data are damaged.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._pool = Pool(database)
        self._cached: StoredMemory | None = None
        self._lock = threading.Lock()
        try:
            migrate(self._pool)
        except BaseException:
            self._pool.close()
            raise

    def __repr__(self) -> str:
        return f"store {self.database.name}"

    def bind(self, encoder: EncoderIdentity, memory: NamedMemory | None) -> None:
        """Initialize with an encoder and its memory, or check that the store is of that encoder."""
        with self._pool.writing(exclusive=True) as connection:
            found = _encoder(connection)
            if found is None:
                values = (1, *encoder, *encode_head(memory), memory_digest(memory))
                columns = ("version", "encoder", "fingerprint", *Head._fields, "digest")
                _insert(connection, "vsm_memory", columns, [values])
                self._write_classes(connection, None, memory)
            elif found.fingerprint != encoder.fingerprint:
                raise StoreError(
                    f"store: {self.database.name} holds features of the encoder {found}, but the "
                    f"model makes those of {encoder}; serve the model that it was created with, or "
                    "name another --store"
                )

    def encoder(self) -> EncoderIdentity | None:
        """Return whose features it holds; None before the first :meth:`bind`."""
        with self._pool.single() as connection:
            return _encoder(connection)

    def check(self) -> None:
        """Raise unless the database answers."""
        with self._pool.reading() as connection:
            connection.rows("SELECT version FROM vsm_memory")

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def create_task(self, name: str, max_tasks: int) -> Task:
        """Create a task, unless there are ``max_tasks`` already."""
        _require_name("name", name)
        task = Task(uuid.uuid4().hex, name, _now(), 1, {})
        with self._pool.writing(exclusive=True) as connection:
            [[count, place]] = connection.rows(
                "SELECT COUNT(*), COALESCE(MAX(place), 0) FROM vsm_tasks"
            )
            if count >= max_tasks:
                raise StoreFullError(
                    f"tasks: there are {count} already, of at most {max_tasks}; delete one"
                )
            columns = ("id", "name", "created", "version", "place")
            _insert(
                connection,
                "vsm_tasks",
                columns,
                [(task.id, name, task.created, task.version, place + 1)],
            )
        return task

    def tasks(self) -> list[Task]:
        """Return all tasks, oldest first."""
        with self._pool.reading() as connection:
            found = connection.rows(f"{TASKS} ORDER BY place")
            counts = connection.rows(f"{COUNTS} GROUP BY task, label")
        return _with_counts(found, counts)

    def task(self, task: str) -> Task:
        """Return one task."""
        _require_id("task", task)
        with self._pool.reading() as connection:
            found = connection.rows(f"{TASKS} WHERE id = ?", task)
            counts = connection.rows(f"{COUNTS} WHERE task = ? GROUP BY task, label", task)
        if not found:
            raise _no_task(task)
        return _with_counts(found, counts)[0]

    def delete_task(self, task: str) -> None:
        """Delete a task and its examples; what the memory learned from it stays."""
        _require_id("task", task)
        with self._pool.writing() as connection:
            if not connection.change("DELETE FROM vsm_tasks WHERE id = ?", task):
                raise _no_task(task)

    def add_examples(
        self, task: str, label: str, examples: Sequence[NewExample], max_examples: int
    ) -> list[str]:
        """Add examples of a class, unless a task would have over ``max_examples``; return ids."""
        _require_name("label", label)
        ids, now = [uuid.uuid4().hex for _ in examples], _now()
        with self._changing(task) as connection:
            [[count, place]] = connection.rows(
                "SELECT COUNT(*), COALESCE(MAX(place), 0) FROM vsm_examples WHERE task = ?", task
            )
            if count + len(examples) > max_examples:
                raise StoreFullError(
                    f"files: the task has {count} examples, and {len(examples)} more would be over "
                    f"the limit of {max_examples}; delete some, or begin another task"
                )
            columns = ("id", "task", "label", "created", "remembered", "place", "digest")
            values = [
                (id_, task, label, now, 0, place, example_digest(label, one.embedding), *encoded)
                for place, (id_, one) in enumerate(zip(ids, examples, strict=True), place + 1)
                for encoded in [one._replace(embedding=self.database.encode_vector(one.embedding))]
            ]
            _insert(connection, "vsm_examples", (*columns, *NewExample._fields), values)
        return ids

    def examples(self, task: str) -> list[Example]:
        """Return the examples of a task, oldest first."""
        self.task(task)
        with self._pool.single() as connection:
            rows = connection.rows(
                "SELECT id, label, file, created, remembered FROM vsm_examples WHERE task = ? "
                "ORDER BY place",
                task,
            )
        return [
            Example(id_, label, file, created, bool(remembered))
            for id_, label, file, created, remembered in rows
        ]

    def support(self, task: str) -> Support:
        """Return the embedded examples of a task."""
        _require_id("task", task)
        with self._pool.reading() as connection:
            if not connection.rows("SELECT id FROM vsm_tasks WHERE id = ?", task):
                raise _no_task(task)
            return self._support(connection, task)

    def thumbnail(self, task: str, example: str) -> bytes:
        """Return the PNG of an example."""
        return bytes(self._example_column("thumbnail", task, example))

    def original(self, task: str, example: str) -> bytes | None:
        """Return the uploaded file of an example; None if it was not kept."""
        found = self._example_column("original", task, example)
        return None if found is None else bytes(found)

    def delete_example(self, task: str, example: str) -> None:
        """Delete an example."""
        _require_id("example", example)
        with self._changing(task) as connection:
            if not connection.change(
                "DELETE FROM vsm_examples WHERE task = ? AND id = ?", task, example
            ):
                raise NotStoredError(f"example: there is no {example} in the task {task}")

    def versions(self, tasks: Sequence[str]) -> dict[str, Versions]:
        """Return the versions of those tasks that exist."""
        known = [task for task in dict.fromkeys(tasks) if ID.fullmatch(task)]
        if not known:
            return {}
        with self._pool.single() as connection:
            rows = connection.rows(
                "SELECT vsm_tasks.id, vsm_tasks.version, vsm_memory.version FROM vsm_tasks, "
                f"vsm_memory WHERE vsm_tasks.id IN ({', '.join('?' * len(known))})",
                *known,
            )
        return {task: Versions(own, memory) for task, own, memory in rows}

    def memory(self) -> StoredMemory:
        """Return the memory; it is read only if its version has changed."""
        with self._pool.reading() as connection:
            found = connection.rows("SELECT version FROM vsm_memory")
            return self._memory_at(connection, found[0][0]) if found else StoredMemory(0, None)

    def change_memory(self, change: Callable[[NamedMemory], NamedMemory]) -> StoredMemory:
        """Replace the memory by ``change(memory)``; other writers wait.

        Examples of classes that are removed count as not remembered again.
        """
        with self._pool.writing() as connection:
            before = self._lock_memory(connection)
            after = self._write(connection, before, change(_require_memory(before)))
        return self._cache(after)

    def replace_memory(self, memory: NamedMemory) -> StoredMemory:
        """Replace the memory by another one of the same encoder, even if it is damaged."""
        with self._pool.writing() as connection:
            version = self._increment_version(connection)
            known = _encoder(connection)
            assert known is not None
            memory.require_encoder(known, self.database.name)
            connection.change("DELETE FROM vsm_classes")
            connection.change("DELETE FROM vsm_events")
            connection.change("UPDATE vsm_examples SET remembered = 0")
            after = self._write(connection, StoredMemory(version - 1, None), memory)
        return self._cache(after)

    def remember(self, task: str, consolidate: Consolidate) -> tuple[Changes, StoredMemory]:
        """Consolidate those examples of a task that the memory does not include yet."""
        stored = self.memory()
        _require_memory(stored)
        if all(self.support(task).remembered):  # keep the versions
            return Changes((), (), ()), stored
        with self._changing(task) as connection:
            support = self._support(connection, task)
            new = [n for n, remembered in enumerate(support.remembered) if not remembered]
            before = self._lock_memory(connection)
            labels = [support.labels[n] for n in new]
            named, changes = consolidate(_require_memory(before), support.features[new], labels)
            after = self._write(connection, before, named)
            connection.change_many(
                "UPDATE vsm_examples SET remembered = 1 WHERE id = ?",
                [(support.ids[n],) for n in new],
            )
            connection.change_many(
                "UPDATE vsm_classes SET thumbnail = (SELECT thumbnail FROM vsm_examples WHERE "
                "task = ? AND label = ? ORDER BY place LIMIT 1) WHERE name = ? AND added = 1",
                [(task, label, label) for label in dict.fromkeys(labels)],
            )
        return changes, self._cache(after)

    def classes(
        self, search: str = "", near: str | None = None, offset: int = 0, limit: int = 1000
    ) -> tuple[int, list[RememberedClass]]:
        """Return how many remembered classes match, and a part of them.

        Args:
            search: a part of the name, ignoring case.
            near: sort by the distance of class means to that of this class, instead of by age.
            offset: how many to skip.
            limit: how many to return at most.
        """
        if "\0" in search:
            return 0, []
        pattern = "%" + re.sub(r"([\\%_])", r"\\\1", search.casefold()) + "%"
        where = "FROM vsm_classes WHERE folded LIKE ? ESCAPE '\\'"
        with self._pool.reading() as connection:
            order, values = "place", []
            if near is not None:
                mean = _class_column(connection, "mean", near)
                if mean is None:
                    raise NotStoredError(f"near: there is no class {near!r} in the memory")
                order, values = f"{self.database.distance}, place", [mean]
            [[total]] = connection.rows(f"SELECT COUNT(*) {where}", pattern)
            rows = connection.rows(
                f"SELECT name, count, last_update, added, thumbnail IS NOT NULL {where} "
                f"ORDER BY {order} LIMIT ? OFFSET ?",
                *(pattern, *values, limit, offset),
            )
        return total, [
            RememberedClass(name, count, last_update, bool(added), bool(has_thumbnail))
            for name, count, last_update, added, has_thumbnail in rows
        ]

    def class_thumbnail(self, name: str) -> bytes:
        """Return the PNG of a remembered class."""
        with self._pool.single() as connection:
            found = _class_column(connection, "thumbnail", name)
        if found is None:
            raise NotStoredError(f"class: there is no image of {name!r} in the memory")
        return bytes(found)

    @contextmanager
    def _changing(self, task: str) -> Iterator[Connection]:
        """Begin a change of a task: increment its version, which makes other writers wait."""
        _require_id("task", task)
        with self._pool.writing() as connection:
            if not connection.change(
                "UPDATE vsm_tasks SET version = version + 1 WHERE id = ?", task
            ):
                raise _no_task(task)
            yield connection

    def _example_column(self, column: str, task: str, example: str) -> Any:
        _require_id("task", task)
        _require_id("example", example)
        with self._pool.single() as connection:
            found = connection.rows(
                f"SELECT {column} FROM vsm_examples WHERE task = ? AND id = ?", task, example
            )
        if not found:
            raise NotStoredError(f"example: there is no {example} in the task {task}")
        return found[0][0]

    def _support(self, connection: Connection, task: str) -> Support:
        rows = connection.rows(
            "SELECT id, label, remembered, digest, embedding FROM vsm_examples WHERE task = ? "
            "ORDER BY place",
            task,
        )
        try:
            vectors = [self.database.decode_vector(vector) for *_, vector in rows]
            features = torch.from_numpy(np.stack(vectors)) if vectors else torch.zeros(0, 0)
        except ValueError as error:
            raise self._damaged("an example", error) from error
        for (id_, label, _, digest, _), vector in zip(rows, vectors, strict=True):
            if digest is not None and digest != example_digest(label, vector):
                raise self._damaged(f"the example {id_}", "its digest does not match")
        ids, labels = [row[0] for row in rows], [row[1] for row in rows]
        return Support(ids, labels, features, [bool(row[2]) for row in rows])

    def _lock_memory(self, connection: Connection) -> StoredMemory:
        """Return the memory to change; its version is incremented, other writers wait."""
        return self._memory_at(connection, self._increment_version(connection) - 1)

    def _increment_version(self, connection: Connection) -> int:
        if not connection.change("UPDATE vsm_memory SET version = version + 1"):
            raise StoreError(f"store: {self.database.name} is empty; vsm serve initializes it")
        [[version]] = connection.rows("SELECT version FROM vsm_memory")
        return int(version)

    def _memory_at(self, connection: Connection, version: int) -> StoredMemory:
        with self._lock:
            if self._cached is not None and self._cached.version == version:
                return self._cached
        [[name, fingerprint, digest, *head]] = connection.rows(
            f"SELECT encoder, fingerprint, digest, {', '.join(Head._fields)} FROM vsm_memory"
        )
        rows = connection.rows(f"SELECT {CLASS} FROM vsm_classes ORDER BY place")
        events = connection.rows("SELECT event FROM vsm_events ORDER BY place")
        try:
            named = decode_rows(
                Head._make((*head[:-1], bytes(head[-1]))),
                EncoderIdentity(name, fingerprint),
                [ClassRow._make((*row[:-2], bytes(row[-2]), bytes(row[-1]))) for row in rows],
                [json.loads(event) for (event,) in events],
            )
            is_same = digest is None or digest == memory_digest(named)
        except (LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise self._damaged("its memory", error) from error
        if not is_same:
            raise self._damaged("its memory", "its digest does not match")
        return self._cache(StoredMemory(version, named))

    def _damaged(self, what: str, why: object) -> StoreError:
        return StoreError(
            f"store: {self.database.name} is damaged: {what} cannot be read ({shortened(why)}); "
            "restore a copy of it"
        )

    def _cache(self, memory: StoredMemory) -> StoredMemory:
        """Keep the newest committed memory, so that it need not be read again."""
        with self._lock:
            if self._cached is None or self._cached.version <= memory.version:
                self._cached = memory
        return memory

    def _write(
        self, connection: Connection, before: StoredMemory, after: NamedMemory
    ) -> StoredMemory:
        """Write what differs; the version has been incremented already."""
        if before.named is None or encode_head(before.named) != encode_head(after):
            columns = ", ".join(f"{name} = ?" for name in Head._fields)
            connection.change(f"UPDATE vsm_memory SET {columns}", *encode_head(after))
        connection.change("UPDATE vsm_memory SET digest = ?", memory_digest(after))
        removed = self._write_classes(connection, before.named, after)
        connection.change_many(
            "UPDATE vsm_examples SET remembered = 0 WHERE label = ?", [(name,) for name in removed]
        )
        return StoredMemory(before.version + 1, after)

    def _write_classes(
        self, connection: Connection, before: NamedMemory | None, after: NamedMemory | None
    ) -> list[str]:
        """Write the classes and events that differ, and return the names of removed classes."""
        old, new = encode_rows(before), encode_rows(after)
        removed = [name for name in old if name not in new]
        connection.change_many(
            "DELETE FROM vsm_classes WHERE name = ?", [(name,) for name in removed]
        )
        if after is None:
            return removed
        dtype, added = encode_head(after).dtype, after.added
        [[place]] = connection.rows("SELECT COALESCE(MAX(place), 0) FROM vsm_classes")
        changed = [row for name, row in new.items() if old.get(name) != row]
        values = [
            (*row, row.name.casefold(), place, int(row.name in added), vector)
            for place, row in enumerate(changed, place + 1)
            for vector in [self.database.encode_vector(row.mean(dtype))]
        ]
        _insert(connection, "vsm_classes", CLASS_COLUMNS, values, UPDATE_CLASS)
        events = after.provenance[0 if before is None else len(before.provenance) :]
        [[place]] = connection.rows("SELECT COALESCE(MAX(place), 0) FROM vsm_events")
        texts = enumerate(map(event_text, events), place + 1)
        _insert(connection, "vsm_events", ("place", "event"), list(texts))
        return removed


def open_store(target: str | Path, *, create: bool = True) -> Store:
    """Open a store: ``postgresql://…``, or the path of an SQLite file.

    Args:
        target: what to open.
        create: create the file if there is none.

    Raises:
        StoreError: if it is not a store, or of another version.
        StoreUnavailableError: if it cannot be reached.
    """
    return Store(open_database(str(target), create))


def _insert(
    connection: Connection,
    table: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    on_conflict: str = "",
) -> None:
    names, marks = ", ".join(columns), ", ".join("?" * len(columns))
    connection.change_many(f"INSERT INTO {table} ({names}) VALUES ({marks}) {on_conflict}", rows)


def _with_counts(tasks: Sequence[Any], counts: Sequence[Any]) -> list[Task]:
    classes: dict[str, dict[str, int]] = {}
    for task, label, count in sorted(counts):
        classes.setdefault(task, {})[label] = count
    return [
        Task(id_, name, created, version, classes.get(id_, {}))
        for id_, name, created, version in tasks
    ]


def _encoder(connection: Connection) -> EncoderIdentity | None:
    found = connection.rows("SELECT encoder, fingerprint FROM vsm_memory")
    return EncoderIdentity(*found[0]) if found else None


def _class_column(connection: Connection, column: str, name: str) -> Any:
    """Return a column of a class, as the driver has it; None if there is no such class."""
    if name_error(name):
        return None
    found = connection.rows(f"SELECT {column} FROM vsm_classes WHERE name = ?", name)
    return found[0][0] if found else None


def _require_memory(stored: StoredMemory) -> NamedMemory:
    if stored.named is None:
        raise StoreError(
            "memory: the model of this store has no long-term memory; serve one that has"
        )
    return stored.named


def _require_name(field: str, name: str) -> None:
    if error := name_error(name):
        raise StoreError(f"{field}: {error}")


def _require_id(field: str, value: str) -> None:
    """Refuse what is not an id before it comes near a query."""
    if not ID.fullmatch(value):
        raise NotStoredError(f"{field}: there is no {value[:64]!r}")


def _no_task(task: str) -> NotStoredError:
    return NotStoredError(f"task: there is no {task}; was it deleted?")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def example_digest(label: str, embedding: Row) -> str:
    """Return a SHA-256 of what answers depend on of an example."""
    return digest_values([label, np.ascontiguousarray(embedding, np.float32).tobytes()])
