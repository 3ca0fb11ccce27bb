"""The store, in SQL that SQLite and PostgreSQL share.

Two rules let several servers share a store. A transaction that changes a task, or the memory,
increments its version first, which locks that row until the transaction ends; a task is locked
before the memory, so there is no deadlock. And several tables are read in one transaction, which
sees one state of all of them.
"""

import hashlib
import json
import re
import threading
import unicodedata
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from vsm.encoders import EncoderIdentity
from vsm.errors import NotStoredError, RunError, StoreError, StoreFullError
from vsm.memory.named import Changes, NamedMemory, decode_memory
from vsm.stores.databases import Connection, Database, open_database
from vsm.system.files import shortened

SCHEMA_VERSION = 3
TABLES = (
    """CREATE TABLE vsm_tasks (
        id TEXT PRIMARY KEY,
        place BIGINT NOT NULL,
        name TEXT NOT NULL,
        created TEXT NOT NULL,
        version BIGINT NOT NULL
    )""",
    """CREATE TABLE vsm_examples (
        id TEXT PRIMARY KEY,
        task TEXT NOT NULL REFERENCES vsm_tasks (id) ON DELETE CASCADE,
        place BIGINT NOT NULL,
        label TEXT NOT NULL,
        file TEXT NOT NULL,
        created TEXT NOT NULL,
        remembered BIGINT NOT NULL,
        embedding BYTEA NOT NULL,
        thumbnail BYTEA NOT NULL,
        original BYTEA,
        digest TEXT NOT NULL
    )""",
    "CREATE UNIQUE INDEX vsm_examples_of_task ON vsm_examples (task, place)",
    """CREATE TABLE vsm_memory (
        version BIGINT NOT NULL,
        encoder TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        digest TEXT NOT NULL,
        metadata TEXT NOT NULL,
        tensors BYTEA NOT NULL
    )""",
    "CREATE TABLE vsm_thumbnails (name TEXT PRIMARY KEY, thumbnail BYTEA NOT NULL)",
    f"INSERT INTO vsm_schema VALUES ({SCHEMA_VERSION})",
)
ID = re.compile(r"[0-9a-f]{32}")
ENCODER = "SELECT encoder, fingerprint FROM vsm_memory"
EXAMPLES = (
    "SELECT id, label, file, created, remembered{} FROM vsm_examples WHERE task = ? ORDER BY place"
)
TASKS = "SELECT id, name, created, version FROM vsm_tasks"
MAX_NAME_LENGTH = 200

Consolidate = Callable[[NamedMemory, Tensor, Sequence[str]], tuple[NamedMemory, Changes]]
"""A memory, features and their labels to the memory that includes them."""


@dataclass(frozen=True)
class Task:
    """A task: classes defined by a user, each with a few examples."""

    id: str
    name: str  # for display
    created: str  # in UTC, in ISO 8601 format
    version: int  # incremented by every change of its examples
    classes: dict[str, int]  # number of examples of each label


@dataclass(frozen=True)
class Example:
    """A stored example; ``remembered`` if the memory includes it."""

    id: str
    label: str
    file: str
    created: str
    remembered: bool


@dataclass(frozen=True)
class TaskWithExamples(Task):
    """A task with its examples, oldest first."""

    examples: list[Example]


class NewExample(NamedTuple):
    """An example to add: ``embedding [D]``, a PNG, and the uploaded file if it is to be kept."""

    file: str
    embedding: npt.NDArray[np.float32]
    thumbnail: bytes
    original: bytes | None = None


class Versions(NamedTuple):
    """Counters that are incremented by every change of what answers depend on."""

    task: int
    memory: int


class Support(NamedTuple):
    """The embedded examples of a task, oldest first; ``features [n, D]``."""

    examples: list[Example]
    features: Tensor


