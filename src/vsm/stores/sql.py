"""The store's contract in SQL that SQLite and PostgreSQL share.

Two rules keep several servers apart. Whoever changes a task, or the memory, raises its version
first, which locks that row until the transaction ends; a task comes before the memory, so nobody
waits in a circle. And whoever reads several tables does so in one transaction, which sees one state
of all of them.
"""

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from vsm.errors import NotStoredError, StoreError, StoreFullError
from vsm.memory.named import Changes, EncoderIdentity, NamedMemory
from vsm.stores.connections import Connection, Database, Pool
from vsm.stores.contract import (
    ID,
    Consolidate,
    Example,
    NewExample,
    Remembered,
    StoredMemory,
    Support,
    Task,
    Versions,
    name_problem,
)
from vsm.stores.migrations import migrate
from vsm.stores.statistics import (
    ClassRow,
    Head,
    digest_of,
    event_text,
    example_digest,
    head_of,
    memory_of,
    rows_of,
)
from vsm.system.documents import shortened

TASKS = "SELECT id, name, created, version FROM vsm_tasks"
COUNTS = "SELECT task, label, COUNT(*) FROM vsm_examples"
HEAD = "version, encoder, fingerprint, kind, method, step, dtype, width, shared"
ROW = "name, class_id, count, last_update, freedom, content, factors"
LISTED = "name, count, last_update, added, thumbnail IS NOT NULL"
INSERT_CLASS = (
    f"INSERT INTO vsm_classes ({ROW}, folded, place, added, mean) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
    "count = excluded.count, last_update = excluded.last_update, freedom = excluded.freedom, "
    "content = excluded.content, factors = excluded.factors, class_id = excluded.class_id, "
    "added = excluded.added, mean = excluded.mean"
)


