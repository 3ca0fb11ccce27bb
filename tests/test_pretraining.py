"""Pre-training: its parts against oracles; it learns; nothing is lost by stopping."""

import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from PIL import Image
from torch import nn

from forked import ForkedPython
from launching_helpers import finish, wait_for
from run_helpers import assert_same_run, edit_config, power_cut_at, rows, signal_at
from tiny import RecordedProgress
from vsm.cli import main
from vsm.data import EpisodeSampler, ImageDataset, open_dataset
from vsm.encoders import BACKBONES
from vsm.errors import RunError, SettingsError
from vsm.evaluation.evaluator import evaluate
from vsm.evaluation.intervals import Estimate
from vsm.model import FewShotModel
from vsm.pretraining import (
    FewShotScores,
    SupervisedNetwork,
    TrainingImages,
    build_optimizer,
    load_images,
    load_teacher,
    one_cycle,
    pretrain,
    pretraining_step,
    supervised_loss,
    validate,
    validation_samplers,
    validator_settings,
)
from vsm.runs.checkpoints import load_backbone
from vsm.runs.configuration import (
    PRETRAINING_PRESETS,
    preset_paths,
    read_settings,
    settings_to_yaml,
)
from vsm.runs.directory import PretrainingDirectory, RunDirectory
from vsm.seeding import generator
from vsm.settings import (
    DistillationSettings,
    FewShotValidationSettings,
    OneCycleSettings,
    PretrainSettings,
    RunSettings,
)
from vsm.system.devices import Placement
from vsm.system.interruption import Interrupted
from vsm.system.tensor_files import load_tensors, save_tensors
from vsm_lab.provenance import pretraining_commands


@pytest.fixture(autouse=True)
def _tiny_data(monkeypatch: pytest.MonkeyPatch, tiny_dataset: ImageDataset) -> None:
    monkeypatch.setattr("vsm.pretraining.open_images", lambda name: tiny_dataset)


@pytest.fixture
def settings() -> PretrainSettings:
    """360 training images in batches of 50: seven steps an epoch, and ten images left out."""
    return PretrainSettings(
        data="tiny",
        channels=4,
        epochs=3,
        batch_size=50,
        checkpoint_every=4,
        optimizer=OneCycleSettings(learning_rate=0.05),
        validation=FewShotValidationSettings(every=1, episodes=20, way=4, queries=4),
    )


FILES = ("backbone.safetensors", "resume.safetensors", "config.yaml")


# The schedule, the heads and the loss


@pytest.mark.parametrize("num_steps", [10, 57, 400])
@pytest.mark.parametrize("warmup_share", [0.2, 0.3, 0.75])
def test_the_learning_rate_is_that_of_torchs_one_cycle(num_steps: int, warmup_share: float) -> None:
    settings = OneCycleSettings(0.2, warmup_share, initial_divisor=20, final_divisor=500)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=0.2,
        total_steps=num_steps,
        pct_start=warmup_share,
        div_factor=20,
        final_div_factor=500,
        cycle_momentum=False,
    )
    for step in range(1, num_steps + 1):
        expected = optimizer.param_groups[0]["lr"]
        assert one_cycle(settings, step, num_steps) == pytest.approx(expected, rel=1e-9)
        optimizer.step()
        if step < num_steps:
            schedule.step()


@pytest.mark.parametrize(("share", "first"), [(0.0, 1.0), (0.3, 1.0), (1.0, 0.04)])
def test_one_cycle_is_finite_in_runs_of_few_steps(share: float, first: float) -> None:
    settings = OneCycleSettings(learning_rate=1.0, warmup_share=share)
    assert one_cycle(settings, 1, 1) == 1.0
    assert one_cycle(settings, 1, 3) == pytest.approx(first)
    assert all(0 < one_cycle(settings, step, 3) <= 1 for step in (1, 2, 3))


def test_the_loss_is_smoothed_cross_entropy(random: torch.Generator) -> None:
    labels = torch.randint(5, (6,), generator=random)
    scores = torch.randn(6, 5, generator=random)
    terms = supervised_loss(scores, labels, PretrainSettings(label_smoothing=0.2))
    expected = 0.0
    for row, label in zip(scores.double().log_softmax(1), labels.tolist(), strict=True):
        targets = [0.2 / 5 + 0.8 * (position == label) for position in range(5)]
        expected -= sum(t * float(one) for t, one in zip(targets, row, strict=True)) / 6
    assert terms.total.item() == terms.cross_entropy.item() == pytest.approx(expected, rel=1e-5)
    assert terms.distillation is None


