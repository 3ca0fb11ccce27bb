"""Every kind of store keeps the contract of ``vsm.stores.Store``."""

import contextlib
import re
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from store_helpers import ENCODER, WIDTH, same, small_memory, some_examples, take_in
from vsm.cli import main
from vsm.encoders import EncoderIdentity
from vsm.errors import (
    MemoryFileError,
    NotStoredError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from vsm.memory import SlotMemory
from vsm.memory.named import NamedMemory
from vsm.memory.slots.kanerva import KanervaMemory
from vsm.runs.loading import read_memory
from vsm.stores import Store, default_store, open_store, require_name
from vsm.stores.store import SCHEMA_VERSION

MANY = 1_000_000


@pytest.fixture
def store(store_target: str) -> Iterator[Store]:
    with contextlib.closing(open_store(store_target)) as opened:
        opened.bind(ENCODER, small_memory())
        yield opened


@pytest.fixture
def other(store: Store, store_target: str) -> Iterator[Store]:
    """The same store, as another server has it."""
    with contextlib.closing(open_store(store_target)) as opened:
        opened.bind(ENCODER, small_memory())
        yield opened


def test_tasks_and_examples_are_there_for_others_at_once(store: Store, other: Store) -> None:
    first, second = store.create_task("trees", MANY), store.create_task("täsk ✓", MANY)
    assert [task.name for task in other.tasks()] == ["trees", "täsk ✓"]
    given = some_examples(3)
    ids = store.add_examples(first.id, "oak", given, MANY)
    store.add_examples(first.id, "elm", given[:1], MANY)
    found = other.task(first.id)
    assert found.classes == {"elm": 1, "oak": 3}
    assert found.version == 3
    assert [one.id for one in found.examples][:3] == ids
    assert [one.file for one in found.examples] == [
        "0.png",
        "1.png",
        "2.png",
        "0.png",
    ]
    assert other.example_file(first.id, ids[1], "thumbnail") == given[1].thumbnail
    originals = [other.example_file(first.id, one, "original") for one in ids]
    assert originals == [None, b"file", None]
    support = other.support(first.id)
    assert [one.label for one in support.examples] == ["oak", "oak", "oak", "elm"]
    np.testing.assert_array_equal(support.features[1].numpy(), given[1].embedding)
    assert other.task(second.id).examples == []
    store.delete_example(first.id, ids[0])
    assert other.task(first.id).classes == {"elm": 1, "oak": 2}
    other.delete_task(first.id)
    assert [task.id for task in store.tasks()] == [second.id]
    with pytest.raises(NotStoredError, match=f"task: there is no '{first.id}'"):
        store.support(first.id)


def test_versions_rise_with_what_answers_depend_on(store: Store, other: Store) -> None:
    task, idle = store.create_task("a", MANY).id, store.create_task("b", MANY).id
    before = other.versions([task, idle, "0" * 32, "nonsense\0"])
    assert set(before) == {task, idle}
    store.add_examples(task, "oak", some_examples(2), MANY)
    after = other.versions([task, idle])
    assert after[task].task > before[task].task
    assert after[idle] == before[idle]
    store.remember(task, take_in)
    assert other.versions([idle])[idle].memory > before[idle].memory
    same_again = other.versions([task])
    store.remember(task, take_in)  # nothing is left to take in
    assert other.versions([task]) == same_again
    assert other.versions([]) == {}


def test_a_memory_comes_back_to_the_bit(store: Store, other: Store) -> None:
    begun = small_memory()
    stored = other.memory()
    assert same(stored.named, begun)
    assert stored.named is not None
    assert stored.named.provenance == begun.provenance
    task = store.create_task("trees", MANY).id
    store.add_examples(task, "oak", some_examples(3), MANY)
    changes, after = store.remember(task, take_in)
    assert changes.added == ("oak",)
    expected, _ = take_in(begun, store.support(task).features, ["oak"] * 3)
    assert same(after, expected)
    assert same(other.memory().named, expected)
    assert all(one.remembered for one in other.task(task).examples)
    other.change_memory(lambda memory: memory.forget(["oak"]))
    assert same(store.memory().named, begun)
    assert not any(one.remembered for one in store.task(task).examples)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE vsm_memory SET tensors = substr(tensors, 1, 30)",
        "UPDATE vsm_memory SET metadata = replace(metadata, 'ash', 'oak')",
        "UPDATE vsm_memory SET metadata = ''",
        "UPDATE vsm_memory SET digest = ''",
        "UPDATE vsm_memory SET encoder = 'another'",
    ],
)
def test_a_changed_memory_is_refused_until_it_is_replaced(
    store: Store, other: Store, change: str
) -> None:
    with store.database.writing() as connection:
        connection.change(change)
        connection.change("UPDATE vsm_memory SET version = version + 1")
    with pytest.raises(StoreError, match="is damaged: its memory cannot be read"):
        other.memory()
    other.replace_memory(small_memory())
    assert same(store.memory().named, small_memory())


