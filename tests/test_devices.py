"""Where a run computes: choosing a device, and keeping all tensors on it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pretend_device import PRETENDED, Elsewhere, pretended_device
from run_helpers import power_cut_at, signal_at, train_run
from tiny import variant
from vsm.data import ImageDataset
from vsm.errors import SettingsError
from vsm.evaluation.evaluator import BatchNormMode, EpisodeProtocol
from vsm.memory import SlotMemory
from vsm.model import FewShotModel
from vsm.pretraining import pretrain
from vsm.runs.loading import load
from vsm.runs.trained_model import Measurement
from vsm.settings import (
    METHODS,
    DistillationSettings,
    FewShotValidationSettings,
    MannSettings,
    MemorySettings,
    Method,
    ObjectiveSettings,
    PretrainSettings,
    RunSettings,
    ValidationSettings,
)
from vsm.system.devices import (
    ON_CPU,
    Placement,
    avoid_unusable_amx,
    choose_placement,
    send,
)
from vsm.system.interruption import Interrupted
from vsm.system.tensor_files import load_tensors
from vsm_lab.measures import look_at_episodes

ELSEWHERE = Placement(PRETENDED)
IN_BFLOAT16 = Placement(torch.device("cpu"), torch.bfloat16)
PRETRAINING = PretrainSettings(
    data="tiny",
    backbone="resnet12",
    channels=4,
    epochs=1,
    batch_size=32,
    validation=FewShotValidationSettings(episodes=3, way=3, shots=(2,), queries=2),
)


@pytest.fixture(autouse=True)
def _tiny_data(monkeypatch: pytest.MonkeyPatch, tiny_dataset: ImageDataset) -> None:
    monkeypatch.setattr("vsm.training.open_dataset", lambda name: tiny_dataset)
    monkeypatch.setattr("vsm.encoders.encoder.open_dataset", lambda name: tiny_dataset)
    monkeypatch.setattr("vsm.training.FUSED_DEVICES", ())


def assert_same_files(one: Path, two: Path) -> None:
    for name in (
        "model.safetensors",
        "memory.safetensors",
        "calibration.json",
        "resume.safetensors",
    ):
        assert (one / name).exists() == (two / name).exists()
        if (one / name).exists():
            assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_the_pretended_device_refuses_to_mix_with_the_cpu() -> None:
    with pretended_device() as device:
        there = torch.ones(3, device=device)
        assert isinstance(there, Elsewhere)
        assert there.device == device
        assert (there + there.sum()).tolist() == [4, 4, 4]
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(3)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_elsewhere_is_the_run_of_the_cpu(
    method: Method, tiny_settings: RunSettings, tmp_path: Path
) -> None:
    settings = variant(tiny_settings, method=method, memory=MemorySettings(capacity=5), steps=3)
    if method == "mann":
        mann = MannSettings(slots=16, width=8, controller_units=16)
        settings = replace(settings, mann=mann, tasks=1, validation=ValidationSettings(3, 2))
    train_run(settings, tmp_path / "here", placement=ON_CPU)
    with pretended_device():
        train_run(settings, tmp_path / "there", placement=ELSEWHERE)
    assert_same_files(tmp_path / "here", tmp_path / "there")


@pytest.mark.parametrize("recall", ["soft", "mixture", "gumbel"])
def test_every_recall_and_divergence_runs_elsewhere(
    recall: str, tiny_settings: RunSettings, tmp_path: Path
) -> None:
    memory = MemorySettings(recall=recall, capacity=5)  # type: ignore[arg-type]
    objective = ObjectiveSettings(kl="monte_carlo", likelihood="log_of_mean")
    model = replace(tiny_settings.model, keep_probability=0.8, distance="cosine")
    settings = variant(tiny_settings, memory=memory, objective=objective, model=model, steps=3)
    train_run(settings, tmp_path / "here", placement=ON_CPU)
    with pretended_device():
        train_run(settings, tmp_path / "there", placement=ELSEWHERE)
    assert_same_files(tmp_path / "here", tmp_path / "there")


@pytest.mark.parametrize("placements", [(ON_CPU, ELSEWHERE), (ELSEWHERE, ON_CPU)])
def test_a_run_can_be_resumed_on_another_device(
    placements: tuple[Placement, Placement], tiny_settings: RunSettings, tmp_path: Path
) -> None:
    train_run(tiny_settings, tmp_path / "here", placement=ON_CPU)
    before, after = placements
    with pretended_device():
        with pytest.raises(OSError, match="power cut"):
            train_run(tiny_settings, tmp_path / "moved", progress=power_cut_at(4), placement=before)
        train_run(tiny_settings, tmp_path / "moved", resume=True, placement=after)
    assert_same_files(tmp_path / "here", tmp_path / "moved")


@pytest.mark.parametrize("batch_norm", ["inductive", "transductive"])
def test_evaluation_elsewhere_gives_the_results_of_the_cpu(
    batch_norm: BatchNormMode,
    tiny_settings: RunSettings,
    tiny_dataset: ImageDataset,
    tmp_path: Path,
) -> None:
    train_run(tiny_settings, tmp_path / "run", placement=ON_CPU)
    protocol = EpisodeProtocol("tiny", "test", 3, 1, 2, 4, 0, batch_norm, memory_slots=4)

    def measured(**options: Any) -> Measurement:
        return load(tmp_path / "run", **options).on(protocol).measure(protocol)

    here = measured(placement=ON_CPU)
    with pretended_device():
        there = measured(placement=ELSEWHERE)
        last = measured(checkpoint="last", placement=ELSEWHERE)
        shown = look_at_episodes(there, tiny_dataset, 2, 2)
    assert there.trained.state is not None
    assert all(part.device == PRETENDED for part in there.trained.state.tensors().values())
    assert there.evaluation.correct.device == last.evaluation.correct.device == ON_CPU.device
    assert here.as_dict() == there.as_dict()
    assert torch.equal(here.evaluation.log_likelihood, there.evaluation.log_likelihood)
    for episode in shown:
        assert episode.weights is not None
        for value in (episode.probabilities, episode.prototypes, episode.weights):
            assert value.device.type == "cpu"


def test_the_backbone_alone_computes_in_bfloat16(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    seen: list[torch.dtype] = []

    def watch(module: torch.nn.Module, given: object, made: torch.Tensor) -> None:
        seen.append(made.dtype)

    model = FewShotModel(tiny_settings, tiny_dataset.image_shape)
    model.require_backbone().register_forward_hook(watch)
    images = tiny_dataset.normalize(tiny_dataset.load(torch.arange(6)))
    exact = model.eval().embed(images)
    rounded = model.place(IN_BFLOAT16).embed(images)
    assert seen == [torch.float32, torch.bfloat16]
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.05)
    train_run(tiny_settings, tmp_path / "run", placement=IN_BFLOAT16)
    trained = load(tmp_path / "run")
    assert isinstance(trained.state, SlotMemory)
    assert trained.state.content.dtype == torch.float32
    assert {parameter.dtype for parameter in trained.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("backbone", ["conv4", "resnet12"])
def test_a_pre_training_elsewhere_is_that_of_the_cpu(
    backbone: str, tiny_dataset: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm.pretraining.open_images", lambda name: tiny_dataset)
    monkeypatch.setattr("vsm.pretraining.FUSED_DEVICES", ())
    teacher = replace(PRETRAINING, backbone=backbone)
    pretrain(teacher, tmp_path / "teacher", placement=ON_CPU)
    student = replace(teacher, distillation=DistillationSettings(str(tmp_path / "teacher")))
    pretrain(student, tmp_path / "here", placement=ON_CPU)
    with pretended_device():
        pretrain(student, tmp_path / "there", placement=ELSEWHERE)
    for name in ("backbone.safetensors", "resume.safetensors"):
        here, there = (load_tensors(tmp_path / where / name)[0] for where in ("here", "there"))
        assert here.keys() == there.keys()
        for key, values in here.items():
            torch.testing.assert_close(values, there[key])


def test_pre_training_in_bfloat16_keeps_float32_weights(
    tiny_dataset: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm.pretraining.open_images", lambda name: tiny_dataset)
    exact, rounded = (
        load_tensors(pretrain(PRETRAINING, tmp_path / name, placement=placement).backbone)[0]
        for name, placement in (("exact", ON_CPU), ("rounded", IN_BFLOAT16))
    )
    assert {values.dtype for values in rounded.values()} == {
        values.dtype for values in exact.values()
    }
    assert any(not torch.equal(values, rounded[name]) for name, values in exact.items())


def test_a_stopped_pre_training_says_how_to_go_on_in_the_same_precision(
    tiny_dataset: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm.pretraining.open_images", lambda name: tiny_dataset)
    with pytest.raises(Interrupted, match=r"--resume --precision bfloat16$"):
        pretrain(PRETRAINING, tmp_path / "run", progress=signal_at(2), placement=IN_BFLOAT16)
    with pytest.raises(Interrupted, match=r"--resume$"):
        pretrain(PRETRAINING, tmp_path / "plain", progress=signal_at(2), placement=ON_CPU)


def test_pixels_go_to_a_gpu_through_pinned_memory_without_waiting() -> None:
    pixels, gpu = Mock(spec=torch.Tensor), torch.device("cuda", 0)
    sent = send(pixels, gpu)
    pixels.pin_memory.return_value.to.assert_called_once_with(gpu, non_blocking=True)
    assert sent is pixels.pin_memory.return_value.to.return_value


@pytest.mark.parametrize(
    ("level", "flags", "own", "expected"),
    [
        (28, "avx512f amx_bf16 amx_tile", None, "AVX512_CORE_FP16"),
        (28, "avx512f amx_bf16 amx_tile", "AVX2", "AVX2"),
        (32, "avx512f amx_bf16 amx_tile", None, None),
        (28, "avx512f", None, None),
    ],
)
def test_amx_is_avoided_where_its_tiles_are_unknown(
    level: int,
    flags: str,
    own: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", own or "")
    if own is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    cpuinfo = tmp_path / "cpuinfo"
    avoid_unusable_amx(cpuinfo)  # not there
    cpuinfo.write_text(f"processor\t: 0\ncpuid level\t: {level}\nflags\t\t: fpu {flags} sse\n")
    avoid_unusable_amx(cpuinfo)
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == expected


def pretend_gpus(patch: pytest.MonkeyPatch, count: int, bfloat16: bool = True) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)


def test_auto_takes_the_gpu_of_its_process_and_bfloat16_where_there_is_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(monkeypatch, 0)
    assert choose_placement() == ON_CPU
    pretend_gpus(monkeypatch, 4)
    assert choose_placement() == Placement(torch.device("cuda", 0), torch.bfloat16)
    assert choose_placement("cuda:1", "float32") == Placement(torch.device("cuda", 1))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_placement().device == torch.device("cuda", 3)
    pretend_gpus(monkeypatch, 1, bfloat16=False)  # a scheduler shows each process its own GPU alone
    assert choose_placement() == Placement(torch.device("cuda", 0))
    assert choose_placement("cpu", "bfloat16").precision == torch.bfloat16


def test_a_command_names_device_and_precision_only_where_they_are_not_chosen_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(monkeypatch, 0)
    assert ON_CPU.options == ""
    assert IN_BFLOAT16.options == " --precision bfloat16"
    pretend_gpus(monkeypatch, 4)
    assert ON_CPU.options == " --device cpu"
    assert Placement(torch.device("cuda", 2), torch.bfloat16).options == " --device cuda:2"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")  # whose own GPU cannot be named for all
    assert Placement(torch.device("cuda", 2), torch.bfloat16).options == ""
    assert Placement(torch.device("cuda", 2)).options == " --precision float32"


@pytest.mark.parametrize(
    ("device", "count", "named"),
    [
        ("gpu", 1, "device: expected auto, cpu, cuda, cuda:N or mps, got 'gpu'"),
        ("cuda:", 1, "expected auto, cpu, cuda, cuda:N or mps"),
        ("cuda", 0, "device: cuda asked for, but torch finds no GPUs; use auto or cpu"),
        ("cuda", 2, "device: this machine has 2 GPUs, too few for process 5"),
        ("cuda:1", 2, "device: several processes cannot share cuda:1; use auto, cuda or cpu"),
        ("mps", 0, "device: several processes cannot share mps"),
    ],
)
def test_devices_that_cannot_be_are_named(
    device: str, count: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, count)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(SettingsError, match=named):
        choose_placement(device)


def test_a_missing_gpu_and_a_missing_mps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    with pytest.raises(SettingsError, match="device: cuda:2 asked for, but torch finds 2 GPUs"):
        choose_placement("cuda:2")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="device: mps is not available here; use auto or cpu"):
        choose_placement("mps")
