"""One encoder: built once, fingerprinted once, and no image passes it twice."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vsm
from run_helpers import train_run
from tiny import make_settings
from vsm.cli import main
from vsm.data import ImageDataset, Split
from vsm.encoders import Conv4, Encoder, encoder
from vsm.model import FewShotModel
from vsm.runs.configuration import settings_to_yaml
from vsm.settings import ModelSettings, RunSettings, SamplingSettings
from vsm.system.tensor_files import fingerprint
from vsm_lab.shipping import Shipment, ship

SETTINGS = replace(
    make_settings(),
    model=ModelSettings(channels=4, hidden_units=8),
    sampling=SamplingSettings(train_prototypes=4, evaluation_prototypes=4),
)
EPISODES = ["--way", "3", "--queries", "2", "--episodes", "4", "--json"]


@pytest.fixture(autouse=True)
def _tiny_data(
    monkeypatch: pytest.MonkeyPatch,
    tiny_dataset: ImageDataset,
    tmp_path: Path,
    few_read_settings: None,
) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    for place in ("vsm.training", "vsm.encoders.encoder", "vsm.runs.loading"):
        monkeypatch.setattr(f"{place}.open_dataset", lambda _: tiny_dataset)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: ImageDataset) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vsm.training.open_dataset", lambda _: tiny_dataset)
        return train_run(SETTINGS, tmp_path_factory.mktemp("encoder") / "run").path


class Counts:
    """How often each image passed the network, and how many fingerprints were computed."""

    def __init__(self) -> None:
        self.images: Counter[bytes] = Counter()
        self.fingerprints = 0

    def reset(self) -> None:
        self.images.clear()
        self.fingerprints = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    found = Counts()
    forward = Conv4.forward

    def counted(network: Conv4, images: Tensor, *rest: Any) -> Tensor:
        if not network.training:
            found.images.update(image.numpy().tobytes() for image in images)
        return forward(network, images, *rest)

    def identified(*arguments: Any) -> str:
        found.fingerprints += 1
        return fingerprint(*arguments)

    monkeypatch.setattr(Conv4, "forward", counted)
    monkeypatch.setattr(encoder, "fingerprint", identified)
    return found


def size_of(dataset: ImageDataset, *splits: Split) -> int:
    return sum(len(dataset.split_ids(split)) for split in splits)


def test_after_the_last_step_each_image_is_embedded_once(
    counts: Counts, tiny_dataset: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration, the closing memory and the comparison of both share one encoder."""
    load = vsm.load

    def first(*arguments: Any, **named: Any) -> vsm.TrainedModel:
        counts.reset()
        return load(*arguments, **named)

    monkeypatch.setattr("vsm.training.load", first)
    trained = vsm.train(SETTINGS, tmp_path / "run")
    assert set(counts.images.values()) == {1}
    assert len(counts.images) == size_of(tiny_dataset, "train", "validation")
    assert counts.fingerprints == 1
    assert trained.path == tmp_path / "run"