def test_a_changed_example_is_refused_until_it_is_deleted(store: Store, other: Store) -> None:
    task = store.create_task("trees", MANY).id
    [first, second] = store.add_examples(task, "oak", some_examples(2), MANY)
    with store.database.writing() as connection:
        connection.change("UPDATE vsm_examples SET label = 'elm' WHERE id = ?", first)
    with pytest.raises(StoreError, match=f"damaged: the example {first} cannot be read"):
        other.support(task)
    other.delete_example(task, first)
    assert [one.id for one in other.support(task).examples] == [second]


def test_examples_are_taken_in_once_by_however_many(store: Store, other: Store) -> None:
    task = store.create_task("trees", MANY).id
    store.add_examples(task, "oak", some_examples(4), MANY)
    stores = [store, other] * 4
    threads = [threading.Thread(target=one.remember, args=(task, take_in)) for one in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory = store.memory().named
    assert memory is not None
    assert int(memory.slots.counts[memory.places["oak"]]) == 4
    assert len(memory.provenance) == 2


def test_servers_that_write_at_the_same_time_lose_nothing(store: Store, other: Store) -> None:
    task = store.create_task("trees", MANY).id

    def write(to: Store, name: str) -> None:
        for number in range(5):
            own = to.create_task(f"{name}{number}", MANY).id
            to.add_examples(own, f"{name}{number}", some_examples(2), MANY)
            to.add_examples(task, name, some_examples(1), MANY)
            to.remember(own, take_in)

    writers = [(store, "a"), (other, "b"), (store, "c")]
    threads = [threading.Thread(target=write, args=one) for one in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.task(task).classes == {"a": 5, "b": 5, "c": 5}
    assert len(store.tasks()) == 16
    expected = {f"{name}{number}" for name in "abc" for number in range(5)}
    for one in (store, other):
        memory = one.memory().named
        assert memory is not None
        assert set(memory.names) == expected | set(small_memory().names)
        assert len(memory.provenance) == 16
    fresh, known = (one.memory().named for one in (other, store))
    assert same(fresh, known)


def test_what_fails_leaves_nothing_behind(store: Store) -> None:
    task = store.create_task("trees", MANY).id
    store.add_examples(task, "oak", some_examples(2), MANY)
    before = store.versions([task]), store.tasks(), store.task(task).examples

    def fail(*_: object) -> NamedMemory:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.change_memory(fail)
    with pytest.raises(ZeroDivisionError):
        store.remember(task, fail)  # type: ignore[arg-type]
    broken = [*some_examples(2), some_examples(1)[0]._replace(thumbnail=None)]  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailableError, match="cannot be used now"):
        store.add_examples(task, "oak", broken, MANY)
    assert (store.versions([task]), store.tasks(), store.task(task).examples) == before
    assert store.encoder() == ENCODER


def test_limits_are_kept_and_named(store: Store) -> None:
    task = store.create_task("one", 2).id
    store.create_task("two", 2)
    with pytest.raises(StoreFullError, match="tasks: there are 2 already, of at most 2"):
        store.create_task("three", 2)
    store.add_examples(task, "oak", some_examples(3), 4)
    with pytest.raises(StoreFullError, match=r"files: the task has 3 examples, and 2 more .* 4"):
        store.add_examples(task, "oak", some_examples(2), 4)
    assert store.task(task).classes == {"oak": 3}
    store.add_examples(task, "oak", some_examples(1), 4)


@pytest.mark.parametrize(
    "id_", ["", "0" * 32, "x", "a\0b", "'; DROP TABLE vsm_tasks; --", "é" * 32]
)
def test_what_is_not_there_is_said_to_be(store: Store, id_: str) -> None:
    task = store.create_task("trees", MANY).id
    for ask in (store.task, store.delete_task, store.support):
        with pytest.raises(NotStoredError, match="task: there is no"):
            ask(id_)
    with pytest.raises(NotStoredError, match="example: there is no"):
        store.delete_example(task, id_)
    with pytest.raises(NotStoredError, match="example: there is no"):
        store.example_file(task, id_, "original")
    with pytest.raises(NotStoredError, match="there is no image"):
        store.class_thumbnail(id_)
    with pytest.raises(NotStoredError):
        store.remember(id_, take_in)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "neither begins nor ends with a space"),
        (" a", "neither begins nor ends with a space"),
        ("a\0b", r"control characters, got '\\x00'"),
        ("a\ud800", "control characters"),
        ("a" * 201, "at most 200 characters, got 201"),
    ],
)
def test_names_that_not_every_store_can_hold_are_refused(
    store: Store, name: str, problem: str
) -> None:
    task = store.create_task("trees", MANY).id
    with pytest.raises(StoreError, match=f"name: .*{problem}"):
        store.create_task(name, MANY)
    with pytest.raises(StoreError, match=f"label: .*{problem}"):
        store.add_examples(task, name, some_examples(1), MANY)
    require_name("label", "none of these, ✓ '\"%_\\?")


