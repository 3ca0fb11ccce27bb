"""Memories as files: names, encoders, provenance, and processes that write at the same time."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from classify_helpers import tiny_model, write_folders, write_run
from forked import ForkedPython
from launching_helpers import finish
from vsm.cli import main
from vsm.data import ImageDataset
from vsm.errors import MemoryFileError, RunError
from vsm.memory.named import NamedMemory, manual_consolidation
from vsm.memory.slots.consolidation import MeanConsolidation
from vsm.runs.directory import MODELS
from vsm.runs.loading import load, read_memory, update_memory
from vsm.settings import METHODS, Method
from vsm.system.tensor_files import load_tensors, save_tensors

WIDTH = tiny_model().num_features


def values(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def tiny_consolidation() -> MeanConsolidation:
    """How the memory of the tiny model takes in what people give it."""
    model = tiny_model()
    found = manual_consolidation(model.consolidation, model.settings.memory)
    assert isinstance(found, MeanConsolidation)
    return found


def grown_by(memory: NamedMemory, features: Tensor, labels: list[str]) -> NamedMemory:
    return memory.add(tiny_consolidation(), features, labels, {"from": "a test"})[0]


def files_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_run_leaves_a_memory_with_names_encoder_and_provenance(
    tmp_path: Path, tiny_dataset: ImageDataset
) -> None:
    run = write_run(tmp_path / "run")
    memory = read_memory(run)
    assert memory.names == tiny_dataset.class_names[:12]
    assert memory.encoder.name == "conv4 of tiny"
    assert memory.provenance == ({"action": "trained", "data": "tiny", "step": 5},)
    assert (memory.step, memory.method) == (5, "vsm")
    assert not memory.added
    loaded = load(run).memory
    assert loaded is not None
    assert loaded.metadata() == memory.metadata()


def test_a_file_that_does_not_say_what_a_memory_needs_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    file = run / "memory.safetensors"
    tensors, metadata = load_tensors(file)
    for missing in ("encoder", "class_names", "provenance", "method", "step"):
        kept = {name: value for name, value in metadata.items() if name != missing}
        save_tensors(file, tensors, kept)
        with pytest.raises(RunError, match=rf"memory\.safetensors .*KeyError\('{missing}'\)"):
            read_memory(run)
    save_tensors(file, tensors, metadata | {"class_names": metadata["class_names"][1:]})
    with pytest.raises(RunError, match="has 12 slots but 11 names"):
        read_memory(run)
    others = {name: tensor for name, tensor in tensors.items() if name != "counts"}
    save_tensors(file, others, metadata)
    with pytest.raises(RunError, match=r"memory\.safetensors does not hold a memory"):
        read_memory(run)


def test_the_fingerprint_is_of_the_encoder_alone(tmp_path: Path) -> None:
    one, other = read_memory(write_run(tmp_path / "a")), read_memory(write_run(tmp_path / "b"))
    assert one.encoder == other.encoder
    # Another method on the same backbone.
    assert read_memory(write_run(tmp_path / "c", "rote")).encoder == one.encoder
    assert read_memory(write_run(tmp_path / "d", seed=1)).encoder != one.encoder


def test_adding_twice_is_adding_at_once(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run"))
    rows, labels = values(7), ["a", "b", "a", "a", "b", "c", "a"]
    at_once = grown_by(memory, rows, labels)
    by_parts = grown_by(grown_by(memory, rows[:3], labels[:3]), rows[3:], labels[3:])
    assert at_once.names == by_parts.names == (*memory.names, "a", "b", "c")
    assert at_once.added == {"a", "b", "c"}
    assert by_parts.slots.counts[-3:].tolist() == [4, 2, 1]
    expected = torch.stack(
        [torch.stack([rows[i] for i in range(7) if labels[i] == name]).mean(0) for name in "abc"]
    )
    for grown in (at_once, by_parts):
        torch.testing.assert_close(grown.slots.content[-3:], expected)
        assert torch.equal(grown.slots.content[:-3], memory.slots.content)
    last = by_parts.slots.last_update[-3:].tolist()
    assert last[0] == last[1] == last[2] == int(memory.slots.last_update.max()) + 2


def test_what_finds_no_room_is_told(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run"))
    consolidation = tiny_consolidation()
    consolidation.capacity = 13
    grown, changes = memory.add(consolidation, values(3), ["new", "more", memory.names[2]], {})
    assert changes == (("new",), (memory.names[2],), ("more",))
    assert grown.names == (*memory.names, "new")


def test_forgetting_drops_the_slots_and_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = read_memory(run)
    dropped = [before.names[3], before.names[0]]
    after = update_memory(run, lambda memory: memory.forget(dropped))
    assert after.names == tuple(name for name in before.names if name not in dropped)
    kept = [slot for slot, name in enumerate(before.names) if name not in dropped]
    assert torch.equal(read_memory(run).slots.content, before.slots.content[kept])
    stored = (run / "memory.safetensors").read_bytes()
    with pytest.raises(
        MemoryFileError, match=r"no class 'unicorn' in the memory, only 'pattern01'"
    ):
        update_memory(run, lambda memory: memory.forget([before.names[5], "unicorn"]))
    assert (run / "memory.safetensors").read_bytes() == stored


def test_names_that_training_left_are_not_among_those_that_people_added(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run"))
    grown = grown_by(memory, values(2), ["mine", memory.names[0]])
    assert grown.added == {"mine"}
    assert grown.forget(["mine"]).added == frozenset()
    assert grown.forget([memory.names[0]]).added == {"mine"}


def test_adding_nothing_changes_nothing(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run"))
    assert memory.add(tiny_consolidation(), values(0), [], {}) == (memory, ((), (), ()))


@pytest.mark.parametrize("method", METHODS)
def test_people_add_means_where_slots_stand_for_classes(method: Method) -> None:
    model = tiny_model(method)
    found = manual_consolidation(model.consolidation, model.settings.memory)
    if method in ("rote", "transformed", "vsm"):
        assert isinstance(found, MeanConsolidation)
    else:
        assert found is model.consolidation


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    stored = (run / "memory.safetensors").read_bytes()
    script = tmp_path / "script.py"
    script.write_text(
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from vsm.runs.loading import update_memory\n"
        "try:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        "    update_memory(Path(sys.argv[1]), lambda memory: memory.forget(memory.names[:1]))\n"
        "except OSError as error:\n"
        "    sys.exit(str(error))\n"
    )
    [(code, told)] = finish([ForkedPython({}, script, run)])
    assert code == 1
    last = told.splitlines()[-1]
    assert last.startswith("[Errno 27] File too large: ")
    assert last.endswith("memory.safetensors'")
    assert (run / "memory.safetensors").read_bytes() == stored
    assert not [file for file in files_in(run) if "tmp" in file]


def test_merged_memories_are_means_by_counts_of_what_both_have(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run")).forget([])
    rows = values(6)
    labels = ["a", "a", "a", "b", "c", "a"]
    one = grown_by(memory, rows[:4], labels[:4])
    other = grown_by(memory.forget(memory.names), rows[4:], labels[4:])
    merged = one.merge(other)
    expected = grown_by(memory, rows, labels)
    assert merged.names == expected.names
    assert merged.added == {"a", "b", "c"}
    torch.testing.assert_close(merged.slots.content, expected.slots.content)
    assert merged.slots.counts.tolist() == expected.slots.counts.tolist()
    assert len(set(merged.slots.class_ids.tolist())) == len(merged.names)
    emptied = memory.forget(memory.names).merge(one)
    assert emptied.names == one.names


def test_what_is_the_same_in_two_memories_counts_once(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run"))
    grown = grown_by(memory, values(3), ["mine"] * 3)
    merged = grown.merge(memory).merge(grown)
    assert merged.names == grown.names
    assert torch.equal(merged.slots.counts, grown.slots.counts)
    assert torch.equal(merged.slots.content, grown.slots.content)


def test_memories_of_different_encoders_are_not_merged(tmp_path: Path) -> None:
    one = read_memory(write_run(tmp_path / "a"))
    other = read_memory(write_run(tmp_path / "b", seed=1))
    with pytest.raises(MemoryFileError) as refused:
        one.merge(other)
    assert str(one.encoder) in str(refused.value)
    assert str(other.encoder) in str(refused.value)


def test_a_memory_without_slots_for_classes_says_so(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run", "kanerva"))
    assert memory.describe()["slots"] == []
    with pytest.raises(MemoryFileError, match="kanerva do not stand for classes"):
        memory.merge(memory)
    with pytest.raises(MemoryFileError, match="kanerva do not stand for classes"):
        memory.export(tmp_path / "memory.npz")


def test_exports_hold_the_same_numbers(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run"))
    memory.export(tmp_path / "memory.npz")
    memory.export(tmp_path / "memory.csv")
    with np.load(tmp_path / "memory.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["content"], memory.slots.content.numpy())
        assert tuple(arrays["names"]) == memory.names
        assert arrays["counts"].tolist() == memory.slots.counts.tolist()
    with (tmp_path / "memory.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == list(memory.names)
    content = [[float(row[f"feature_{d}"]) for d in range(WIDTH)] for row in rows]
    np.testing.assert_array_equal(np.asarray(content, np.float32), memory.slots.content.numpy())
    with pytest.raises(MemoryFileError, match=r"ends in \.npz or \.csv"):
        memory.export(tmp_path / "memory.txt")


def test_the_nearest_classes_are_those_with_the_most_similar_slots(tmp_path: Path) -> None:
    memory = read_memory(write_run(tmp_path / "run"))
    content = memory.slots.content - memory.slots.content.mean(0)
    told = memory.describe(neighbors=2)
    assert told["num_slots"] == 12
    for slot, row in enumerate(told["slots"]):
        cosines = [
            float(torch.cosine_similarity(content[slot], content[other], dim=0))
            for other in range(12)
        ]
        ranked = sorted((o for o in range(12) if o != slot), key=lambda o: -cosines[o])
        assert [near["name"] for near in row["nearest"]] == [memory.names[o] for o in ranked[:2]]
        assert row["nearest"][0]["similarity"] == pytest.approx(cosines[ranked[0]], abs=1e-3)


def test_processes_that_add_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = read_memory(run)
    adder = Path(__file__).with_name("memory_adder.py")
    processes = [ForkedPython({}, adder, run, prefix, "25") for prefix in ("left", "right")]
    assert [code for code, _ in finish(processes)] == [0, 0]
    after = read_memory(run)
    expected = {f"{side}{number}" for side in ("left", "right") for number in range(25)}
    assert set(after.names) == {*before.names, *expected, "shared"}
    assert int(after.slots.counts[after.names.index("shared")]) == 50
    mean = after.slots.content[after.names.index("shared")]
    torch.testing.assert_close(mean, torch.full_like(mean, 12.0))
    assert len(after.provenance) == 51
    assert files_in(run) == files_in(write_run(tmp_path / "other"))


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    [line] = capsys.readouterr().out.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


def test_the_command_grows_cuts_joins_and_exports_memories(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_dataset: ImageDataset,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = str(write_run(tmp_path / "run"))
    images = str(write_folders(tmp_path / "images", tiny_dataset, 3))
    kept = str(tmp_path / "kept.safetensors")
    names = [tiny_dataset.class_names[c] for c in range(38, 43)]

    assert main(["memory", "add", kept, "--images", images, "--model", run, "--json"]) == 0
    assert printed(capsys) == {"num_slots": 17, "added": names, "updated": [], "dropped": []}
    assert len(read_memory(Path(run)).names) == 12, "the model's own is left alone"
    assert main(["memory", "add", kept, "--images", images, "--model", run]) == 0
    assert "0 added, 5 updated, 0 dropped; 17 slots" in capsys.readouterr().out
    assert read_memory(Path(kept)).provenance[-1]["from"] == "images"

    assert main(["memory", "show", kept, "--json"]) == 0
    shown = printed(capsys)
    assert shown["slots"][-1]["name"] == names[-1]
    assert shown["slots"][-1]["count"] == 6
    assert shown["encoder"]["name"] == "conv4 of tiny"
    assert main(["memory", "show", kept]) == 0
    assert names[-1] in capsys.readouterr().out

    assert main(["memory", "forget", kept, *names[:2], "--json"]) == 0
    assert printed(capsys)["num_slots"] == 15
    assert main(["memory", "add", run, "--images", images, "--json"]) == 0
    assert printed(capsys)["num_slots"] == 17
    both = tmp_path / "both.safetensors"
    assert main(["memory", "merge", kept, run, "--output", str(both)]) == 0
    assert "17 slots" in capsys.readouterr().out
    assert set(read_memory(both).names) == set(read_memory(Path(run)).names)
    assert main(["memory", "export", str(both), str(tmp_path / "both.csv")]) == 0
    assert len((tmp_path / "both.csv").read_text().splitlines()) == 18


def test_the_command_refuses_in_one_line_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_dataset: ImageDataset,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", seed=1)
    plain = write_run(tmp_path / "plain", "vpn")
    images = write_folders(tmp_path / "images", tiny_dataset, 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a").mkdir()
    (tmp_path / "damaged" / "a" / "a.png").write_bytes(b"no image")
    stored = (run / "memory.safetensors").read_bytes()
    kept = tmp_path / "kept.safetensors"
    kept.write_bytes(stored)
    for arguments, message in (
        (["forget", run, "unicorn"], "no class 'unicorn'"),
        (["merge", run, other, "--output", run], "use the memory of one encoder"),
        (["merge", other, other, "--output", kept], "there is a memory at"),
        (["merge", other, other, "--output", run, "--overwrite"], "features of the encoder"),
        (["add", run, "--images", images, "--model", other], "holds features of the encoder"),
        (["add", kept, "--images", images], "name the run whose encoder"),
        (["add", run, "--images", tmp_path / "empty"], "has no class folders"),
        (["add", run, "--images", tmp_path / "damaged"], "a.png: unreadable or truncated"),
        (["add", plain, "--images", images], "has no long-term memory"),
        (["show", plain], "holds none"),
        (["show", tmp_path / "absent"], "holds none"),
        (["show", "glyphs-99w1s"], "holds none; give a run of a method with memory, a name that"),
        (["show", run, "--plot", tmp_path / "map.gif"], "ends in .png, .svg, .pdf"),
        (["show", run, "--plot", tmp_path / "map.png", "--json"], "give one of them"),
        (["export", run, tmp_path / "x.txt"], "ends in .npz, .csv, .safetensors, got"),
    ):
        assert main(["memory", *map(str, arguments)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("vsm memory: ")
        assert message in line
    assert (run / "memory.safetensors").read_bytes() == stored
    assert kept.read_bytes() == stored


def test_memories_of_shipped_models_are_read_by_their_names(
    tmp_path: Path, tiny_dataset: ImageDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, both = tmp_path / "kept.safetensors", tmp_path / "both.safetensors"
    images = write_folders(tmp_path / "images", tiny_dataset, 1)
    words = ["add", kept, "--images", images, "--model", "glyphs-5w1s", "--json"]
    assert main(["memory", *map(str, words)]) == 0
    assert printed(capsys)["num_slots"] == 642 + 5
    assert main(["memory", "show", "glyphs-5w1s", "--json"]) == 0
    assert printed(capsys)["num_slots"] == 642
    assert main(["memory", "merge", "glyphs-5w1s", str(kept), "--output", str(both)]) == 0
    assert len(read_memory(both).names) == 642 + 5
    assert main(["memory", "export", "glyphs-5w1s", str(tmp_path / "g.csv")]) == 0
    assert len((tmp_path / "g.csv").read_text().splitlines()) == 643


@pytest.mark.parametrize("target", ["glyphs-5w1s", MODELS / "glyphs-5w1s"])
def test_a_shipped_model_is_not_written_to(
    target: str | Path,
    tmp_path: Path,
    tiny_dataset: ImageDataset,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = (MODELS / "glyphs-5w1s" / "memory.safetensors").read_bytes()
    images = write_folders(tmp_path / "images", tiny_dataset, 1)
    for words in (
        ["add", target, "--images", images],
        ["add", target, "--images", images, "--model", "glyphs-5w1s"],
        ["forget", target, "alphabet01/character14"],
        ["merge", "glyphs-5w1s", "glyphs-5w1s", "--output", target],
    ):
        assert main(["memory", *map(str, words)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "ships with vsm and stays as it is; begin a file of your own" in line
    assert (MODELS / "glyphs-5w1s" / "memory.safetensors").read_bytes() == stored
    assert files_in(tmp_path) == ["images"]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_memory_is_drawn(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, image = write_run(tmp_path / "run"), tmp_path / f"map.{suffix}"
    assert main(["memory", "show", str(run), "--plot", str(image)]) == 0
    assert capsys.readouterr().out == f"{image}: 12 slots\n"
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert image.read_bytes().startswith(begins[suffix])


def test_a_map_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = str(write_run(tmp_path / "run"))
    assert main(["memory", "show", run, "--plot", str(tmp_path / "map.png")]) == 2
    told = capsys.readouterr().err
    assert told.endswith(
        "plot needs matplotlib: pip install 'variational-semantic-memory[plots]'\n"
    )
    assert not (tmp_path / "map.png").exists()
