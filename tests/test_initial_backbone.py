"""Runs that begin with a trained backbone, frozen or not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from run_helpers import assert_same_run, signal_at, train_run
from tiny import variant
from vsm.data import EpisodeSampler, FeatureDataset, ImageDataset, Split
from vsm.data.dataset import PixelNormalization
from vsm.data.images import Preprocessing
from vsm.encoders import Conv4, Encoder
from vsm.encoders.encoder import encode_dataset
from vsm.errors import RunError, SettingsError
from vsm.evaluation.evaluator import evaluate
from vsm.model import FewShotModel
from vsm.runs.checkpoints import begin_with_backbone, save_backbone
from vsm.runs.loading import load
from vsm.settings import RunSettings
from vsm.system.interruption import Interrupted

SPLITS: tuple[Split, ...] = ("train", "validation")


@pytest.fixture(autouse=True)
def _tiny_data(monkeypatch: pytest.MonkeyPatch, tiny_dataset: ImageDataset) -> None:
    monkeypatch.setattr("vsm.training.open_dataset", lambda name: tiny_dataset)


@pytest.fixture
def pretrained(tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path) -> Path:
    """A directory with a backbone whose weights and statistics are its own."""
    backbone = FewShotModel(variant(tiny_settings, seed=9), tiny_dataset.image_shape).backbone
    assert backbone is not None
    with torch.no_grad():
        for _ in range(3):  # moves the running statistics
            backbone(tiny_dataset.normalize(tiny_dataset.load(np.arange(40))))
    folder = tmp_path / "pretrained"
    folder.mkdir()
    metadata = {
        "backbone": tiny_settings.model.backbone,
        "channels": tiny_settings.model.channels,
        "keep_probability": 1.0,
        "input_shape": list(tiny_dataset.image_shape),
    }
    save_backbone(folder / "backbone.safetensors", backbone, metadata)
    return folder


def backbone_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(load(path).model.require_backbone().state_dict())


def test_a_run_begins_with_the_backbone_it_is_given(
    pretrained: Path, tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = FewShotModel(tiny_settings, tiny_dataset.image_shape)
    other = FewShotModel(variant(tiny_settings, seed=9), tiny_dataset.image_shape)
    begin_with_backbone(model, pretrained)
    for name, value in other.require_backbone().named_parameters():
        assert torch.equal(model.require_backbone().get_parameter(name), value)


def test_another_runs_backbone_will_do(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    first = train_run(variant(tiny_settings, method="protonet"), tmp_path / "first")
    model = FewShotModel(tiny_settings, tiny_dataset.image_shape)
    begin_with_backbone(model, first.path)
    for name, value in backbone_of(first.path).items():
        assert torch.equal(model.require_backbone().state_dict()[name], value)


def test_a_frozen_backbone_stays_bit_for_bit_and_the_rest_learns(
    pretrained: Path, tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    settings = variant(tiny_settings, init=str(pretrained), freeze_backbone=True)
    run = train_run(settings, tmp_path / "run")
    start = FewShotModel(settings, tiny_dataset.image_shape)
    begin_with_backbone(start, pretrained)
    trained = load(run.path)
    for name, value in start.require_backbone().state_dict().items():
        assert torch.equal(trained.model.require_backbone().state_dict()[name], value), name
    before, after = start.prior.state_dict(), trained.model.prior.state_dict()
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_a_backbone_that_is_not_frozen_goes_on_learning(
    pretrained: Path, tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    settings = variant(tiny_settings, init=str(pretrained))
    run = train_run(settings, tmp_path / "run")
    start = FewShotModel(settings, tiny_dataset.image_shape)
    begin_with_backbone(start, pretrained)
    after = backbone_of(run.path)
    assert any(not torch.equal(after[k], v) for k, v in start.require_backbone().named_parameters())


def test_encoded_images_give_the_results_of_the_images_and_hide_the_test_classes(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = FewShotModel(variant(tiny_settings, method="vpn"), tiny_dataset.image_shape)
    model.encoder.preprocessing = Preprocessing.of(tiny_dataset)
    encoded = encode_dataset(model.encoder, tiny_dataset, SPLITS)
    shape = (3, 1, 2)
    for split in SPLITS:
        one, two = (
            evaluate(model, None, EpisodeSampler(dataset, split, *shape), 6, 0)
            for dataset in (tiny_dataset, encoded)
        )
        torch.testing.assert_close(one.log_likelihood, two.log_likelihood)
    assert isinstance(encoded, FeatureDataset)
    assert encoded.load(encoded.split_ids("test")).isnan().all()


def test_features_of_a_frozen_backbone_are_computed_once_for_all_runs(
    pretrained: Path,
    tiny_settings: RunSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    settings = variant(tiny_settings, init=str(pretrained), freeze_backbone=True)
    before = sorted(pretrained.iterdir())
    train_run(settings, tmp_path / "first")
    [kept] = (tmp_path / "data" / "embeddings").glob("*.sqlite")
    assert sorted(pretrained.iterdir()) == before
    monkeypatch.setattr(Conv4, "forward", None)
    train_run(settings, tmp_path / "second")
    assert_same_run(tmp_path / "first", tmp_path / "second", "model.safetensors")
    kept.write_bytes(b"half")
    with pytest.raises(TypeError):  # what is not readable is computed again
        train_run(settings, tmp_path / "third")


def test_kept_features_are_of_this_backbone_and_these_samples(
    tiny_settings: RunSettings,
    tiny_dataset: ImageDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    seen: list[int] = []
    encode = Encoder.encode

    def counted(encoder: Encoder, inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(inputs))
        return encode(encoder, inputs, *rest)

    monkeypatch.setattr(Encoder, "encode", counted)

    def computed(dataset: ImageDataset, **views: Any) -> int:
        """Encode a dataset; return how many images were not known before."""
        seen.clear()
        settings = variant(tiny_settings, model=replace(tiny_settings.model, **views))
        encoder = FewShotModel(settings, dataset.image_shape).encoder
        encoder.preprocessing = Preprocessing.of(dataset)
        encode_dataset(encoder, dataset, SPLITS)
        return sum(seen)

    images = sum(len(tiny_dataset.split_ids(split)) for split in SPLITS)
    assert computed(tiny_dataset) == images
    assert computed(tiny_dataset) == 0
    pixels = tiny_dataset.images.copy()
    pixels[tiny_dataset.split_ids("validation")[-1], 0, 0, 0] ^= 1
    assert computed(replace(tiny_dataset, images=pixels)) == 1
    brighter = PixelNormalization((0.3,), tiny_dataset.normalization.std)
    assert computed(replace(tiny_dataset, normalization=brighter)) == images
    assert computed(tiny_dataset, mirror=True) == computed(tiny_dataset, shift=1) == images
    assert computed(tiny_dataset, channels=3) == images


def test_a_frozen_run_resumes_bit_for_bit_even_when_its_origin_is_gone(
    pretrained: Path, tiny_settings: RunSettings, tmp_path: Path
) -> None:
    settings = variant(tiny_settings, init=str(pretrained), freeze_backbone=True, steps=8)
    train_run(settings, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_run(settings, tmp_path / "parts", progress=signal_at(3))
    (pretrained / "backbone.safetensors").unlink()
    train_run(settings, tmp_path / "parts", resume=True)
    files = ("model.safetensors", "memory.safetensors", "calibration.json", "resume.safetensors")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", *files)


def test_what_cannot_be_begun_with_is_named_and_leaves_no_run(
    pretrained: Path, tiny_settings: RunSettings, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    wide = variant(tiny_settings, model=replace(tiny_settings.model, channels=7))
    with pytest.raises(RunError, match=r"model.channels \d+, but this run has 7; give it"):
        train_run(replace(wide, init=str(pretrained)), output)
    with pytest.raises(RunError, match="holds no pre-trained backbone"):
        train_run(variant(tiny_settings, init=str(tmp_path / "nothing")), output)
    assert not output.exists()
    with pytest.raises(SettingsError, match="freeze_backbone: only a trained backbone"):
        variant(tiny_settings, freeze_backbone=True)
    bare = variant(tiny_settings, method="protonet", init=str(pretrained), freeze_backbone=True)
    with pytest.raises(SettingsError, match="nothing to train"):
        train_run(bare, output)
