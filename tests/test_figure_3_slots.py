"""Figure 3 measures memories of several sizes: a row's number of slots must reach its memory.

The oracle opens the files of the training run itself, keeps the first rows of every tensor of the
memory, and measures that.
"""

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vsm.cli import main
from vsm.data import EpisodeSampler, open_dataset
from vsm.evaluation.evaluator import Evaluation, evaluate
from vsm.memory import SlotMemory
from vsm.model import FewShotModel
from vsm.runs.configuration import read_settings
from vsm.settings import RunSettings

EPISODES, QUERIES, SEED = 4, 3, 0  # of the tiny budget
ROWS = {"slots-0": 0, "slots-4": 4, "capacity-all": None}
SHOTS = (1, 5)
EXACT = 1e-9  # after two steps of training, the memory changes little


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object inside a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from dictionaries(one)


def measurements(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return what was measured, by the file that says it."""
    found = {}
    for path in folder.rglob("*.json"):
        for one in dictionaries(json.loads(path.read_text(encoding="utf-8"))):
            if {"memory_slots", "accuracy", "nll"} <= one.keys():
                found[path] = one
    return found


def measured_by_hand(run: Path, slots: int | None) -> tuple[int, Evaluation]:
    """Measure a run with the first ``slots`` of its memory, and say how many these are."""
    settings = read_settings(RunSettings, run / "config.yaml")
    dataset = open_dataset(settings.data)
    model = FewShotModel(settings, dataset.input_shape)
    weights = load_file(run / "model.safetensors")
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    stored = load_file(run / "memory.safetensors")
    memory = SlotMemory(**{name: tensor[:slots] for name, tensor in stored.items()})
    sampler = EpisodeSampler(dataset, "test", settings.way, settings.shot, QUERIES)
    return len(memory), evaluate(model, memory, sampler, EPISODES, SEED)


def test_every_row_of_figure_3_is_measured_with_its_own_number_of_slots(
    image_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    asked = ["reproduce", "figure-3", "--budget", "tiny", "--seeds", "1", "--data", image_folder]
    told: dict[str, list[dict[str, Any]]] = {}
    printed: dict[str, list[float]] = {}
    for row in ROWS:
        before = measurements(output)
        main([*asked, "--rows", row, "--output", str(output), "--json"])
        cells = dictionaries(json.loads(capsys.readouterr().out))
        printed[row] = [cell["accuracy"]["mean"] for cell in cells if cell.get("row") == row]
        told[row] = [one for path, one in measurements(output).items() if path not in before]
    runs = [path.parent for path in output.rglob("model.safetensors")]
    runs.sort(key=lambda run: read_settings(RunSettings, run / "config.yaml").shot)
    assert len(runs) == len(SHOTS)  # the rows differ at test alone, so they share their trainings

    losses: list[tuple[float, ...]] = []
    for row, slots in ROWS.items():
        by_hand = [measured_by_hand(run, slots) for run in runs]
        kept = [count for count, _ in by_hand]
        assert all(count > 4 for count in kept) if slots is None else kept == [slots] * len(SHOTS)
        assert sorted(one["memory_slots"] for one in told[row]) == sorted(kept), row
        nll = tuple(found.nll for _, found in by_hand)
        accuracy = [found.accuracy.mean for _, found in by_hand]
        assert sorted(one["nll"] for one in told[row]) == pytest.approx(sorted(nll), rel=EXACT), row
        assert sorted(one["accuracy"] for one in told[row]) == pytest.approx(sorted(accuracy)), row
        assert printed[row] == pytest.approx(accuracy), row
        losses.append(nll)
    for one, other in combinations(losses, 2):  # so that a wrong number of slots would be seen
        for a, b in zip(one, other, strict=True):
            assert a != pytest.approx(b, rel=10 * EXACT)