# A teacher


@pytest.fixture
def teacher(settings: PretrainSettings, tmp_path: Path) -> Path:
    """A pre-training of another width."""
    wider = replace(settings, channels=6, epochs=1)
    return pretrain(wider, tmp_path / "teacher").path


def taught_by(teacher: Path, settings: PretrainSettings, weight: float = 0.3) -> PretrainSettings:
    return replace(settings, distillation=DistillationSettings(str(teacher), weight, 3.0))


def test_a_teachers_probabilities_are_targets_at_a_temperature(random: torch.Generator) -> None:
    settings = taught_by(Path(), PretrainSettings())
    labels = torch.tensor([0, 3, 1])
    ours, theirs = (torch.randn(3, 4, generator=random) for _ in range(2))
    alone = supervised_loss(ours, labels, settings)
    terms = supervised_loss(ours, labels, settings, theirs)
    expected = 0.0
    for image in range(3):
        q = (ours[image].double() / 3).softmax(0)
        p = (theirs[image].double() / 3).softmax(0)
        expected += 9 * float((p * (p / q).log()).sum()) / 3
    assert terms.distillation is not None
    assert terms.distillation.item() == pytest.approx(expected, rel=1e-5)
    assert terms.cross_entropy == alone.cross_entropy
    total = 0.7 * alone.cross_entropy + 0.3 * expected
    assert terms.total.item() == pytest.approx(total.item(), rel=1e-5)


