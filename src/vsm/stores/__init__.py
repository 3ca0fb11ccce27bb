"""Persistent stores of tasks, their examples and the memory, in SQLite or PostgreSQL."""

from vsm.stores.databases import default_store, is_store
from vsm.stores.store import NewExample, Store, Support, Versions, open_store, require_name

__all__ = [
    "NewExample",
    "Store",
    "Support",
    "Versions",
    "default_store",
    "is_store",
    "open_store",
    "require_name",
]
