"""A backbone that is trained on through the predictive of the Gaussian memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from run_helpers import assert_same_run, signal_at, train_run
from tiny import variant
from vsm.data import ImageDataset
from vsm.errors import RunError
from vsm.learning import class_features, learn_memory
from vsm.memory import GaussianMemory
from vsm.model import FewShotModel, objective
from vsm.pretraining import pretrain
from vsm.runs.checkpoints import load_backbone
from vsm.runs.loading import load, open_encoder
from vsm.runs.trained_model import made_in_memory
from vsm.settings import (
    FewShotValidationSettings,
    GaussianSettings,
    ModelSettings,
    PretrainSettings,
    RunSettings,
    SamplingSettings,
)
from vsm.system.interruption import Interrupted
from vsm.training import class_statistics
from vsm_lab.provenance import training_commands, training_record
from vsm_lab.shipping import Shipment, ship

READ = GaussianSettings(
    normalization="cl2n", epsilon=1.0, beta=1.0, rho=0.5, addressing_scale=10.0, refresh_every=3
)


@pytest.fixture(autouse=True)
def _tiny_data(monkeypatch: pytest.MonkeyPatch, tiny_dataset: ImageDataset) -> None:
    monkeypatch.setattr("vsm.training.open_dataset", lambda name: tiny_dataset)
    monkeypatch.setattr("vsm.pretraining.open_images", lambda name: tiny_dataset)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: ImageDataset) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vsm.pretraining.open_images", lambda name: tiny_dataset)
        validation = FewShotValidationSettings(queries=4, episodes=5)
        settings = PretrainSettings(
            data="tiny", channels=4, epochs=2, batch_size=60, validation=validation
        )
        return pretrain(settings, tmp_path_factory.mktemp("p") / "run").path


@pytest.fixture
def settings(pretrained: Path, tiny_settings: RunSettings) -> RunSettings:
    return variant(
        tiny_settings,
        init=str(pretrained),
        model=ModelSettings(inference="gaussian", channels=4),
        sampling=SamplingSettings(),
        gaussian=READ,
    )


def test_the_gradient_of_the_predictive_is_that_of_finite_differences(
    settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = FewShotModel(settings, tiny_dataset.image_shape).eval()
    memory = class_statistics(model, tiny_dataset)
    random = torch.Generator().manual_seed(0)
    features = 3 + torch.rand(1, 3, 4, model.num_features, generator=random)
    slot_mask = memory.slot_mask(torch.tensor([[0, 4, 7]]), "task")

    def loss(given: Tensor) -> Tensor:
        support, queries = given.split([2, 2], 2)
        prediction = model(support, queries, memory, random, slot_mask)
        return objective(prediction, None, settings.objective).total

    features.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(features), features)
    for _ in range(8):
        direction = torch.randn(features.shape, generator=random)
        step = 1e-2
        with torch.no_grad():
            ends = [loss(features + sign * step * direction).item() for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * step)
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=0.02, abs=1e-3)


def test_statistics_are_those_of_the_features_as_they_are_at_test(
    settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = FewShotModel(settings, tiny_dataset.image_shape).train()
    memory = class_statistics(model, tiny_dataset)
    assert model.training
    assert isinstance(memory, GaussianMemory)
    known = class_features(model.encoder, tiny_dataset, "train").features.double().numpy()
    rows = known / np.linalg.norm(known, axis=1, keepdims=True)
    rows = rows - rows.mean(0)
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).reshape(30, 12, -1)
    np.testing.assert_allclose(memory.content.numpy(), rows.mean(1), atol=1e-6)
    assert memory.slot_classes == list(range(30))


def test_training_moves_the_backbone_and_leaves_a_run_that_is_read_by_its_statistics(
    settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    train_run(settings, tmp_path / "run")
    trained = load(tmp_path / "run")
    begun, _ = load_backbone(Path(settings.init or ""))
    moved = trained.model.require_backbone().state_dict()
    assert any(not torch.equal(moved[name], weight) for name, weight in begun.items())
    assert isinstance(trained.state, GaussianMemory)
    fresh = class_statistics(trained.model, tiny_dataset)
    assert isinstance(fresh, GaussianMemory)
    torch.testing.assert_close(trained.state.content, fresh.content)
    assert trained.state.read_settings.epsilon == READ.epsilon


def test_a_stopped_and_resumed_fine_tuning_equals_an_uninterrupted_one(
    settings: RunSettings, tmp_path: Path
) -> None:
    train_run(settings, tmp_path / "whole")
    for step in (2, 4):
        with pytest.raises(Interrupted):
            train_run(settings, tmp_path / "parts", resume=True, progress=signal_at(step))
    train_run(settings, tmp_path / "parts", resume=True)
    files = ("resume.safetensors", "model.safetensors", "memory.safetensors")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", *files)


def test_without_memory_it_is_trained_as_nearest_means(
    settings: RunSettings, tmp_path: Path
) -> None:
    nothing = replace(READ, epsilon=float("inf"), beta=float("inf"), rho=0.0)
    train_run(variant(settings, gaussian=nothing, steps=3), tmp_path / "run")
    state = load(tmp_path / "run").state
    assert isinstance(state, GaussianMemory)
    assert not state.read_settings.uses_memory


def test_it_is_told_from_a_memory_that_was_learned_of_features_as_they_were(
    settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    nothing = replace(READ, epsilon=float("inf"), beta=float("inf"))
    run = train_run(replace(settings, gaussian=nothing, steps=2), tmp_path / "run")
    record = training_record(run.path, run.settings())
    assert record["steps"] == 2
    assert record["command"].startswith("vsm train --data tiny")
    assert "--gaussian.epsilon inf --gaussian.beta inf" in record["command"]
    encoder, asked = open_encoder(run.path, "tiny"), GaussianSettings(epsilon=1.0, beta=1, rho=0)
    learned = made_in_memory(*learn_memory(encoder, tiny_dataset, asked))
    learned.write(tmp_path / "learned")
    pretrained, trained, remembered = training_commands(learned.settings, "runs/x")
    assert pretrained.startswith("vsm pretrain")
    assert pretrained.endswith("--output runs/x-encoder-backbone")
    assert trained.startswith("vsm train")
    assert trained.endswith("--output runs/x-encoder")
    assert remembered.startswith("vsm memory learn --data tiny --encoder runs/x-encoder")
    assert training_record(tmp_path / "learned", learned.settings)["steps"] == 0
    with pytest.raises(RunError, match=r"trained through its memory; ship the memory of its feat"):
        ship(run.path, Shipment("fine", tmp_path / "models"))
