"""What a store takes and returns."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vsm.memory.named import Changes, NamedMemory

Row = npt.NDArray[np.float32]
MAX_NAME_LENGTH = 200

Consolidate = Callable[[NamedMemory, Tensor, Sequence[str]], tuple[NamedMemory, Changes]]
"""A memory, features and their labels to the memory that includes them."""


@dataclass(frozen=True)
class Task:
    """A task: classes defined by a user, each with a few examples.

    Attributes:
        id: chosen by the store.
        name: for display.
        created: in UTC, in ISO 8601 format.
        version: incremented by every change of its examples.
        classes: number of examples of each label.
    """

    id: str
    name: str
    created: str
    version: int
    classes: dict[str, int]


class NewExample(NamedTuple):
    """An example to add: ``embedding [D]``, a PNG, and the uploaded file if it is to be kept."""

    file: str
    embedding: Row
    thumbnail: bytes
    original: bytes | None = None


@dataclass(frozen=True)
class Example:
    """A stored example; ``remembered`` if the memory includes it."""

    id: str
    label: str
    file: str
    created: str
    remembered: bool


class Versions(NamedTuple):
    """Counters that are incremented by every change of what answers depend on."""

    task: int
    memory: int


class Support(NamedTuple):
    """The embedded examples of a task, oldest first; ``features [n, D]``."""

    ids: list[str]
    labels: list[str]
    features: Tensor
    remembered: list[bool]


class StoredMemory(NamedTuple):
    """The memory and its version; ``named`` is None for models without one."""

    version: int
    named: NamedMemory | None


@dataclass(frozen=True)
class RememberedClass:
    """A class of the memory.

    Attributes:
        name: of the class.
        count: number of its images.
        last_update: the step of its latest change.
        added: whether a user added it, as opposed to training.
        has_thumbnail: whether there is an image of it.
    """

    name: str
    count: int
    last_update: int
    added: bool
    has_thumbnail: bool


def name_error(name: str) -> str | None:
    """Return what is wrong with the name of a task, label or class; None if it is valid."""
    if not name or name != name.strip():
        return "expected text that neither begins nor ends with a space"
    if len(name) > MAX_NAME_LENGTH:
        return f"expected at most {MAX_NAME_LENGTH} characters, got {len(name)}"
    odd = next((one for one in name if unicodedata.category(one) in ("Cc", "Cs")), None)
    if odd is not None:
        return f"expected text without control characters, got {odd!r}"
    return None
