"""The fault campaign: its oracles see what they should, and a slice of it finds nothing.

``make faults`` is all of it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

from faults import mutations, oracles, report
from faults.oracles import Outcome, check, snapshot
from faults.processes import CANARY, Completed, Program, start
from faults.report import Result

ROOT = Path(__file__).parents[1]
ANSWER = {"prediction": "ash", "p": [0.25, 0.75]}


def run(program: Program, folder: Path, **options: Any) -> Completed:
    return start(program, folder, folder.parent / "scratch", **options).wait()


def honest() -> int:
    print(json.dumps(ANSWER))
    return 0


def refusing() -> int:
    print("vsm: memory: is damaged; put back a copy", file=sys.stderr)
    return 2


def raising() -> int:
    raise KeyError("names")


def crashing() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hanging() -> int:
    time.sleep(60)
    return 0


def greedy() -> int:
    held = bytes([1]) * (256 << 20)
    return honest() * len(held)


def wrong() -> int:
    print(json.dumps({**ANSWER, "prediction": "beech"}))
    return 0


def not_json() -> int:
    print(json.dumps({**ANSWER, "p": [float("nan")]}))
    return 0


def half_writing() -> int:
    Path("out.csv").write_text("path,lab")
    return refusing()


def changing() -> int:
    Path("input").write_text("other")
    return honest()


def curious() -> int:
    Path(f"{CANARY}.txt").read_text()
    return honest()


def executing() -> int:
    os.system("true")
    return honest()


def flooding() -> int:
    print("x\n" * 50, file=sys.stderr)
    return 2


def silent() -> int:
    return 2


def coloring() -> int:
    print("\x1b[31mash")
    return 0


def undocumented() -> int:
    print("why", file=sys.stderr)
    return 77


PLANTED: list[tuple[Callable[[], int], str, str]] = [
    (honest, "same", ""),
    (refusing, "refused", ""),
    (raising, "refused", "traceback: KeyError: 'names'"),
    (crashing, "refused", "crashes: signal 9"),
    (hanging, "refused", "hangs"),
    (wrong, "other", "gives another answer without a message"),
    (not_json, "other", "prints invalid JSON: NaN is invalid in JSON"),
    (half_writing, "refused", "refuses, but has changed out.csv"),
    (changing, "same", "has changed input"),
    (curious, "refused", "opened 'canary.txt'"),
    (executing, "refused", "ran os.system"),
    (flooding, "refused", "long message: 50 lines"),
    (silent, "refused", "fails without a message"),
    (coloring, "refused", "prints control characters"),
    (undocumented, "refused", "exit code 77"),
]


def judged(program: Callable[[], int], folder: Path, **allowed: Any) -> Outcome:
    """Run a program where there is an input and a canary, and judge it."""
    world = folder / "world"
    world.mkdir()
    (world / "input").write_text("input")
    (world / f"{CANARY}.txt").write_text("secret")
    before = snapshot(world)
    seconds = 1.0 if program is hanging else 60.0
    completed = run(program, world, seconds=seconds)
    baseline = {"answer": ANSWER, "files": {}, "events": ()}
    settings = {"may_differ": False, "writes": (), **allowed}
    return check("fault", completed, before, snapshot(world), {}, baseline, **settings)


@pytest.mark.parametrize(
    ("program", "outcome", "defect"), PLANTED, ids=lambda one: getattr(one, "__name__", "")
)
def test_the_oracles_see_what_a_program_does(
    program: Callable[[], int], outcome: str, defect: str, tmp_path: Path
) -> None:
    found = judged(program, tmp_path)
    assert found.kind == outcome
    if not defect:
        assert found.defects == ()
    else:
        assert any(one.startswith(defect) for one in found.defects), found.defects


def test_a_program_that_takes_too_much_memory_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run(honest, tmp_path).peak_bytes
    monkeypatch.setattr(oracles, "MOST_BYTES", usual + (128 << 20))
    for name, program, expected in (("one", honest, []), ("two", greedy, ["takes"])):
        (tmp_path / name).mkdir()
        found = judged(program, tmp_path / name)
        assert [defect.split()[0] for defect in found.defects] == expected


def test_another_answer_is_right_where_people_write_the_file(tmp_path: Path) -> None:
    assert judged(wrong, tmp_path, may_differ=True) == Outcome("fault", "other")


def test_what_a_program_should_write_is_no_defect(tmp_path: Path) -> None:
    assert judged(changing, tmp_path, writes=("input",)).defects == ()


def sample(folder: Path, kind: str) -> Path:
    """Write a file of a kind."""
    path = folder / f"file.{kind}"
    if kind == "json":
        path.write_text(json.dumps({"a": [1, 2.5, None], "b": {"c": "text"}, "digest": "0"}))
    elif kind == "jsonl":
        path.write_text('{"step": 1}\n{"step": 2}\n')
    elif kind == "yaml":
        path.write_text(yaml.safe_dump({"way": 5, "model": {"channels": 4, "mirror": False}}))
    elif kind == "csv":
        path.write_text("path,label\na.png,x\n")
    elif kind == "npy":
        np.save(path, np.arange(12, dtype=np.float32).reshape(3, 4))
    else:
        metadata = {"vsm": json.dumps({"names": ["a", "b"], "format": 1})}
        safetensors.torch.save_file({"a": torch.ones(3, 2), "b": torch.arange(4)}, path, metadata)
    return path


GENERATORS = {
    "json": [mutations.mutate_json, mutations.mutate_bytes, mutations.replace_file],
    "jsonl": [mutations.mutate_json],
    "yaml": [mutations.mutate_yaml],
    "csv": [mutations.mutate_table],
    "npy": [mutations.mutate_array, mutations.mutate_array_header],
    "safetensors": [mutations.mutate_tensors, mutations.mutate_tensor_header],
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_mutation_is_the_same_of_the_same_seed_and_changes_most_files(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for mutate in GENERATORS[kind]:
        changed = 0
        for seed in range(20):
            one, two = (sample(tmp_path / name, kind) for name in ("one", "two"))
            before = snapshot(two.parent)
            done = [mutate(path, Random(seed)) for path in (one, two)]
            assert done[0] == done[1]
            after = snapshot(two.parent)
            assert snapshot(one.parent) == after
            changed += before != after
            for path in (one, two):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        assert changed >= 10, mutate.__name__


def test_the_report_counts_and_says_how_to_repeat(tmp_path: Path) -> None:
    results = [
        Result("mutations", "memory file", 0, Outcome("a bit", "same", ())),
        Result("mutations", "memory file", 1, Outcome("a bit", "refused", ())),
        Result("mutations", "memory file", 2, Outcome("null", "refused", ("traceback: KeyError",))),
        Result("kills", "store", 0, Outcome("20 kills", "same", (), tried=20)),
    ]
    text = report.describe(results, 5, 7, 60.0)
    assert "| mutations | memory file | 3 | 1 | 1 | 0 | 1 |" in text
    assert "| kills | store | 20 | 20 | 0 | 0 | 0 |" in text
    assert "| all |  | 23 | 21 | 1 | 0 | 1 |" in text
    assert "`--only 'mutations/memory file' --case 2 --seed 7`" in text
    assert "no time for 1 cases" in text
    page = tmp_path / "faults.md"
    page.write_text(f"# Faults\n{report.BEGIN}\nold\n{report.END}\nMore.\n")
    for _ in range(2):  # the second time in place of the first
        report.write(text, page)
        expected = f"# Faults\n{report.BEGIN}\n{text}\n{report.END}\nMore.\n"
        assert page.read_text() == expected


def test_times_do_not_count_and_numbers_do(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    digests = []
    for seconds, loss in ((1, 0.5), (2, 0.5), (2, 0.6)):
        log.write_text(json.dumps({"step": 1, "seconds": seconds, "loss": loss}) + "\n")
        digests.append(oracles.digest_without_times(log))
    assert digests[0] == digests[1] != digests[2]


def test_a_process_that_is_stopped_itself_blames_nobody(tmp_path: Path) -> None:
    completed = run(honest, tmp_path)
    assert completed == Completed(0, json.dumps(ANSWER) + "\n", "", completed.peak_bytes)


def test_a_slice_of_the_campaign_finds_nothing() -> None:
    words = [sys.executable, "-m", "faults", "--slice"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [tried] = re.findall(r"^- (\d+) cases of seed 0 .* 0 with a defect$", done.stdout, re.MULTILINE)
    assert int(tried) >= 20