def test_the_command_and_the_function_leave_the_same_model(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(settings_to_yaml(SETTINGS))
    trained = vsm.train(SETTINGS, tmp_path / "function" / "run")
    words = ["--config", str(config), "--output", str(tmp_path / "command" / "run"), "--json"]
    assert main(["train", *words]) == 0
    files = [
        {file.relative_to(tmp_path / made): file for file in (tmp_path / made).rglob("*.*")}
        for made in ("function", "command")
    ]
    assert files[0].keys() == files[1].keys()
    for name, one in files[0].items():
        if one.is_file() and name.parent.name == "run" and name.suffix != ".jsonl":
            assert one.read_bytes() == files[1][name].read_bytes(), name
    other = vsm.load(tmp_path / "command" / "run")
    assert trained.inference == other.inference
    assert trained.state is not None
    assert other.state is not None
    torch.testing.assert_close(trained.state.tensors(), other.state.tensors(), rtol=0, atol=0)
    assert trained.calibration.as_dict() == other.calibration.as_dict()  # rounded
    assert trained.settings.way == other.settings.way == SETTINGS.way


def test_learning_a_memory_embeds_each_image_once(
    counts: Counts, run: Path, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    words = ["--data", "tiny", "--encoder", str(run), "--output", str(tmp_path / "out")]
    assert main(["memory", "learn", *words, "--json"]) == 0
    assert set(counts.images.values()) == {1}
    assert len(counts.images) == size_of(tiny_dataset, "train", "validation")
    assert counts.fingerprints == 1


def test_evaluating_and_comparing_embed_each_image_once(
    counts: Counts, run: Path, tiny_dataset: ImageDataset
) -> None:
    assert main(["evaluate", str(run), *EPISODES]) == 0
    assert set(counts.images.values()) == {1}
    assert len(counts.images) == size_of(tiny_dataset, "test")
    assert counts.fingerprints == 1
    counts.reset()
    words = [str(run), str(run), "--baselines", "cosine,simpleshot,logistic-tuned", *EPISODES]
    assert main(["compare", *words]) == 0  # both have the same encoder
    assert set(counts.images.values()) == {1}
    assert len(counts.images) == size_of(tiny_dataset, "train", "validation", "test")
    assert counts.fingerprints == 2


def test_classifying_embeds_each_image_once(
    counts: Counts, run: Path, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    for name, place in (("support", 0), ("query", 6)):
        for class_id in range(38, 41):
            folder = tmp_path / name / f"class{class_id}"
            folder.mkdir(parents=True)
            pixels = tiny_dataset.images[tiny_dataset.image_ids(class_id)[place], ..., 0]
            Image.fromarray(pixels).save(folder / "one.png")
    folders = ["--support", str(tmp_path / "support"), "--query", str(tmp_path / "query")]
    assert main(["classify", "--model", str(run), *folders, "--json"]) == 0
    assert len(counts.images) == 6
    assert set(counts.images.values()) == {1}
    assert counts.fingerprints == 1


def test_shipping_embeds_each_image_once_with_each_of_its_two_encoders(
    counts: Counts, run: Path, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    """The run's, and that of the stored model, whose weights are rounded."""
    shipment = Shipment(
        "tiny", tmp_path, shots=(1, 2), way=3, queries=2, episodes=4, data_license="none"
    )
    ship(run, shipment)
    assert max(counts.images.values()) == 2
    assert counts.images.total() == 2 * size_of(tiny_dataset, "test") + size_of(
        tiny_dataset, "validation"
    )
    assert counts.fingerprints <= 4  # the run, what is stored, and that loaded twice


def test_features_are_those_of_the_weights_as_they_are(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = FewShotModel(tiny_settings, tiny_dataset.image_shape).eval()
    ids = torch.arange(20).view(4, 5)
    before, identity = model.encoder.features(tiny_dataset, ids), model.encoder.identity
    assert before.shape == (4, 5, model.num_features)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
        after = model.encoder.features(tiny_dataset, ids)
        direct = model.embed(tiny_dataset.normalize(tiny_dataset.load(ids.flatten())))
    assert not torch.equal(after, before)
    torch.testing.assert_close(after.flatten(0, 1), direct)
    assert model.encoder.identity != identity
    moved = replace(tiny_dataset, images=tiny_dataset.images[::-1].copy())
    assert not torch.equal(model.encoder.features(moved, ids), after)


def test_features_that_are_not_kept_are_the_same(
    counts: Counts, tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    one, two = (FewShotModel(tiny_settings, tiny_dataset.image_shape).eval() for _ in range(2))
    some = torch.tensor([3, 1, 3, 7])
    one.encoder.features(tiny_dataset, some)
    assert counts.images.total() == 3
    ids = torch.arange(12)
    streamed = one.encoder.features(tiny_dataset, ids, keep=False)
    assert counts.images.total() == 12
    torch.testing.assert_close(streamed, two.encoder.features(tiny_dataset, ids))


def test_a_variant_shares_the_network_and_not_the_features(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    plain = Encoder(tiny_settings.model, tiny_dataset.image_shape, "tiny")
    mirrored = plain.variant(replace(plain.settings, mirror=True))
    assert mirrored.backbone is plain.backbone
    assert mirrored.fingerprint != plain.fingerprint
    ids = torch.arange(6)
    assert not torch.equal(plain.features(tiny_dataset, ids), mirrored.features(tiny_dataset, ids))


def test_the_adapter_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    made = Encoder(ModelSettings(adapter="linear"), (5,), "features:x")
    assert torch.equal(before, torch.get_rng_state())
    rows = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(made.adapt(rows).detach().numpy(), rows.numpy())