class StoredMemory(NamedTuple):
    """The memory and its version; ``named`` is None for models without one."""

    version: int
    named: NamedMemory | None


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
        self._cached: StoredMemory | None = None
        self._lock = threading.Lock()
        try:
            self._create_tables()
        except BaseException:
            database.close()
            raise

    def __repr__(self) -> str:
        return f"store {self.database.name}"

    def _create_tables(self) -> None:
        """Create the tables; of several processes one does it, and the others wait."""
        with self.database.writing(exclusive=True) as connection:
            connection.change("CREATE TABLE IF NOT EXISTS vsm_schema (version BIGINT NOT NULL)")
            [[found]] = connection.rows("SELECT COALESCE(MAX(version), 0) FROM vsm_schema")
            if found not in (0, SCHEMA_VERSION):
                raise StoreError(
                    f"store: {self.database.name} has tables of version {shortened(found, 20)}, "
                    f"but this version of vsm uses version {SCHEMA_VERSION}; use the vsm that "
                    "wrote it, or name another --store"
                )
            for statement in TABLES if found == 0 else ():
                connection.change(statement)

    def bind(self, encoder: EncoderIdentity, memory: NamedMemory | None) -> None:
        """Initialize with an encoder and its memory, or check that the store is of that encoder."""
        with self.database.writing(exclusive=True) as connection:
            found = _identity(connection.rows(ENCODER))
            if found is None:
                identity = {"encoder": encoder.name, "fingerprint": encoder.fingerprint}
                row = {"version": 1, **identity, **_encode_memory(encoder, memory)}
                _insert(connection, "vsm_memory", row)
            elif found.fingerprint != encoder.fingerprint:
                raise StoreError(
                    f"store: {self.database.name} holds features of the encoder {found}, but the "
                    f"model makes those of {encoder}; serve the model that it was created with, or "
                    "name another --store"
                )

    def encoder(self) -> EncoderIdentity | None:
        """Return whose features it holds; None before the first :meth:`bind`."""
        return _identity(self.database.query(ENCODER))

    def close(self) -> None:
        """Close all connections."""
        self.database.close()

    def create_task(self, name: str, max_tasks: int) -> Task:
        """Create a task, unless there are ``max_tasks`` already."""
        require_name("name", name)
        task = Task(uuid.uuid4().hex, name, _now(), 1, {})
        with self.database.writing(exclusive=True) as connection:
            [[count, place]] = connection.rows(
                "SELECT COUNT(*), COALESCE(MAX(place), 0) FROM vsm_tasks"
            )
            if count >= max_tasks:
                raise StoreFullError(
                    f"tasks: there are {count} already, of at most {max_tasks}; delete one"
                )
            row = {"id": task.id, "name": name, "created": task.created, "version": task.version}
            _insert(connection, "vsm_tasks", row | {"place": place + 1})
        return task

    def tasks(self) -> list[Task]:
        """Return all tasks, oldest first."""
        with self.database.reading() as connection:
            rows = connection.rows(f"{TASKS} ORDER BY place")
            counts = connection.rows(
                "SELECT task, label, COUNT(*) FROM vsm_examples GROUP BY task, label"
            )
        classes: dict[str, dict[str, int]] = {}
        for task, label, count in sorted(counts):
            classes.setdefault(task, {})[label] = count
        return [
            Task(id_, name, created, version, classes.get(id_, {}))
            for id_, name, created, version in rows
        ]

    def task(self, task: str) -> TaskWithExamples:
        """Return a task."""
        with self._open(task) as connection:
            [[_, name, created, version]] = connection.rows(f"{TASKS} WHERE id = ?", task)
            examples = [_example(row) for row in connection.rows(EXAMPLES.format(""), task)]
        classes = Counter(sorted(one.label for one in examples))
        return TaskWithExamples(task, name, created, version, dict(classes), examples)

    def delete_task(self, task: str) -> None:
        """Delete a task and its examples; what the memory learned from it stays."""
        with self._open(task, change=True) as connection:
            connection.change("DELETE FROM vsm_tasks WHERE id = ?", task)

    def add_examples(
        self, task: str, label: str, examples: Sequence[NewExample], max_examples: int
    ) -> list[str]:
        """Add examples of a class, unless a task would have over ``max_examples``; return ids."""
        require_name("label", label)
        ids, now = [uuid.uuid4().hex for _ in examples], _now()
        with self._open(task, change=True) as connection:
            [[count, place]] = connection.rows(
                "SELECT COUNT(*), COALESCE(MAX(place), 0) FROM vsm_examples WHERE task = ?", task
            )
            if count + len(examples) > max_examples:
                raise StoreFullError(
                    f"files: the task has {count} examples, and {len(examples)} more would be over "
                    f"the limit of {max_examples}; delete some, or begin another task"
                )
            shared = {"task": task, "label": label, "created": now, "remembered": 0}
            for number, (id_, one) in enumerate(zip(ids, examples, strict=True), place + 1):
                embedding = np.asarray(one.embedding, np.float32).tobytes()
                stored = {"embedding": embedding, "digest": _digest(label, embedding)}
                row = shared | {"id": id_, "place": number} | one._asdict() | stored
                _insert(connection, "vsm_examples", row)
        return ids

    def support(self, task: str) -> Support:
        """Return the embedded examples of a task."""
        with self._open(task) as connection:
            return self._support(connection, task)

    def example_file(
        self, task: str, example: str, which: Literal["thumbnail", "original"]
    ) -> bytes | None:
        """Return the PNG of an example, or the uploaded file; None if that was not kept."""
        _require_id("example", example)
        _require_id("task", task)
        found = self.database.query(
            f"SELECT {which} FROM vsm_examples WHERE task = ? AND id = ?", task, example
        )
        if not found:
            raise _not_stored("example", example)
        return None if found[0][0] is None else bytes(found[0][0])

    def delete_example(self, task: str, example: str) -> None:
        """Delete an example."""
        _require_id("example", example)
        with self._open(task, change=True) as connection:
            if not connection.change(
                "DELETE FROM vsm_examples WHERE task = ? AND id = ?", task, example
            ):
                raise _not_stored("example", example)

    def versions(self, tasks: Sequence[str]) -> dict[str, Versions]:
        """Return the versions of those tasks that exist."""
        known = [task for task in dict.fromkeys(tasks) if ID.fullmatch(task)]
        if not known:
            return {}
        rows = self.database.query(
            "SELECT vsm_tasks.id, vsm_tasks.version, vsm_memory.version FROM vsm_tasks, "
            f"vsm_memory WHERE vsm_tasks.id IN ({', '.join('?' * len(known))})",
            *known,
        )
        return {task: Versions(*versions) for task, *versions in rows}

    def memory(self) -> StoredMemory:
        """Return the memory; it is read from the database only after a change."""
        with self.database.reading() as connection:
            found = connection.rows("SELECT version FROM vsm_memory")
            return self._memory_at(connection, found[0][0]) if found else StoredMemory(0, None)

    def change_memory(self, change: Callable[[NamedMemory], NamedMemory]) -> StoredMemory:
        """Replace the memory by ``change(memory)``; other writers wait.

        Examples of classes that are removed count as not remembered again.
        """
        with self.database.writing() as connection:
            version, before = self._lock_memory(connection)
            after = _write_memory(connection, before, change(before))
        return self._cache(StoredMemory(version, after))

    def replace_memory(self, memory: NamedMemory) -> StoredMemory:
        """Replace the memory by another one of the same encoder, even if it is damaged."""
        with self.database.writing() as connection:
            version = self._increment_version(connection)
            known = _identity(connection.rows(ENCODER))
            assert known is not None
            memory.require_encoder(known, self.database.name)
            connection.change("DELETE FROM vsm_thumbnails")
            connection.change("UPDATE vsm_examples SET remembered = 0")
            after = _write_memory(connection, None, memory)
        return self._cache(StoredMemory(version, after))

    def remember(self, task: str, consolidate: Consolidate) -> tuple[Changes, NamedMemory]:
        """Consolidate those examples of a task that the memory does not include yet."""
        stored = _require_memory(self.memory().named)
        if all(one.remembered for one in self.task(task).examples):  # keep the versions
            return Changes((), (), ()), stored
        with self._open(task, change=True) as connection:
            support = self._support(connection, task)
            is_new = [not one.remembered for one in support.examples]
            new = [one for one in support.examples if not one.remembered]
            labels = [one.label for one in new]
            version, before = self._lock_memory(connection)
            after, changes = consolidate(before, support.features[is_new], labels)
            _write_memory(connection, before, after)
            connection.change_many(
                "UPDATE vsm_examples SET remembered = 1 WHERE id = ?",
                [(one.id,) for one in new],
            )
            connection.change_many(
                "INSERT INTO vsm_thumbnails SELECT label, thumbnail FROM vsm_examples WHERE "
                "task = ? AND label = ? ORDER BY place LIMIT 1 "
                "ON CONFLICT (name) DO UPDATE SET thumbnail = excluded.thumbnail",
                [(task, label) for label in sorted(after.added.intersection(labels))],
            )
        self._cache(StoredMemory(version, after))
        return changes, after

    def class_thumbnails(self) -> set[str]:
        """Return the names of remembered classes that have a thumbnail."""
        return {name for (name,) in self.database.query("SELECT name FROM vsm_thumbnails")}

    def class_thumbnail(self, name: str) -> bytes:
        """Return the PNG of a remembered class."""
        sql = "SELECT thumbnail FROM vsm_thumbnails WHERE name = ?"
        found = [] if _name_error(name) else self.database.query(sql, name)
        if not found:
            raise NotStoredError(f"class: there is no image of {name!r} in the memory")
        return bytes(found[0][0])

    @contextmanager
    def _open(self, task: str, *, change: bool = False) -> Iterator[Connection]:
        """Begin to read a task; a change increments its version, so that other writers wait."""
        _require_id("task", task)
        increment = "UPDATE vsm_tasks SET version = version + 1 WHERE id = ?"
        with self.database.writing() if change else self.database.reading() as connection:
            if change:
                is_stored = connection.change(increment, task) > 0
            else:
                is_stored = bool(connection.rows(f"{TASKS} WHERE id = ?", task))
            if not is_stored:
                raise _not_stored("task", task)
            yield connection

    def _support(self, connection: Connection, task: str) -> Support:
        rows = connection.rows(EXAMPLES.format(", digest, embedding"), task)
        examples, vectors = [_example(row) for row in rows], [bytes(row[-1]) for row in rows]
        for row, example, vector in zip(rows, examples, vectors, strict=True):
            if row[-2] != _digest(example.label, vector):
                raise self._damaged(f"the example {example.id}", "its digest does not match")
        features = [np.frombuffer(vector, np.float32) for vector in vectors]
        stacked = torch.from_numpy(np.stack(features)) if features else torch.zeros(0, 0)
        return Support(examples, stacked)

    def _lock_memory(self, connection: Connection) -> tuple[int, NamedMemory]:
        """Increment the version, which makes other writers wait; return it and the old memory."""
        version = self._increment_version(connection)
        return version, _require_memory(self._memory_at(connection, version - 1).named)

    def _increment_version(self, connection: Connection) -> int:
        if not connection.change("UPDATE vsm_memory SET version = version + 1"):
            raise StoreError(f"store: {self.database.name} is empty; vsm serve initializes it")
        [[version]] = connection.rows("SELECT version FROM vsm_memory")
        return int(version)

    def _memory_at(self, connection: Connection, version: int) -> StoredMemory:
        with self._lock:
            if self._cached is not None and self._cached.version == version:
                return self._cached
        [[name, fingerprint, digest, metadata, stored]] = connection.rows(
            "SELECT encoder, fingerprint, digest, metadata, tensors FROM vsm_memory"
        )
        try:
            tensors = bytes(stored)
            if digest != _digest(name, fingerprint, metadata, tensors):
                raise ValueError("its digest does not match")
            memory = None
            if metadata:
                # Copied, since results may depend on how tensors are aligned in memory.
                loaded = {key: t.clone() for key, t in safetensors.torch.load(tensors).items()}
                memory = decode_memory(loaded, json.loads(metadata), Path(self.database.name))
        except (ValueError, TypeError, RunError, safetensors.SafetensorError) as error:
            raise self._damaged("its memory", error) from error
        return self._cache(StoredMemory(version, memory))

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


