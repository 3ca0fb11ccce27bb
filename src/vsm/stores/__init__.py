"""Stores that last: tasks with their examples, and the memory, in SQLite or PostgreSQL.

:class:`Store` is the contract. :func:`open_store` opens what a path or a ``postgresql://`` address
names.
"""

from vsm.stores.contract import Example, NewExample, Remembered, Store, StoredMemory, Support, Task
from vsm.stores.opening import default_store, is_store, open_store

__all__ = [
    "Example",
    "NewExample",
    "Remembered",
    "Store",
    "StoredMemory",
    "Support",
    "Task",
    "default_store",
    "is_store",
    "open_store",
]
