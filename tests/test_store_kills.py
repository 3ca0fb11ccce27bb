"""Processes killed at any moment lose nothing that was acknowledged, and leave nothing half done.

``VSM_KILLS=500 pytest tests/test_store_kills.py`` is a longer campaign.
"""

import contextlib
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import ForkedPython
from store_helpers import some_examples
from store_writer import AT_ONCE
from vsm.stores import Store, open_store

KILLS = int(os.environ.get("VSM_KILLS", "10"))  # of each kind of store
LONGEST = 0.15  # seconds of writing before the kill


def logged(log: Path) -> dict[str, dict[str, str]]:
    """Return of every task what was acknowledged last, and what was begun after it."""
    found: dict[str, dict[str, str]] = {}
    for line in log.read_text().splitlines():
        said = json.loads(line)
        one = found.setdefault(said["task"], {"label": said["label"], "did": "", "will": ""})
        if "did" in said:
            one |= {"did": said["did"], "will": ""}
        else:
            one["will"] = said["will"]
    return found


def check(store: Store, log: Path) -> dict[str, int]:
    """Compare a store with what its writers were told, and count what they did."""
    tasks = {task.id: task for task in store.tasks()}
    memory = store.memory().named
    assert memory is not None
    counts = {"acknowledged": 0, "undecided": 0}
    for id_, (label, did, will) in ((k, v.values()) for k, v in logged(log).items()):
        counts["acknowledged"] += 1
        counts["undecided"] += bool(will)
        assert did  # creating is acknowledged before anything else is begun
        if did == "delete" or (will == "delete" and id_ not in tasks):
            assert id_ not in tasks, f"{label} came back"
            assert label in memory.names  # what was remembered stays
            continue
        assert id_ in tasks, f"{label} is lost"
        examples = store.task(id_).examples
        assert len(examples) in ({0, AT_ONCE} if will == "add" else {0 if did == "create" else 3})
        remembered = {one.remembered for one in examples}
        assert len(remembered) <= 1, f"half of {label} is remembered"
        assert (label in memory.names) == (remembered == {True}), label
        if label in memory.names:
            assert int(memory.slots.counts[memory.places[label]]) == AT_ONCE
        if did == "remember" and will != "forget":
            assert label in memory.names, f"{label} is forgotten"
        if did == "forget":
            assert label not in memory.names, f"{label} is remembered still"
        if examples:
            number = int(label.rpartition("-")[2])
            rows = np.stack([one.embedding for one in some_examples(AT_ONCE, number)])
            assert torch.equal(store.support(id_).features, torch.from_numpy(rows))
    return counts


def wait_for_the_database(store: Store) -> None:
    """Wait until PostgreSQL has noticed that a client is gone, and finished what it was told."""
    while store.database.name.startswith("postgresql"):
        others = store.database.query(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
            "pg_backend_pid() AND backend_type = 'client backend'"
        )
        if not others:
            break
        time.sleep(0.01)


def test_killed_writers_lose_nothing_that_was_acknowledged(
    store_target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, writer = tmp_path / "log", Path(__file__).with_name("store_writer.py")
    wait, acknowledged = random.Random(0), 0
    for number in range(KILLS):
        process = ForkedPython({}, writer, store_target, log, str(number))
        begin, size = time.monotonic(), log.stat().st_size if log.exists() else 0
        while process.poll() is None and time.monotonic() < begin + 20:
            if number == 0 or number % 4:  # every fourth may be killed while it opens the store
                if log.exists() and log.stat().st_size > size:
                    break
            elif time.monotonic() > begin + wait.uniform(0, 0.3):
                break
            time.sleep(0.002)
        time.sleep(wait.uniform(0, LONGEST))
        assert process.poll() is None, process.communicate()
        with process:  # which waits until it is gone
            process.kill()
        with contextlib.closing(open_store(store_target)) as store:
            wait_for_the_database(store)
            acknowledged = check(store, log)["acknowledged"]
            if store_target.endswith(".sqlite"):
                assert store.database.query("PRAGMA integrity_check") == [("ok",)]
    assert acknowledged >= KILLS // 2
    with capsys.disabled():
        if "VSM_KILLS" in os.environ:
            kind = store_target.partition(":")[0] if "://" in store_target else "sqlite"
            print(f"\n{kind}: {KILLS} kills, {acknowledged} tasks acknowledged, 0 lost")
