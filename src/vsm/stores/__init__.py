"""Persistent stores of tasks, their examples and the memory, in SQLite or PostgreSQL."""

from vsm.stores.databases import default_store, is_store
from vsm.stores.records import Example, NewExample, RememberedClass, StoredMemory, Support, Task
from vsm.stores.store import Store, open_store

__all__ = [
    "Example",
    "NewExample",
    "RememberedClass",
    "Store",
    "StoredMemory",
    "Support",
    "Task",
    "default_store",
    "is_store",
    "open_store",
]