class SqlStore:
    """See :class:`vsm.stores.Store`."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._pool = Pool(database)
        self._known: StoredMemory | None = None
        self._guard = threading.Lock()
        try:
            migrate(self._pool)
        except BaseException:
            self._pool.close()
            raise

    def __repr__(self) -> str:
        return f"store {self.database.name}"

    def bind(self, encoder: EncoderIdentity, memory: NamedMemory | None) -> None:
        """See :class:`vsm.stores.Store`."""
        with self._pool.writing(alone=True) as connection:
            found = _encoder(connection)
            if found is None:
                head = head_of(memory)
                marks = ", ".join("?" * (4 + len(head)))
                values = (1, *encoder, *head, digest_of(memory))
                connection.change(
                    f"INSERT INTO vsm_memory ({HEAD}, digest) VALUES ({marks})", *values
                )
                self._write_classes(connection, None, memory)
            elif found.fingerprint != encoder.fingerprint:
                raise StoreError(
                    f"store: {self.database.name} holds features of the encoder {found}, but the "
                    f"model makes those of {encoder}; serve the model that it was begun with, or "
                    "name another --store"
                )

    def encoder(self) -> EncoderIdentity | None:
        """See :class:`vsm.stores.Store`."""
        with self._pool.single() as connection:
            return _encoder(connection)

    def check(self) -> None:
        """See :class:`vsm.stores.Store`."""
        with self._pool.reading() as connection:
            connection.rows("SELECT version FROM vsm_memory")

    def close(self) -> None:
        """See :class:`vsm.stores.Store`."""
        self._pool.close()

    def create_task(self, name: str, most: int) -> Task:
        """See :class:`vsm.stores.Store`."""
        _require_name("name", name)
        task = Task(uuid.uuid4().hex, name, _now(), 1, {})
        with self._pool.writing(alone=True) as connection:
            [[count, place]] = connection.rows(
                "SELECT COUNT(*), COALESCE(MAX(place), 0) FROM vsm_tasks"
            )
            if count >= most:
                raise StoreFullError(
                    f"tasks: there are {count} already, of at most {most}; delete one"
                )
            connection.change(
                "INSERT INTO vsm_tasks (id, place, name, created, version) VALUES (?, ?, ?, ?, ?)",
                *(task.id, place + 1, task.name, task.created, task.version),
            )
        return task

    def tasks(self) -> list[Task]:
        """See :class:`vsm.stores.Store`."""
        with self._pool.reading() as connection:
            found = connection.rows(f"{TASKS} ORDER BY place")
            counts: dict[str, dict[str, int]] = {}
            for task, label, count in connection.rows(f"{COUNTS} GROUP BY task, label"):
                counts.setdefault(task, {})[label] = count
        return [Task._make((*row, dict(sorted(counts.get(row[0], {}).items())))) for row in found]

    def task(self, task: str) -> Task:
        """See :class:`vsm.stores.Store`."""
        _require_id("task", task)
        with self._pool.reading() as connection:
            found = connection.rows(f"{TASKS} WHERE id = ?", task)
            counts = connection.rows(f"{COUNTS} WHERE task = ? GROUP BY task, label", task)
        if not found:
            raise _no_task(task)
        classes = dict(sorted((label, count) for _, label, count in counts))
        return Task._make((*found[0], classes))

    def delete_task(self, task: str) -> None:
        """See :class:`vsm.stores.Store`."""
        _require_id("task", task)
        with self._pool.writing() as connection:
            if not connection.change("DELETE FROM vsm_tasks WHERE id = ?", task):
                raise _no_task(task)

    def add_examples(
        self, task: str, label: str, examples: Sequence[NewExample], most: int
    ) -> list[str]:
        """See :class:`vsm.stores.Store`."""
        _require_name("label", label)
        ids, now = [uuid.uuid4().hex for _ in examples], _now()
        with self._changing(task) as connection:
            [[count, place]] = connection.rows(
                "SELECT COUNT(*), COALESCE(MAX(place), 0) FROM vsm_examples WHERE task = ?", task
            )
            if count + len(examples) > most:
                raise StoreFullError(
                    f"files: the task has {count} examples, and {len(examples)} more would be over "
                    f"the limit of {most}; delete some, or begin another task"
                )
            rows = [
                (id_, task, place + n, label, one.file, now, 0, vector, digest, *one[2:])
                for n, (id_, one) in enumerate(zip(ids, examples, strict=True), 1)
                for vector in [self.database.vector(one.embedding)]
                for digest in [example_digest(label, one.embedding)]
            ]
            connection.change_many(
                "INSERT INTO vsm_examples (id, task, place, label, file, created, remembered, "
                "embedding, digest, thumbnail, original) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
        return ids

    def examples(self, task: str) -> list[Example]:
        """See :class:`vsm.stores.Store`."""
        self.task(task)
        with self._pool.single() as connection:
            rows = connection.rows(
                "SELECT id, label, file, created, remembered FROM vsm_examples WHERE task = ? "
                "ORDER BY place",
                task,
            )
        return [Example._make((*rest, bool(remembered))) for *rest, remembered in rows]

    def support(self, task: str) -> Support:
        """See :class:`vsm.stores.Store`."""
        _require_id("task", task)
        with self._pool.reading() as connection:
            found = connection.rows("SELECT version FROM vsm_tasks WHERE id = ?", task)
            if not found:
                raise _no_task(task)
            return self._support(connection, task, found[0][0])

    def thumbnail(self, task: str, example: str) -> bytes:
        """See :class:`vsm.stores.Store`."""
        return bytes(self._of_example("thumbnail", task, example))

    def original(self, task: str, example: str) -> bytes | None:
        """See :class:`vsm.stores.Store`."""
        found = self._of_example("original", task, example)
        return None if found is None else bytes(found)

    def delete_example(self, task: str, example: str) -> None:
        """See :class:`vsm.stores.Store`."""
        _require_id("example", example)
        with self._changing(task) as connection:
            if not connection.change(
                "DELETE FROM vsm_examples WHERE task = ? AND id = ?", task, example
            ):
                raise NotStoredError(f"example: there is no {example} in the task {task}")

    def versions(self, tasks: Sequence[str]) -> dict[str, Versions]:
        """See :class:`vsm.stores.Store`."""
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
        """See :class:`vsm.stores.Store`."""
        with self._pool.reading() as connection:
            return self._memory(connection)

    def change_memory(self, change: Callable[[NamedMemory], NamedMemory]) -> StoredMemory:
        """See :class:`vsm.stores.Store`."""
        with self._pool.writing() as connection:
            before = self._memory_to_change(connection)
            after = self._write(connection, before, change(_require_memory(before)))
        return self._keep(after)

    def replace_memory(self, memory: NamedMemory) -> StoredMemory:
        """See :class:`vsm.stores.Store`."""
        with self._pool.writing() as connection:
            version = self._raised_version(connection)  # what is there may be damaged
            known = _encoder(connection)
            assert known is not None
            memory.require_encoder(known, self.database.name)
            connection.change("DELETE FROM vsm_classes")
            connection.change("DELETE FROM vsm_events")
            connection.change("UPDATE vsm_examples SET remembered = 0")
            after = self._write(connection, StoredMemory(version - 1, None), memory)
        return self._keep(after)

    def remember(self, task: str, consolidate: Consolidate) -> tuple[Changes, StoredMemory]:
        """See :class:`vsm.stores.Store`."""
        stored = self.memory()
        _require_memory(stored)
        if all(self.support(task).remembered):  # nothing changes, so no version rises
            return Changes((), (), ()), stored
        with self._changing(task) as connection:
            support = self._support(connection, task, 0)
            fresh = [n for n, done in enumerate(support.remembered) if not done]
            before = self._memory_to_change(connection)
            labels = [support.labels[n] for n in fresh]
            named, changes = consolidate(_require_memory(before), support.features[fresh], labels)
            after = self._write(connection, before, named)
            connection.change_many(
                "UPDATE vsm_examples SET remembered = 1 WHERE id = ?",
                [(support.ids[n],) for n in fresh],
            )
            connection.change_many(
                "UPDATE vsm_classes SET thumbnail = (SELECT thumbnail FROM vsm_examples WHERE "
                "task = ? AND label = ? ORDER BY place LIMIT 1) WHERE name = ? AND added = 1",
                [(task, label, label) for label in dict.fromkeys(labels)],
            )
        return changes, self._keep(after)

    def classes(
        self, search: str = "", near: str | None = None, offset: int = 0, limit: int = 1000
    ) -> tuple[int, list[Remembered]]:
        """See :class:`vsm.stores.Store`."""
        if "\0" in search:
            return 0, []
        escaped = search.casefold()
        for special in "\\%_":
            escaped = escaped.replace(special, f"\\{special}")
        where, pattern = "WHERE folded LIKE ? ESCAPE '\\'", f"%{escaped}%"
        with self._pool.reading() as connection:
            order, values = "place", []
            if near is not None:
                order, values = f"{self.database.distance}, place", [_mean(connection, near)]
            [[total]] = connection.rows(f"SELECT COUNT(*) FROM vsm_classes {where}", pattern)
            rows = connection.rows(
                f"SELECT {LISTED} FROM vsm_classes {where} ORDER BY {order} LIMIT ? OFFSET ?",
                *(pattern, *values, limit, offset),
            )
        return total, [
            Remembered(name, count, last_update, bool(added), bool(picture))
            for name, count, last_update, added, picture in rows
        ]

    def class_thumbnail(self, name: str) -> bytes:
        """See :class:`vsm.stores.Store`."""
        with self._pool.single() as connection:
            found = (
                []
                if name_problem(name)
                else connection.rows("SELECT thumbnail FROM vsm_classes WHERE name = ?", name)
            )
        if not found or found[0][0] is None:
            raise NotStoredError(f"class: there is no picture of {name!r} in the memory")
        return bytes(found[0][0])

    @contextmanager
    def _changing(self, task: str) -> Iterator[Connection]:
        """Begin to change a task: its version rises, and others wait."""
        _require_id("task", task)
        with self._pool.writing() as connection:
            if not connection.change(
                "UPDATE vsm_tasks SET version = version + 1 WHERE id = ?", task
            ):
                raise _no_task(task)
            yield connection

    def _of_example(self, column: str, task: str, example: str) -> Any:
        _require_id("task", task)
        _require_id("example", example)
        with self._pool.single() as connection:
            found = connection.rows(
                f"SELECT {column} FROM vsm_examples WHERE task = ? AND id = ?", task, example
            )
        if not found:
            raise NotStoredError(f"example: there is no {example} in the task {task}")
        return found[0][0]

    def _support(self, connection: Connection, task: str, version: int) -> Support:
        rows = connection.rows(
            "SELECT id, label, remembered, digest, embedding FROM vsm_examples WHERE task = ? "
            "ORDER BY place",
            task,
        )
        try:
            vectors = [self.database.row(vector) for *_, vector in rows]
            features = torch.from_numpy(np.stack(vectors)) if vectors else torch.zeros(0, 0)
        except ValueError as error:
            raise self._damaged("an example", error) from error
        for (id_, label, _, digest, _), vector in zip(rows, vectors, strict=True):
            if digest is not None and digest != example_digest(label, vector):
                raise self._damaged(f"the example {id_}", "its digest belongs to another")
        return Support(
            version,
            [row[0] for row in rows],
            [row[1] for row in rows],
            features,
            [bool(row[2]) for row in rows],
        )

    def _memory(self, connection: Connection) -> StoredMemory:
        """Return the memory; it is read unless this version of it is known already."""
        found = connection.rows("SELECT version FROM vsm_memory")
        return self._memory_at(connection, found[0][0]) if found else StoredMemory(0, None)

    def _memory_to_change(self, connection: Connection) -> StoredMemory:
        """Return the memory once it is our turn to change it; its version rises, others wait."""
        return self._memory_at(connection, self._raised_version(connection) - 1)

    def _raised_version(self, connection: Connection) -> int:
        if not connection.change("UPDATE vsm_memory SET version = version + 1"):
            raise StoreError(f"store: {self.database.name} is empty; vsm serve begins it")
        [[version]] = connection.rows("SELECT version FROM vsm_memory")
        return int(version)

    def _memory_at(self, connection: Connection, version: int) -> StoredMemory:
        with self._guard:
            if self._known is not None and self._known.version == version:
                return self._known
        [[_, name, fingerprint, *head, digest]] = connection.rows(
            f"SELECT {HEAD}, digest FROM vsm_memory"
        )
        rows = connection.rows(f"SELECT {ROW} FROM vsm_classes ORDER BY place")
        events = connection.rows("SELECT event FROM vsm_events ORDER BY place")
        try:
            named = memory_of(
                Head._make((*head[:-1], bytes(head[-1]))),
                EncoderIdentity(name, fingerprint),
                [ClassRow._make((*row[:-2], bytes(row[-2]), bytes(row[-1]))) for row in rows],
                [json.loads(event) for (event,) in events],
            )
            is_same = digest is None or digest == digest_of(named)
        except (LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise self._damaged("its memory", error) from error
        if not is_same:
            raise self._damaged("its memory", "its digest belongs to another")
        return self._keep(StoredMemory(version, named))

    def _damaged(self, what: str, why: object) -> StoreError:
        return StoreError(
            f"store: {self.database.name} is damaged: {what} cannot be read ({shortened(why)}); "
            "go back to a copy of it"
        )

    def _keep(self, memory: StoredMemory) -> StoredMemory:
        """Know the newest memory that was committed, so that it need not be read again."""
        with self._guard:
            if self._known is None or self._known.version <= memory.version:
                self._known = memory
        return memory

    def _write(
        self, connection: Connection, before: StoredMemory, after: NamedMemory
    ) -> StoredMemory:
        """Write what differs, under the version that :meth:`_memory_to_change` raised."""
        if before.named is None or head_of(before.named) != head_of(after):
            head = head_of(after)
            columns = ", ".join(f"{name} = ?" for name in Head._fields)
            connection.change(f"UPDATE vsm_memory SET {columns}", *head)
        connection.change("UPDATE vsm_memory SET digest = ?", digest_of(after))
        gone = self._write_classes(connection, before.named, after)
        connection.change_many(
            "UPDATE vsm_examples SET remembered = 0 WHERE label = ?", [(name,) for name in gone]
        )
        return StoredMemory(before.version + 1, after)

    def _write_classes(
        self, connection: Connection, before: NamedMemory | None, after: NamedMemory | None
    ) -> list[str]:
        """Write the classes and events that differ, and return the names of those that are gone."""
        old, new = rows_of(before), rows_of(after)
        gone = [name for name in old if name not in new]
        connection.change_many("DELETE FROM vsm_classes WHERE name = ?", [(name,) for name in gone])
        if after is None:
            return gone
        dtype, added = head_of(after).dtype, after.added
        [[place]] = connection.rows("SELECT COALESCE(MAX(place), 0) FROM vsm_classes")
        changed = [row for name, row in new.items() if old.get(name) != row]
        values = [
            (*row, row.name.casefold(), place + n, int(row.name in added), vector)
            for n, row in enumerate(changed, 1)
            for vector in [self.database.vector(row.mean(dtype))]
        ]
        connection.change_many(INSERT_CLASS, values)
        events = after.provenance[0 if before is None else len(before.provenance) :]
        [[place]] = connection.rows("SELECT COALESCE(MAX(place), 0) FROM vsm_events")
        connection.change_many(
            "INSERT INTO vsm_events (place, event) VALUES (?, ?)",
            [(place + n, event_text(event)) for n, event in enumerate(events, 1)],
        )
        return gone


def _encoder(connection: Connection) -> EncoderIdentity | None:
    found = connection.rows("SELECT encoder, fingerprint FROM vsm_memory")
    return EncoderIdentity(*found[0]) if found else None


def _mean(connection: Connection, name: str) -> Any:
    """Return the mean of a class, as the driver has it."""
    found = (
        []
        if name_problem(name)
        else connection.rows("SELECT mean FROM vsm_classes WHERE name = ?", name)
    )
    if not found:
        raise NotStoredError(f"near: there is no class {name!r} in the memory")
    return found[0][0]


def _require_memory(stored: StoredMemory) -> NamedMemory:
    if stored.named is None:
        raise StoreError(
            "memory: the model of this store has no long-term memory; serve one that has"
        )
    return stored.named


def _require_name(field: str, name: str) -> None:
    if problem := name_problem(name):
        raise StoreError(f"{field}: {problem}")


def _require_id(field: str, value: str) -> None:
    """Refuse what no store has made, before it comes near a query."""
    if not ID.fullmatch(value):
        raise NotStoredError(f"{field}: there is no {value[:64]!r}")


def _no_task(task: str) -> NotStoredError:
    return NotStoredError(f"task: there is no {task}; was it deleted?")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