def test_remembered_classes_keep_the_thumbnail_of_their_first_example(store: Store) -> None:
    task = store.create_task("trees", MANY).id
    given = some_examples(2)
    store.add_examples(task, "Çöpper beech", given, MANY)
    assert store.class_thumbnails() == set()
    store.remember(task, take_in)
    assert store.class_thumbnails() == {"Çöpper beech"}
    assert store.class_thumbnail("Çöpper beech") == given[0].thumbnail


def test_another_encoders_store_is_refused_with_both_names(store: Store) -> None:
    with pytest.raises(StoreError, match=r"of the encoder encoder of the tests \[5+\], but .* new"):
        store.bind(EncoderIdentity("new", "6" * 64), None)
    stranger = small_memory()
    stranger = NamedMemory(stranger.memory, stranger.names, EncoderIdentity("new", "6"), (), "vsm")
    with pytest.raises(MemoryFileError, match="holds features of the encoder new"):
        store.replace_memory(stranger)
    assert same(store.memory().named, small_memory())


def test_a_model_without_memory_has_tasks_all_the_same(store_target: str) -> None:
    with contextlib.closing(open_store(store_target)) as store:
        assert store.encoder() is None
        assert store.memory() == (0, None)
        with pytest.raises(StoreError, match="is empty"):
            store.change_memory(lambda memory: memory)
        store.bind(ENCODER, None)
        assert store.encoder() == ENCODER
        task = store.create_task("a", MANY).id
        store.add_examples(task, "oak", some_examples(1), MANY)
        with pytest.raises(StoreError, match="has no long-term memory"):
            store.remember(task, take_in)


def test_slots_of_means_are_stored_and_those_without_classes_refused(store_target: str) -> None:
    integers = torch.arange(2)
    slots = SlotMemory(torch.randn(2, WIDTH), integers, integers + 1, integers)
    named = NamedMemory(slots, ("a", "b"), ENCODER, (), "vsm", 7)
    with contextlib.closing(open_store(store_target)) as store:
        kanerva = KanervaMemory(torch.zeros(2, 3), torch.zeros(2, 2), torch.tensor(0))
        with pytest.raises(MemoryFileError, match="of the method kanerva do not stand for classes"):
            store.bind(ENCODER, NamedMemory(kanerva, (), ENCODER, (), "kanerva"))
        store.bind(ENCODER, named)
    with contextlib.closing(open_store(store_target)) as store:
        found = store.memory().named
        assert same(found, named)
        assert found is not None
        assert (found.method, found.step) == ("vsm", 7)


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_tables_of_another_version_are_refused(store_target: str, version: int) -> None:
    with (
        contextlib.closing(open_store(store_target)) as store,
        store.database.writing() as connection,
    ):
        connection.change("UPDATE vsm_schema SET version = ?", version)
    with pytest.raises(StoreError, match=rf"has tables of version {version}, but this version"):
        open_store(store_target)


def test_several_servers_that_start_at_once_create_the_tables_once(store_target: str) -> None:
    opened, errors = [], []

    def start() -> None:
        try:
            store = open_store(store_target)
            store.bind(ENCODER, small_memory())
            opened.append(store)
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert same(opened[0].memory().named, small_memory())
    assert opened[0].database.query("SELECT version FROM vsm_schema") == [(SCHEMA_VERSION,)]
    for store in opened:
        store.close()


def test_a_store_that_is_closed_or_gone_says_so(store_target: str) -> None:
    store = open_store(store_target)
    store.close()
    with pytest.raises(StoreUnavailableError, match="is closed"):
        store.tasks()


def test_connections_that_broke_are_made_anew(postgres: object, store_target: str) -> None:
    if not store_target.startswith("postgresql"):
        pytest.skip("a file has no connection that breaks")
    store = open_store(store_target)
    store.bind(ENCODER, small_memory())
    with (
        contextlib.closing(open_store(store_target)) as other,
        other.database.writing() as connection,
    ):
        connection.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
            "current_database() AND pid <> pg_backend_pid()"
        )
    assert store.create_task("after", MANY).name == "after"
    store.close()