def test_the_teacher_scores_the_images_of_the_student_as_its_last_state_does(
    settings: PretrainSettings, teacher: Path, tiny_dataset: ImageDataset
) -> None:
    settings = taught_by(teacher, settings, weight=1.0)
    network = load_teacher(settings, tiny_dataset, num_classes=30)
    assert network is not None
    before = {name: value.clone() for name, value in network.state_dict().items()}
    weights, _ = load_tensors(teacher / "resume.safetensors")
    assert all(torch.equal(weights[f"model.{name}"], value) for name, value in before.items())
    backbone = BACKBONES["conv4"]((1, 28, 28), 6).eval()
    prefix = "model.backbone."
    backbone.load_state_dict(
        {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    )
    _, ids, labels = next(TrainingImages.of(tiny_dataset, settings).batches(0))
    images = load_images(tiny_dataset, ids, settings, step=1)
    weight, bias = (weights[f"model.classifier.{name}"] for name in ("weight", "bias"))
    taught = nn.functional.linear(backbone(images).detach(), weight, bias)
    torch.testing.assert_close(network(images), taught, rtol=1e-3, atol=1e-4)
    validator = FewShotModel(validator_settings(settings), tiny_dataset.image_shape)
    student = SupervisedNetwork(validator.require_backbone(), 30, settings).train()
    scores = student(images, generator(settings.seed, "noise", 1)).detach()
    expected = supervised_loss(scores, labels, settings, taught).total.item()
    optimizer = build_optimizer(student, settings.optimizer)
    measured = pretraining_step(student, optimizer, images, labels, 0.1, settings, 1, network)
    assert measured["loss"] == pytest.approx(expected, rel=1e-4)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_with_all_the_weight_on_the_teacher_the_student_comes_to_agree_with_it(
    settings: PretrainSettings, teacher: Path, tmp_path: Path
) -> None:
    settings = taught_by(teacher, replace(settings, epochs=6, channels=8), weight=1.0)
    run = pretrain(settings, tmp_path / "student")
    steps = [row for row in rows(run.path) if "loss" in row]
    assert steps[-1]["loss"] == steps[-1]["distillation_loss"]
    assert steps[-1]["distillation_loss"] < 0.3 * steps[0]["distillation_loss"]


def test_teachers_that_cannot_teach_are_named(
    settings: PretrainSettings, teacher: Path, tmp_path: Path, tiny_dataset: ImageDataset
) -> None:
    taught = taught_by(teacher, settings)
    with pytest.raises(RunError, match="nowhere is not a run directory"):
        pretrain(taught_by(tmp_path / "nowhere", settings), tmp_path / "run")
    with pytest.raises(SettingsError, match=r"teacher: .* learned the classes of tiny"):
        pretrain(replace(taught, data="other"), tmp_path / "run")
    with pytest.raises(Interrupted):
        pretrain(settings, tmp_path / "half", progress=signal_at(7))
    with pytest.raises(RunError, match="half is not at its end; finish it with vsm pretrain"):
        pretrain(taught_by(tmp_path / "half", settings), tmp_path / "run")
    edit_config(teacher, "backbone: conv4", "backbone: os:path")
    with pytest.raises(SettingsError, match=r"not part of vsm, os:path; if you trust it, teach"):
        pretrain(taught, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# The order of images


def test_every_epoch_visits_images_once_in_an_order_of_its_own(
    settings: PretrainSettings, tiny_dataset: ImageDataset
) -> None:
    images = TrainingImages.of(tiny_dataset, settings)
    assert (len(images.image_ids), images.num_classes, images.steps_per_epoch) == (360, 30, 7)
    listed = list(images.batches(0))
    assert [epoch for epoch, _, _ in listed] == [1] * 7 + [2] * 7 + [3] * 7
    orders: list[list[int]] = [
        torch.cat([ids for number, ids, _ in listed if number == epoch]).tolist()
        for epoch in (1, 2, 3)
    ]
    assert all(len(set(order)) == len(order) == 350 for order in orders)  # ten fill no batch
    assert orders[0] != orders[1] != orders[2]
    assert set(orders[0]) != set(orders[1])  # other images are left out each time
    for _, ids, labels in listed:
        for image, label in zip(ids.tolist(), labels.tolist(), strict=True):
            class_id = int(tiny_dataset.classes("train")[label])
            assert image in tiny_dataset.image_ids(class_id)


@pytest.mark.parametrize("steps_done", [1, 6, 7, 8, 20, 21])
def test_batches_go_on_where_they_were_left(
    steps_done: int, settings: PretrainSettings, tiny_dataset: ImageDataset
) -> None:
    images = TrainingImages.of(tiny_dataset, settings)
    whole, rest = list(images.batches(0)), list(images.batches(steps_done))
    assert len(rest) == 21 - steps_done
    for (epoch, ids, labels), expected in zip(rest, whole[steps_done:], strict=True):
        assert epoch == expected[0]
        assert torch.equal(ids, expected[1])
        assert torch.equal(labels, expected[2])


def test_training_images_are_augmented_anew_at_every_step_or_not_at_all(
    settings: PretrainSettings, tiny_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageDataset, "augment", lambda self, pixels, *_: 255 - pixels)
    _, ids, _ = next(TrainingImages.of(tiny_dataset, settings).batches(0))
    plain = tiny_dataset.normalize(tiny_dataset.load(ids))
    varied = load_images(tiny_dataset, ids, settings, 1)
    assert torch.equal(varied, tiny_dataset.normalize(255 - tiny_dataset.load(ids)))
    kept = load_images(tiny_dataset, ids, replace(settings, augment=False), 1)
    assert torch.equal(kept, plain)

    seeds: list[int] = []
    asked: list[tuple[bool, float]] = []

    def augment(
        self: ImageDataset,
        pixels: torch.Tensor,
        random: torch.Generator,
        colors: bool,
        affine: float,
    ) -> torch.Tensor:
        seeds.append(random.initial_seed())
        asked.append((colors, affine))
        return pixels

    monkeypatch.setattr(ImageDataset, "augment", augment)
    for step in (1, 2, 1):
        load_images(tiny_dataset, ids, settings, step)
    assert seeds[0] == seeds[2] != seeds[1]
    changed = replace(settings, augment_colors=False, augment_affine=0.1)
    load_images(tiny_dataset, ids, changed, 1)
    assert asked == [(True, 0.0)] * 3 + [(False, 0.1)]


# Learning


def test_training_lowers_the_loss_and_classifies_unseen_classes_above_chance(
    settings: PretrainSettings, tmp_path: Path
) -> None:
    settings = replace(
        settings,
        epochs=12,
        channels=8,
        validation=replace(settings.validation, every=12, episodes=50),
    )
    run = pretrain(settings, tmp_path / "run")
    steps = [row for row in rows(run.path) if "loss" in row]
    assert steps[-1]["cross_entropy"] < 0.7 * steps[0]["cross_entropy"]
    assert steps[-1]["accuracy"] > 0.4  # of 30 classes
    [validated] = [row["validation"] for row in rows(run.path) if "validation" in row]
    for shot in ("1", "5"):
        score = validated["shots"][shot]
        assert score["accuracy"] - score["ci95"] > 0.4  # four classes: chance is 0.25


def test_a_step_is_that_of_plain_sgd_with_nesterov_momentum(
    settings: PretrainSettings, tiny_dataset: ImageDataset
) -> None:
    images = TrainingImages.of(tiny_dataset, settings)
    networks = []
    for _ in range(2):
        validator = FewShotModel(validator_settings(settings), tiny_dataset.image_shape)
        networks.append(
            SupervisedNetwork(validator.require_backbone(), images.num_classes, settings)
        )
    optimizer = build_optimizer(networks[0], settings.optimizer)
    velocity = [torch.zeros_like(parameter) for parameter in networks[1].parameters()]
    for step, (_, ids, labels) in zip((1, 2, 3), images.batches(0), strict=False):
        batch = load_images(tiny_dataset, ids, settings, step), labels
        rate = 0.01 * step
        networks[0].eval()  # a step trains whatever came before it
        pretraining_step(networks[0], optimizer, *batch, rate, settings, step)
        networks[1].zero_grad()
        scores = networks[1].train()(batch[0], torch.Generator())
        supervised_loss(scores, labels, settings).total.backward()
        with torch.no_grad():
            for parameter, moving in zip(networks[1].parameters(), velocity, strict=True):
                assert parameter.grad is not None
                slope = parameter.grad + 5e-4 * parameter
                moving.copy_(0.9 * moving + slope)
                parameter.sub_(rate * (slope + 0.9 * moving))
    for fused, plain in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-5)


def test_validation_is_the_evaluation_of_cosine_prototypes(
    settings: PretrainSettings, tiny_dataset: ImageDataset
) -> None:
    validator = FewShotModel(validator_settings(settings), tiny_dataset.image_shape)
    scores = validate(validator, validation_samplers(settings, tiny_dataset), 20)
    assert (scores.way, scores.queries, scores.episodes) == (4, 4, 20)
    for shot in (1, 5):
        sampler = EpisodeSampler(tiny_dataset, "validation", 4, shot, 4)
        assert scores.accuracies[shot] == evaluate(validator, None, sampler, 20, seed=0).accuracy
        right = []
        validator.eval()
        for batch in sampler.evaluation_episodes(20, seed=0):
            for episode in batch.image_ids:  # [N, K + Q]
                pixels = tiny_dataset.normalize(tiny_dataset.load(episode.flatten()))
                features = (
                    validator.require_backbone()(pixels)
                    .detach()
                    .unflatten(0, episode.shape)
                    .double()
                )
                features = features / features.norm(dim=-1, keepdim=True)
                prototypes = features[:, :shot].mean(1)  # [N, D]
                prototypes = prototypes / prototypes.norm(dim=-1, keepdim=True)
                nearest = (features[:, shot:] @ prototypes.T).argmax(-1)  # [N, Q]
                right.append((nearest == torch.arange(4).unsqueeze(1)).double().mean().item())
        assert scores.accuracies[shot].mean == pytest.approx(sum(right) / 20, abs=0.01)


def test_validation_embeds_every_image_once_with_features_of_length_one(
    settings: PretrainSettings, tiny_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = FewShotModel(validator_settings(settings), tiny_dataset.image_shape)
    embedded: list[torch.Tensor] = []
    embed = validator.encoder.embed

    def watched(images: torch.Tensor) -> torch.Tensor:
        embedded.append(embed(images))
        return embedded[-1]

    monkeypatch.setattr(validator.encoder, "embed", watched)
    validate(validator, validation_samplers(settings, tiny_dataset), 3)
    features = torch.cat(embedded)
    assert len(features) == 8 * 12  # for both numbers of support images
    torch.testing.assert_close(features.norm(dim=1), torch.ones(len(features)))


def test_validation_leaves_the_network_in_training_mode_and_unchanged(
    settings: PretrainSettings, tiny_dataset: ImageDataset
) -> None:
    validator = FewShotModel(validator_settings(settings), tiny_dataset.image_shape).train()
    before = {name: value.clone() for name, value in validator.state_dict().items()}
    validate(validator, validation_samplers(settings, tiny_dataset), 3)
    assert validator.require_backbone().training
    for name, value in validator.state_dict().items():
        assert torch.equal(value, before[name]), name


# What is left behind


def test_the_best_backbone_by_mean_accuracy_is_kept_and_loads_into_a_backbone(
    settings: PretrainSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    run = pretrain(replace(settings, keep_probability=0.9), tmp_path / "run")
    seen = [(row["epoch"], row["validation"]) for row in rows(run.path) if "validation" in row]
    assert [epoch for epoch, _ in seen] == [1, 2, 3]
    highest = max(scores["mean_accuracy"] for _, scores in seen)
    epoch, scores = next((e, found) for e, found in seen if found["mean_accuracy"] == highest)
    weights, metadata = load_backbone(run.path)
    assert metadata == {
        "kind": "backbone",
        "backbone": "conv4",
        "channels": 4,
        "keep_probability": 0.9,
        "input_shape": [1, 28, 28],
        "data": "tiny",
        "epoch": epoch,
        "validation": scores,
    }
    assert load_backbone(run.backbone)[1] == metadata
    with safetensors.safe_open(run.backbone, "pt") as file:
        assert set(file.metadata()) == {"vsm"}
    backbone = BACKBONES["conv4"]((1, 28, 28), 4, 0.9)
    backbone.load_state_dict(weights)
    validator = FewShotModel(validator_settings(settings), tiny_dataset.image_shape)
    validator.require_backbone().load_state_dict(weights)
    again = validate(validator, validation_samplers(settings, tiny_dataset), 20)
    assert again.as_dict() == scores


def test_a_later_and_worse_backbone_does_not_replace_the_best(
    settings: PretrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = iter([0.5, 0.9, 0.7])
    monkeypatch.setattr(
        "vsm.pretraining.validate",
        lambda *_: FewShotScores(4, 4, 20, {1: Estimate(next(coming), 0.01)}),
    )
    run = pretrain(settings, tmp_path / "run")
    weights, metadata = load_backbone(run.path)
    assert (metadata["epoch"], metadata["validation"]["mean_accuracy"]) == (2, 0.9)
    last, progress = load_tensors(run.resume)
    assert progress == {"step": 21, "best_epoch": 2, "best_accuracy": 0.9}
    assert any(not torch.equal(last[f"model.backbone.{name}"], weights[name]) for name in weights)


def test_the_mean_accuracy_is_over_the_numbers_of_support_images() -> None:
    scores = FewShotScores(5, 15, 600, {1: Estimate(0.5, 0.01), 5: Estimate(0.8, 0.02)})
    assert scores.mean == pytest.approx(0.65)
    assert scores.as_dict()["shots"]["5"] == {"accuracy": 0.8, "ci95": 0.02}


def test_validation_happens_every_few_epochs_and_at_the_end(
    settings: PretrainSettings, tmp_path: Path
) -> None:
    validation = FewShotValidationSettings(every=2, episodes=3, way=3, shots=(2,), queries=2)
    run = pretrain(replace(settings, epochs=5, validation=validation), tmp_path / "run")
    validated = [row for row in rows(run.path) if "validation" in row]
    assert [(row["epoch"], row["step"]) for row in validated] == [(2, 14), (4, 28), (5, 35)]
    assert validated[0]["validation"]["shots"].keys() == {"2"}


def test_settings_survive_a_round_trip_through_yaml(
    settings: PretrainSettings, tmp_path: Path
) -> None:
    run = pretrain(settings, tmp_path / "run")
    assert run.settings() == settings
    (tmp_path / "a.yaml").write_text(settings_to_yaml(settings))
    assert read_settings(PretrainSettings, tmp_path / "a.yaml") == settings


def test_files_that_hold_no_backbone_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no pre-trained backbone: there is no file"):
        load_backbone(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"there is no file .*backbone\.safetensors; make one with"):
        load_backbone(tmp_path)
    file = tmp_path / "model.safetensors"
    enough = {"backbone": "conv4", "channels": 4, "keep_probability": 1.0, "input_shape": [1, 2, 2]}
    for stored in ({"step": 3}, {"kind": "backbone", "channels": 4}, {"kind": "other", **enough}):
        save_tensors(file, {"a": torch.zeros(1)}, stored)
        with pytest.raises(RunError, match="does not hold a pre-trained backbone; give a direct"):
            load_backbone(file)
    save_tensors(file, {"a": torch.zeros(1)}, {"kind": "backbone", **enough})
    assert load_backbone(file)[1]["channels"] == 4
    file.write_bytes(b"not weights")
    with pytest.raises(RunError, match="is damaged"):
        load_backbone(file)


def test_runs_of_one_command_are_refused_by_the_other(
    settings: PretrainSettings,
    tiny_settings: RunSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pre, run = PretrainingDirectory(tmp_path / "pre"), RunDirectory(tmp_path / "run")
    pre.create(settings)
    run.create(tiny_settings)
    with pytest.raises(RunError, match="was written by vsm pretrain, but one of vsm train is need"):
        RunDirectory(pre.path).settings()
    with pytest.raises(RunError, match="was written by vsm train, but one of vsm pretrain"):
        PretrainingDirectory(run.path).settings()
    for command, place in (("train", pre), ("pretrain", run)):
        before = place.config.read_bytes()
        for word in ("--resume", "--overwrite"):
            assert main([command, "--output", str(place.path), word]) == 2
            assert "was written by vsm" in capsys.readouterr().err
        assert place.config.read_bytes() == before


# Stopping and going on


ALL_AT_ONCE = {
    "keep_probability": 0.8,
    "distillation": DistillationSettings("teacher"),
}


@pytest.mark.parametrize("stop_at", [1, 7, 10])
@pytest.mark.parametrize("more", [{"keep_probability": 0.8}, ALL_AT_ONCE], ids=["few", "all"])
def test_a_stopped_and_resumed_pretraining_equals_an_uninterrupted_one_bit_for_bit(
    stop_at: int,
    more: dict[str, Any],
    settings: PretrainSettings,
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(teacher.parent)
    settings = replace(settings, epochs=2, **more)
    pretrain(settings, tmp_path / "whole")
    message = rf"stopped and saved at step {stop_at} of 14 \(epoch {1 + (stop_at - 1) // 7} of 2\)"
    with pytest.raises(Interrupted, match=message) as stopped:
        pretrain(settings, tmp_path / "parts", progress=signal_at(stop_at))
    assert stopped.value.exit_code == 130
    pretrain(settings, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", *FILES)


def test_a_crash_between_checkpoints_repeats_the_lost_steps_exactly(
    settings: PretrainSettings, tmp_path: Path
) -> None:
    pretrain(settings, tmp_path / "whole")
    with pytest.raises(OSError, match="power cut"):
        # The last checkpoint is of step 8; validation and log are further.
        pretrain(settings, tmp_path / "parts", progress=power_cut_at(11))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "half a li')
    pretrain(settings, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", *FILES)


def test_progress_counts_all_steps_and_tells_of_every_validation(
    settings: PretrainSettings, tmp_path: Path
) -> None:
    before, after = RecordedProgress(), RecordedProgress()
    with pytest.raises(Interrupted):
        pretrain(settings, tmp_path / "run", progress=signal_at(9))
    pretrain(settings, tmp_path / "whole", progress=before)
    pretrain(settings, tmp_path / "run", resume=True, progress=after)
    assert before.shown == [("pretrain", step, 21) for step in range(22)]
    assert after.shown == [("pretrain", step, 21) for step in range(9, 22)]
    assert [text.split(":")[0] for text in before.messages] == ["epoch 1", "epoch 2", "epoch 3"]
    assert after.messages == before.messages[1:]
    assert before.messages[0].endswith("(best so far)")


def test_plain_sgd_without_momentum_resumes_too(settings: PretrainSettings, tmp_path: Path) -> None:
    plain = OneCycleSettings(momentum=0.0, nesterov=False, learning_rate=0.05)
    settings = replace(settings, optimizer=plain, epochs=1)
    pretrain(settings, tmp_path / "whole")
    with pytest.raises(Interrupted):
        pretrain(settings, tmp_path / "parts", progress=signal_at(3, signal.SIGTERM))
    pretrain(settings, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", *FILES)


def test_resuming_a_finished_pretraining_changes_nothing(
    settings: PretrainSettings, tmp_path: Path
) -> None:
    pretrain(settings, tmp_path / "run")
    before = (tmp_path / "run" / "resume.safetensors").read_bytes()
    pretrain(settings, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "resume.safetensors").read_bytes() == before


# Mistakes


def test_impossible_settings_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"label_smoothing: must lie in \[0.0, 1.0\], got 2"):
        PretrainSettings(label_smoothing=2)
    with pytest.raises(SettingsError, match=r"augment_affine: must lie in \[0.0, 0.5\], got 0.7"):
        PretrainSettings(augment_affine=0.7)
    with pytest.raises(SettingsError, match="augment_affine: has no effect with augment false"):
        PretrainSettings(augment=False, augment_affine=0.1)
    with pytest.raises(SettingsError, match="batch_size: must be at least 2, got 1"):
        PretrainSettings(batch_size=1)
    with pytest.raises(SettingsError, match="epochs: must be greater than 0, got 0"):
        PretrainSettings(epochs=0)
    with pytest.raises(SettingsError, match="temperature: must be greater than 0, got 0"):
        DistillationSettings(temperature=0)
    with pytest.raises(SettingsError, match="nesterov: needs momentum above 0"):
        OneCycleSettings(momentum=0)
    with pytest.raises(SettingsError, match=r"shots: expected different numbers of at least 1, go"):
        FewShotValidationSettings(shots=(1, 1))
    with pytest.raises(SettingsError, match="episodes: must be at least 2, got 1"):
        FewShotValidationSettings(episodes=1)
    with pytest.raises(SettingsError, match="way: must be at least 2, got 1"):
        FewShotValidationSettings(way=1)


def test_data_that_cannot_be_trained_on_are_named(
    settings: PretrainSettings, tiny_dataset: ImageDataset
) -> None:
    with pytest.raises(SettingsError, match="batch_size: 500 images asked for, but the training"):
        TrainingImages.of(tiny_dataset, replace(settings, batch_size=500))


def test_a_pretraining_that_diverges_says_so(settings: PretrainSettings, tmp_path: Path) -> None:
    reckless = replace(settings, optimizer=OneCycleSettings(learning_rate=1e30))
    with pytest.raises(RunError, match=r"training diverged: the loss is \S+ at step \d"):
        pretrain(reckless, tmp_path / "run")


# The command line


def tiny_command(output: Path, *more: str) -> list[str]:
    numbers = ["--channels", "4", "--epochs", "2", "--batch-size", "90"]
    validation = ["--validation.episodes", "4", "--validation.queries", "4"]
    return ["pretrain", "--output", str(output), *numbers, *validation, *more]


def test_the_command_prints_every_validation_and_a_command_to_go_on_with(
    tmp_path: Path,
    tiny_dataset: ImageDataset,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    assert main(tiny_command(out, "--validation.every", "1")) == 0
    printed = capsys.readouterr()
    table = printed.out
    assert all(word in table for word in ("epoch", "1-shot", "5-shot", "kept", "±"))
    command = shlex.split(table.splitlines()[-1].partition("go on with: vsm ")[2])
    assert command[:5] == ["train", "--data", "glyphs", "--init", str(out)]
    assert "--freeze-backbone" in command
    monkeypatch.setattr("vsm.training.open_dataset", lambda name: tiny_dataset)
    few = ["--steps", "1", "--queries", "2", "--validation.episodes", "2", "--method", "vpn"]
    assert main([*command, *few, "--json"]) == 0
    assert "validation 1-shot" in printed.err
    assert "loss" in printed.err


def test_presets_load_and_what_comes_later_on_the_line_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [path.stem for path in PRETRAINING_PRESETS.glob("*.yaml")]
    assert "cifar-fs-resnet12" in names
    for name in names:
        read_settings(PretrainSettings, *preset_paths(name, PRETRAINING_PRESETS))
    out = tmp_path / "run"
    smaller = ["--data", "glyphs", "--backbone=conv4", "--json"]
    assert main(tiny_command(out, "--preset", "cifar-fs-resnet12", *smaller, "--epochs", "1")) == 0
    stored = PretrainingDirectory(out).settings()
    assert (stored.backbone, stored.channels, stored.epochs) == ("conv4", 48, 1)
    assert main(tiny_command(tmp_path / "other", "--preset", "resnet")) == 2
    assert "unknown preset 'resnet'; known: cifar-fs-resnet12" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["pretrain", "--help"])
    told = capsys.readouterr().out
    assert all(name in told for name in names)


def test_the_command_computes_where_and_how_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Placement] = []

    def note(*arguments: Any) -> None:
        given.append(arguments[-1])
        raise RunError("enough")

    monkeypatch.setattr("vsm.pretraining.pretrain", note)
    words = tiny_command(tmp_path / "run", "--device", "cpu", "--precision", "bfloat16")
    assert main(words) == 2
    assert given == [Placement(torch.device("cpu"), torch.bfloat16)]


def test_json_is_one_object_with_the_best_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    (tmp_path / "a.yaml").write_text("label_smoothing: 0.0\nepochs: 1\n")
    assert main(tiny_command(out, "--config", str(tmp_path / "a.yaml"), "--json")) == 0
    captured = capsys.readouterr()
    [line] = captured.out.splitlines()
    printed = json.loads(line)
    assert captured.err == ""
    assert printed["run"] == str(out)
    assert printed["best_epoch"] == 1
    assert printed["shots"].keys() == {"1", "5"}
    assert load_backbone(Path(printed["backbone"]))[1]["validation"] == {
        key: printed[key] for key in ("way", "queries", "episodes", "mean_accuracy", "shots")
    }


def test_settings_cannot_change_on_resume_and_runs_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(tiny_command(out)) == 0
    capsys.readouterr()
    for words, named in (
        (["--validation.queries", "4"], "already holds a run"),
        (["--epochs", "many"], "epochs"),
        (["--resume", "--epochs", "9"], "epochs: the run in"),
        (["--resume", "--validation.shots", "[1]"], "validation.shots: the run in"),
        (["--resume", "--overwrite"], "contradict each other"),
        (["--bakcbone", "conv4"], "--bakcbone"),
        (["--overwrite", "--backbone", "conv5"], "backbone"),
    ):
        try:
            code: object = main(["pretrain", "--output", str(out), *words])
        except SystemExit as stop:
            code = stop.code
        errors = capsys.readouterr().err
        assert code == 2
        assert named in errors
        assert "Traceback" not in errors
    assert main(["pretrain", "--output", str(out), "--resume", "--json"]) == 0
    assert main(tiny_command(out, "--overwrite", "--epochs", "1")) == 0


def test_a_teacher_is_found_again_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(tiny_command(Path("first"), "--json")) == 0
    taught = ["--distillation.teacher", "first", "--epochs", "1", "--json"]
    assert main(tiny_command(Path("second"), *taught)) == 0
    stored = PretrainingDirectory(tmp_path / "second").settings()
    assert stored.distillation.teacher == str(tmp_path / "first")
    assert pretraining_commands(tmp_path / "second", "runs/p") == [
        "vsm pretrain --channels 4 --epochs 2 --batch-size 90 --validation.episodes 4 "
        "--validation.queries 4 --output runs/p-teacher",
        "vsm pretrain --channels 4 --epochs 1 --batch-size 90 --distillation.teacher "
        "runs/p-teacher --validation.episodes 4 --validation.queries 4 --output runs/p",
    ]


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from vsm.cli import main\n"
        "try: main(['pretrain', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--distillation.teacher" in done.stdout


def test_termination_saves_and_exits_143_and_resume_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm.pretraining.open_images", open_dataset)
    rng = np.random.default_rng(0)
    for class_id in range(15):
        (tmp_path / "data" / f"class{class_id}").mkdir(parents=True)
        for image in range(4):
            pixels = rng.integers(0, 255, (28, 28)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / f"class{class_id}" / f"{image}.png")

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    numbers = [
        *("--data", f"folder:{tmp_path / 'data'}", "--channels", "4", "--epochs", "25"),
        *("--batch-size", "4", "--checkpoint-every", "5", "--validation.episodes", "4"),
        *("--validation.way", "2", "--validation.shots", "[1,2]", "--validation.queries", "2"),
    ]
    process = ForkedPython({}, "-m", "vsm", "pretrain", "--output", killed, *numbers)
    wait_for(killed / "resume.safetensors", [process])
    process.send_signal(signal.SIGTERM)
    [(code, errors)] = finish([process])
    assert code == 143
    assert "stopped and saved at step" in errors
    assert f"vsm pretrain --output {killed} --resume" in errors
    assert "Traceback" not in errors
    assert main(["pretrain", "--output", str(killed), "--resume", "--json"]) == 0
    assert main(["pretrain", "--output", str(whole), *numbers, "--json"]) == 0
    assert_same_run(whole, killed, *FILES)