def open_store(target: str | Path, *, create: bool = True) -> Store:
    """Open the store at ``postgresql://…``, or in an SQLite file, which ``create`` may create.

    Raises:
        StoreError: if it is not a store, or of another version.
        StoreUnavailableError: if it cannot be reached.
    """
    return Store(open_database(str(target), create))


def _encode_memory(encoder: EncoderIdentity, memory: NamedMemory | None) -> dict[str, Any]:
    """Return the columns of a memory; without one, its metadata and tensors are empty."""
    metadata, tensors = "", b""
    if memory is not None:
        # safetensors refuses tensors that share memory.
        stored = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in memory.slots.tensors().items()
        }
        metadata, tensors = json.dumps(memory.metadata()), safetensors.torch.save(stored)
    digest = _digest(*encoder, metadata, tensors)
    return {"digest": digest, "metadata": metadata, "tensors": tensors}


def _write_memory(
    connection: Connection, before: NamedMemory | None, after: NamedMemory
) -> NamedMemory:
    """Write the memory; its version has been incremented already."""
    columns = _encode_memory(_identity(connection.rows(ENCODER)) or after.encoder, after)
    values = ", ".join(f"{name} = ?" for name in columns)
    connection.change(f"UPDATE vsm_memory SET {values}", *columns.values())
    removed = [(name,) for name in before.names if name not in after.places] if before else []
    connection.change_many("UPDATE vsm_examples SET remembered = 0 WHERE label = ?", removed)
    connection.change_many("DELETE FROM vsm_thumbnails WHERE name = ?", removed)
    return after