def test_what_is_no_store_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("no database " * 100)
    with pytest.raises(StoreError, match=r"text\.sqlite is not a store.* that ends in \.sqlite"):
        open_store(text)
    assert text.read_text() == "no database " * 100
    with pytest.raises(StoreError, match="is a folder"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match="expected a path or postgresql://"):
        open_store("mysql://host/base")
    with pytest.raises(StoreError, match="there is none at"):
        open_store(tmp_path / "new.sqlite", create=False)
    with pytest.raises(
        StoreUnavailableError, match=r"postgresql://127\.0\.0\.1/nothing cannot be used"
    ):
        open_store("postgresql://user:secret@127.0.0.1:9/nothing")


def test_the_default_store_is_in_the_data_folder(data_folder: Path) -> None:
    path = default_store("runs/mine", ENCODER)
    assert path == data_folder / "stores" / "mine-555555555555.sqlite"


def test_commits_are_flushed_to_the_disk(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.sqlite")
    assert store.database.query("PRAGMA journal_mode") == [("wal",)]
    assert store.database.query("PRAGMA synchronous") == [(2,)]  # FULL
    store.close()


def test_memory_files_go_into_a_store_and_out_of_it(
    store_target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, added = tmp_path / "memory.safetensors", tmp_path / "added.safetensors"
    begun = small_memory()
    begun.write(file)
    grown, _ = take_in(begun, torch.randn(3, WIDTH), ["oak"] * 3)
    grown.write(added)
    out = tmp_path / "out.safetensors"
    assert main(["memory", "import", str(file), "--store", store_target]) == 0
    assert main(["memory", "import", str(added), "--store", store_target]) == 0  # joined
    assert main(["memory", "export", store_target, str(out)]) == 0
    assert same(read_memory(out), grown)
    assert re.search(r"out\.safetensors: 4 slots\n$", capsys.readouterr().out)
    assert main(["memory", "import", str(file), "--store", store_target, "--overwrite"]) == 0
    assert main(["memory", "export", store_target, str(out)]) == 0
    assert same(read_memory(out), begun)
    assert main(["memory", "export", store_target, str(tmp_path / "out.csv")]) == 0
    stranger = NamedMemory(begun.memory, begun.names, EncoderIdentity("new", "6"), (), "vsm")
    stranger.write(file)
    assert main(["memory", "import", str(file), "--store", store_target]) == 2
    assert "holds features of the encoder new" in capsys.readouterr().err


def test_export_says_where_there_is_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", "export", str(tmp_path / "a.sqlite"), "out.csv"]) == 2
    assert "store: there is none at" in capsys.readouterr().err
    assert not (tmp_path / "a.sqlite").exists()


def test_files_that_are_no_memory_files_are_called_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, moved = tmp_path / "a.sqlite", tmp_path / "moved"
    file = tmp_path / "memory.safetensors"
    small_memory().write(file)
    assert main(["memory", "import", str(file), "--store", str(store)]) == 0
    shutil.copy(store, moved)
    capsys.readouterr()
    for words in (["show", store], ["forget", moved, "oak"], ["import", moved, "--store", store]):
        assert main(["memory", *map(str, words)]) == 2
        told = capsys.readouterr().err
        assert f"memory: {words[1]} is a store; write its memory to a file" in told
        assert f"vsm memory export {words[1]} FILE.safetensors" in told
    for suffix in (".csv", ".npz"):
        written = tmp_path / f"slots{suffix}"
        assert main(["memory", "export", str(moved), str(written)]) == 0  # also by its contents
        assert main(["memory", "import", str(written), "--store", str(store)]) == 2
        assert f"memory: {written} is for other programs and cannot be" in capsys.readouterr().err
        file.rename(written)  # a memory file by another name is still one
        assert same(read_memory(written), small_memory())
        written.rename(file)
    file.write_bytes(file.read_bytes()[:100])
    assert main(["memory", "show", str(file)]) == 2
    assert "memory.safetensors is damaged" in capsys.readouterr().err


def test_an_empty_file_becomes_a_store_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    file.touch()
    open_store(file).close()
    damaged = bytearray(file.read_bytes())
    damaged[16:100] = bytes(84)
    file.write_bytes(damaged)
    with pytest.raises(StoreUnavailableError, match="no other program hold it"):
        open_store(file)


def test_a_full_or_locked_file_is_an_error_that_can_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm.stores.databases.SQLITE_TIMEOUT", 0.05)
    with contextlib.closing(open_store(tmp_path / "store.sqlite")) as store:
        store.bind(ENCODER, small_memory())
        with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as raw:
            raw.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailableError, match="database is locked"):
                store.create_task("a", MANY)
            assert store.tasks() == []  # reading goes on
        assert store.create_task("a", MANY).name == "a"
