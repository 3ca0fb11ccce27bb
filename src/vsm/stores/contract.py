"""What every store does; ``tests/test_stores.py`` holds each kind to it."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vsm.memory.named import Changes, EncoderIdentity, NamedMemory

Row = npt.NDArray[np.float32]
LONGEST_NAME = 200  # characters
ID = re.compile(r"[0-9a-f]{32}")


class Task(NamedTuple):
    """A task: classes of one's own, each with a few examples.

    Attributes:
        id: made by the store.
        name: for people.
        created: in UTC, as ISO 8601 has it.
        version: raised by every change of its examples.
        classes: how many examples each label has.
    """

    id: str
    name: str
    created: str
    version: int
    classes: dict[str, int]


class NewExample(NamedTuple):
    """An example as it comes in: ``embedding [D]``, a PNG, and the file itself if it is kept."""

    file: str
    embedding: Row
    thumbnail: bytes
    original: bytes | None = None


class Example(NamedTuple):
    """An example as it is listed; ``remembered`` if the memory has taken it in."""

    id: str
    label: str
    file: str
    created: str
    remembered: bool


class Versions(NamedTuple):
    """What an answer depends on: counters that rise with every change."""

    task: int
    memory: int


class Support(NamedTuple):
    """The embedded examples of a task, oldest first.

    Attributes:
        version: of the task.
        ids: of the examples.
        labels: one for each.
        features: ``[n, D]``.
        remembered: which of them the memory has taken in.
    """

    version: int
    ids: list[str]
    labels: list[str]
    features: Tensor
    remembered: list[bool]


class StoredMemory(NamedTuple):
    """The memory and its version; ``named`` is None for models without one."""

    version: int
    named: NamedMemory | None


@dataclass(frozen=True)
class Remembered:
    """A class of the memory as it is listed.

    Attributes:
        name: of the class.
        count: images that it was made of.
        last_update: the step of its latest change.
        added: whether people added it, in contrast to what training left.
        has_thumbnail: whether there is a picture of it.
    """

    name: str
    count: int
    last_update: int
    added: bool
    has_thumbnail: bool


Consolidate = Callable[[NamedMemory, Tensor, Sequence[str]], tuple[NamedMemory, Changes]]
"""A memory, features and their labels to the memory that has taken them in."""


class Store(Protocol):
    """Tasks, examples and the memory of one encoder.

    Every method is one transaction: all of it is stored once it returns, whatever happens to the
    process, and none of it if it raises. Any thread may call any method; other processes may use
    the same store. Names and labels are checked by :func:`require_name` before.

    Raises:
        NotStoredError: if there is no such task, example or class.
        StoreFullError: if a limit is reached.
        StoreUnavailableError: if the database cannot be reached or written.
    """

    def bind(self, encoder: EncoderIdentity, memory: NamedMemory | None) -> None:
        """Begin with an encoder and its memory, or check that the store is of that encoder."""

    def encoder(self) -> EncoderIdentity | None:
        """Return whose features it holds; None before the first :meth:`bind`."""

    def check(self) -> None:
        """Raise unless the database answers."""

    def close(self) -> None:
        """Give all connections back."""

    def create_task(self, name: str, most: int) -> Task:
        """Create a task, unless there are ``most`` of them."""

    def tasks(self) -> list[Task]:
        """Return all tasks, oldest first."""

    def task(self, task: str) -> Task:
        """Return one."""

    def delete_task(self, task: str) -> None:
        """Delete a task and its examples; what it had the memory take in stays there."""

    def add_examples(
        self, task: str, label: str, examples: Sequence[NewExample], most: int
    ) -> list[str]:
        """Add examples of a class and return their ids, unless there would be over ``most``."""

    def examples(self, task: str) -> list[Example]:
        """Return the examples of a task, oldest first."""

    def support(self, task: str) -> Support:
        """Return the embedded examples of a task."""

    def thumbnail(self, task: str, example: str) -> bytes:
        """Return the PNG of an example."""

    def original(self, task: str, example: str) -> bytes | None:
        """Return the file of an example; None if it was not kept."""

    def delete_example(self, task: str, example: str) -> None:
        """Delete an example."""

    def versions(self, tasks: Sequence[str]) -> dict[str, Versions]:
        """Return what has changed, of those tasks that exist."""

    def memory(self) -> StoredMemory:
        """Return the whole memory."""

    def change_memory(self, change: Callable[[NamedMemory], NamedMemory]) -> StoredMemory:
        """Put what ``change`` makes of the memory in its place; others wait for their turn.

        Examples of classes that are gone count as not remembered again.
        """

    def replace_memory(self, memory: NamedMemory) -> StoredMemory:
        """Put another memory of the same encoder in its place, whatever was there."""

    def remember(self, task: str, consolidate: Consolidate) -> tuple[Changes, StoredMemory]:
        """Let the memory take in the examples of a task that it has not taken in yet."""

    def classes(
        self, search: str = "", near: str | None = None, offset: int = 0, limit: int = 1000
    ) -> tuple[int, list[Remembered]]:
        """Return how many remembered classes match, and a part of them.

        Args:
            search: a part of the name; upper and lower case are the same.
            near: sort by the distance of class means to that of this class, in place of age.
            offset: how many to leave out.
            limit: how many to return at most.
        """

    def class_thumbnail(self, name: str) -> bytes:
        """Return the PNG of a remembered class."""


def name_problem(name: str) -> str | None:
    """Return what is wrong with the name of a task, a label or a class; None if nothing is."""
    if not name or name != name.strip():
        return "expected text that neither begins nor ends with a space"
    if len(name) > LONGEST_NAME:
        return f"expected at most {LONGEST_NAME} characters, got {len(name)}"
    odd = next((one for one in name if unicodedata.category(one) in ("Cc", "Cs")), None)
    if odd is not None:
        return f"expected text without control characters, got {odd!r}"
    return None
