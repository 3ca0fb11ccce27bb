"""Stored tensors are finite, belong together and are what was written; or they are named."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vsm.classify import FewShotClassifier
from vsm.data.images import Preprocessing
from vsm.errors import RunError, VsmError
from vsm.memory.named import decode_memory
from vsm.runs.directory import shipped_folder
from vsm.runs.loading import load, read_memory
from vsm.system.tensor_files import (
    learning_tensors,
    load_tensors,
    restore_learning,
    save_tensors,
)

NAME = "glyphs-5w1s"
SEED = 20261117


def raw(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file with the library alone."""
    with safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["vsm"])


def write_raw(path: Path, tensors: dict[str, Tensor], metadata: Any) -> None:
    safetensors.torch.save_file(tensors, path, {"vsm": json.dumps(metadata)})


def tried(work: Callable[[], Any]) -> Any:
    """Return what ``work`` does, or None if it refuses in one short line."""
    try:
        return work()
    except VsmError as error:
        line = str(error)
    if "\n" in line or len(line) > 900:
        pytest.fail(line)
    return None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a shipped model, to be spoiled."""
    shutil.copytree(shipped_folder(NAME), tmp_path / "model")
    return tmp_path / "model"


def test_a_file_holds_what_was_written_and_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "a": torch.arange(6).view(2, 3), "b": torch.tensor(1.5), "c": torch.zeros(0, 4),
        "d": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "e": torch.tensor([True, False]),
    }  # fmt: skip
    metadata = {"names": ["ü", "\udcff"], "n": 0.1, "none": None}
    save_tensors(path, tensors, metadata)
    assert len(raw(path)[1]["digest"]) == 64
    found, same = load_tensors(path)
    assert same == metadata
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_every_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.linspace(-1, 1, 8), "b": torch.arange(3)}
    save_tensors(path, tensors, {"step": 3})
    content, noticed = path.read_bytes(), 0
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            read = tried(lambda: load_tensors(path))
            if read is None:
                noticed += 1
                continue
            found, metadata = read  # blanks that fill the header, or the word "digest" itself
            assert metadata["step"] == 3
            assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert noticed > 0.9 * 8 * len(content)


def test_flipped_bits_of_a_model_change_no_answer(model: Path) -> None:
    draw = random.Random(SEED)
    expected = load(model)
    files = ("model.safetensors", "memory.safetensors", "config.yaml", "calibration.json")
    for name in (*files, "card.json"):
        content = (model / name).read_bytes()
        for _ in range(6):
            changed = bytearray(content)
            changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            (model / name).write_bytes(changed)
            found = tried(lambda: load(model))
            if found is not None:
                assert found.settings == expected.settings
                assert found.calibration == expected.calibration
                assert found.preprocessing == expected.preprocessing
        (model / name).write_bytes(content)
    assert load(model).encoder.identity == expected.encoder.identity


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("signed", [True, False])
def test_numbers_that_are_none_are_refused(value: float, signed: bool, model: Path) -> None:
    path = model / "memory.safetensors"
    tensors, metadata = raw(path)
    tensors["shared_scatter"] = tensors["shared_scatter"].float()
    tensors["shared_scatter"][3, 5] = value
    if not signed:  # as a file of 0.1.0
        metadata.pop("digest")
    write_raw(path, tensors, metadata)
    if value == 1e30 and not signed:  # finite, and nothing says what it was
        images = [np.full((28, 28), 20 * n, np.uint8) for n in range(6)]
        classifier = FewShotClassifier.from_pretrained(model).fit(images, list("abcdef"))
        answers = tried(lambda: classifier.predict_proba(images))
        assert answers is None or np.isfinite(answers).all()
        return
    with pytest.raises(RunError, match=r"shared_scatter is not finite|was changed or damaged"):
        load(model)


def test_files_without_a_digest_are_read_as_before(model: Path) -> None:
    expected = load(model)
    for name in ("model.safetensors", "memory.safetensors"):
        tensors, metadata = raw(model / name)
        metadata.pop("digest")
        write_raw(model / name, tensors, metadata)
    found = load(model)
    assert found.encoder.identity == expected.encoder.identity
    assert found.memory is not None
    assert expected.memory is not None
    assert found.memory.names == expected.memory.names


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda known: known | {name: value}


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda known: {key: value for key, value in known.items() if key != name}


WRONG = [None, 3, -1, "x", [], [1], {}, {"a": 1}, math.nan, True, [None], "\x1b[31m" * 1000]
KEYS = {
    "model.safetensors": ("step", "input_shape", "preprocessing", "encoder"),
    "memory.safetensors": ("step", "class_names", "encoder", "provenance", "method"),
}
CHANGES = [
    (file, f"{key}-{number}", change)
    for file, keys in KEYS.items()
    for key in keys
    for number, change in enumerate([_without(key), *(_set(key, value) for value in WRONG)])
] + [(file, f"all-{n}", lambda _, v=v: v) for file in KEYS for n, v in enumerate(WRONG)]


@pytest.mark.parametrize("file", KEYS)
def test_metadata_of_any_other_kind_is_named_in_one_line(file: str, model: Path) -> None:
    tensors, metadata = raw(model / file)
    metadata.pop("digest")
    for other, title, change in CHANGES:
        if other != file:
            continue
        write_raw(model / file, tensors, change(metadata))
        if tried(lambda: load(model)) is not None:
            assert title.startswith(("step-", "method-", "provenance-", "encoder-")), title


@pytest.mark.parametrize(
    "spoil",
    [
        {"content": torch.zeros(642, 95)},
        {"content": torch.zeros(642)},
        {"counts": torch.zeros(641, dtype=torch.int64)},
        {"counts": torch.full((642,), -1)},
        {"counts": torch.ones(642)},
        {"class_ids": torch.zeros(642, dtype=torch.int64)},
        {"factor_rows": torch.ones(642, dtype=torch.int64)},
        {"shared_scatter": torch.zeros(96, 95)},
        {"reading": torch.zeros(5)},
        {"reading": torch.tensor([9.0, 1, 1, 0, 1, 1])},
        {"reading": torch.tensor([1.0, 1, 1, 0, 1, -1])},
        {"reading": torch.tensor([1.0, 1, 1, 2, 1, 1])},
        {"center": torch.zeros(95)},
        {"shared_freedom": torch.tensor([1, 2])},
    ],
)
def test_shapes_that_do_not_belong_together_are_named(
    spoil: dict[str, Tensor], model: Path
) -> None:
    tensors, metadata = load_tensors(model / "memory.safetensors")
    decode_memory(tensors, metadata, Path("whole"))
    with pytest.raises(RunError, match=r"memory: spoiled does not hold a memory \(") as caught:
        decode_memory(tensors | spoil, metadata, Path("spoiled"))
    assert "\n" not in str(caught.value)


def test_a_memory_of_other_features_is_named(model: Path) -> None:
    tensors, metadata = load_tensors(model / "memory.safetensors")
    half = {name: t[:, :48] for name, t in tensors.items() if name in ("content", "factors")}
    half |= {"center": tensors["center"][:48], "shared_scatter": torch.eye(48)}
    save_tensors(model / "memory.safetensors", tensors | half, metadata)
    assert len(read_memory(model).names) == 642
    with pytest.raises(RunError, match=r"memory.safetensors does not fit .*: its content is"):
        load(model)


@pytest.mark.parametrize(
    "change",
    [
        {"side": 0}, {"side": 10**9}, {"side": True}, {"channels": 2}, {"std": [0.0]},
        {"std": [math.nan]}, {"mean": [math.inf]}, {"mean": []}, {"crop": -1.0}, {"ink": 1},
        {"resampling": "nothing"},
    ],
)  # fmt: skip
def test_preprocessing_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    stored = {"side": 28, "channels": 1, "ink": True, "mean": [0.1], "std": [0.2]}
    assert Preprocessing.from_dict(stored) is not None
    with pytest.raises(ValueError, match=r"expected|unknown"):
        Preprocessing.from_dict(stored | change)


def test_settings_of_a_huge_model_are_refused_before_it_is_made(model: Path) -> None:
    text = (model / "config.yaml").read_text().splitlines()[:-1]
    for channels in ("60000", "1000000000", "1" + "0" * 30):
        lines = [line if "channels:" not in line else f"  channels: {channels}" for line in text]
        (model / "config.yaml").write_text("\n".join(lines))
        with pytest.raises(VsmError, match=r"do not fit its settings|channels: "):
            load(model)


def test_a_saved_classifier_that_was_spoiled_is_named(tmp_path: Path) -> None:
    features, path = torch.randn(12, 5), tmp_path / "a.vsm"
    FewShotClassifier().fit(features, list("abcd") * 3).save(path)

    def answer() -> Any:
        return FewShotClassifier.load(path).predict_proba(features)

    expected = answer()
    tensors, metadata = raw(path)
    metadata.pop("digest")
    write_raw(path, tensors, metadata)
    assert (answer() == expected).all()
    keys = [(key, value) for key in metadata for value in [..., *WRONG]]
    for key, value in keys:
        change = _without(key) if value is ... else _set(key, value)
        write_raw(path, tensors, change(metadata))
        found = tried(answer)
        allowed = found is None or (found == expected).all() or key in ("seed", "temperature")
        assert allowed, (key, value)
    for name, tensor in tensors.items():
        for spoiled in (tensor[:-1] if tensor.ndim else tensor.view(1), tensor.unsqueeze(0)):
            write_raw(path, tensors | {name: spoiled.contiguous()}, metadata)
            found = tried(answer)
            assert found is None or (found == expected).all(), (name, spoiled.shape)


@pytest.mark.parametrize("is_sgd", [True, False])
def test_moments_that_are_missing_are_named(is_sgd: bool) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    if is_sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors = learning_tensors(model, optimizer)
    restore_learning(model, optimizer, tensors, Path("state"))
    for missing in [name for name in tensors if name.startswith("optimizer.")]:
        kept = {name: value for name, value in tensors.items() if name != missing}
        with pytest.raises(RunError, match="state is damaged: some moments"):
            restore_learning(model, optimizer, kept, Path("state"))