def _insert(connection: Connection, table: str, row: Mapping[str, Any]) -> None:
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    connection.change(f"INSERT INTO {table} ({names}) VALUES ({marks})", *row.values())


def _example(row: tuple[Any, ...]) -> Example:
    id_, label, file, created, remembered, *_ = row
    return Example(id_, label, file, created, bool(remembered))


def _identity(rows: list[tuple[Any, ...]]) -> EncoderIdentity | None:
    return EncoderIdentity(*rows[0]) if rows else None


def _require_memory(memory: NamedMemory | None) -> NamedMemory:
    if memory is None:
        raise StoreError(
            "memory: the model of this store has no long-term memory; serve one that has"
        )
    return memory


def require_name(field: str, name: str) -> None:
    """Refuse a name of a task or label that not every database can hold."""
    if error := _name_error(name):
        raise StoreError(f"{field}: {error}")


def _name_error(name: str) -> str | None:
    if not name or name != name.strip():
        return "expected text that neither begins nor ends with a space"
    if len(name) > MAX_NAME_LENGTH:
        return f"expected at most {MAX_NAME_LENGTH} characters, got {len(name)}"
    odd = next((one for one in name if unicodedata.category(one) in ("Cc", "Cs")), None)
    return None if odd is None else f"expected text without control characters, got {odd!r}"


def _require_id(field: str, value: str) -> None:
    """Refuse what is not an id before it comes near a query."""
    if not ID.fullmatch(value):
        raise _not_stored(field, value)


def _not_stored(field: str, value: str) -> NotStoredError:
    return NotStoredError(f"{field}: there is no {value[:64]!r}; was it deleted?")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _digest(*values: str | bytes) -> str:
    """Return a SHA-256 of texts and bytes, each with its length."""
    digest = hashlib.sha256()
    for value in values:
        part = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        digest.update(b"%d " % len(part))
        digest.update(part)
    return digest.hexdigest()
