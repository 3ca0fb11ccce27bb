"""Persistent stores of tasks, their examples and the memory, in SQLite or PostgreSQL."""

from vsm.stores.databases import default_store, is_store
from vsm.stores.records import (
    Example,
    NewExample,
    RememberedClass,
    StoredMemory,
    Support,
    Task,
    Versions,
    name_error,
)
from vsm.stores.store import Store, open_store

__all__ = [
    "Example",
    "NewExample",
    "RememberedClass",
    "Store",
    "StoredMemory",
    "Support",
    "Task",
    "Versions",
    "default_store",
    "is_store",
    "name_error",
    "open_store",
]
