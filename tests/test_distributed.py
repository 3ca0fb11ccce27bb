"""Several processes make the run of one: with real processes, and real signals and kills."""

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from distributed_worker import SCENARIOS, whole_batch
from launching_helpers import TINY, finish, run, start, wait_for
from vsm.cli import main
from vsm.data import ImageDataset
from vsm.errors import ProcessLostError, SettingsError
from vsm.model import FewShotModel
from vsm.nn.batch_norm import (
    SynchronizedBatchNorm,
    global_statistics,
    synchronize_batch_norm,
    unsynchronized_buffers,
)
from vsm.runs.directory import RunDirectory
from vsm.settings import RunSettings
from vsm.system.distributed import SINGLE_PROCESS, Processes, join_processes

WORKER = Path(__file__).with_name("distributed_worker.py")
SYNCHRONIZED = [name for name in SCENARIOS if name != "unsynchronized"]

Held = dict[str, Tensor]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the worker wrote when it was alone, and when it was two processes."""
    folder = tmp_path_factory.mktemp("worlds")
    for count in (1, 2):
        for code, said in finish(start(count, WORKER, folder)):
            assert code == 0, said
    return folder


def held(folder: Path, name: str, count: int) -> list[Held]:
    """What each of ``count`` processes held at the end."""
    return [load_file(folder / f"{name}-{rank}of{count}.safetensors") for rank in range(count)]


@pytest.mark.parametrize("name", [*SCENARIOS, "single precision"])
def test_all_processes_hold_the_same_model_and_memory_bit_for_bit(worlds: Path, name: str) -> None:
    first, second = held(worlds, name, 2)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_two_processes_make_the_run_of_one(worlds: Path, name: str) -> None:
    [alone] = held(worlds, name, 1)
    together, _ = held(worlds, name, 2)
    assert alone.keys() == together.keys()
    assert alone["losses"].shape == (5, 2)
    for key, value in alone.items():
        # A convolution's bias before batch norm has no gradient but rounding, which Adam enlarges.
        torch.testing.assert_close(together[key], value, rtol=1e-9, atol=1e-7, msg=key)


def test_the_scenarios_have_memories_that_grow(worlds: Path) -> None:
    for name in ("attention", "mixture", "resnet12"):
        [alone] = held(worlds, name, 1)
        assert len(alone["memory.content"]) > 6
        assert alone["memory.counts"].max() > 3  # some class was met again, and its slot updated
    [kanerva] = held(worlds, "kanerva", 1)
    assert kanerva["memory.count"] > 0
    assert kanerva["memory.weighted_sums"].abs().max() > 0


def test_the_loss_curves_agree_in_single_precision(worlds: Path) -> None:
    [alone] = held(worlds, "single precision", 1)
    together, _ = held(worlds, "single precision", 2)
    torch.testing.assert_close(together["losses"], alone["losses"], rtol=1e-3, atol=1e-4)


def test_without_synchronized_batch_norm_the_run_is_another_one(worlds: Path) -> None:
    [alone], (together, _) = held(worlds, "unsynchronized", 1), held(worlds, "unsynchronized", 2)
    assert not torch.allclose(together["losses"], alone["losses"], rtol=1e-3)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_synchronized_batch_norm_is_batch_norm_of_the_whole_batch(
    worlds: Path, kind: torch.dtype
) -> None:
    shares = held(worlds, f"batch_norm {kind}", 2)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(kind, torch.float32))
    try:
        layer, images, gradient = whole_batch(kind)
    finally:
        torch.set_default_dtype(default)
    images.requires_grad_()
    output = layer(images)
    output.backward(gradient)
    layer.eval()
    evaluated = layer(images)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[kind]
    assert_close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    whole = {"output": output, "images.grad": images.grad, "evaluated": evaluated}
    for key, value in whole.items():
        joined = torch.cat([share[key] for share in shares])
        assert_close(joined, value, msg=key)
    for share in shares:
        assert_close(share["weight.grad"], layer.weight.grad)
        assert_close(share["bias.grad"], layer.bias.grad)
        for key, value in layer.state_dict().items():
            assert_close(share[key], value, msg=key)


def test_batch_norm_of_rows_is_synchronized_too(worlds: Path) -> None:
    [alone], shares = held(worlds, "rows", 1), held(worlds, "rows", 2)
    for key in ("output", "gradient"):
        torch.testing.assert_close(torch.cat([share[key] for share in shares]), alone[key])
    for key in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        for share in shares:
            torch.testing.assert_close(share[key], alone[key])


def test_layers_that_cannot_be_synchronized_stay_and_are_averaged() -> None:
    layers = [nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(2, momentum=None), nn.BatchNorm3d(2)]
    network = nn.Sequential(*layers)
    synchronize_batch_norm(network, Processes(0, 2))
    assert [type(layer) for layer in network] == [
        *(nn.BatchNorm2d, nn.BatchNorm2d, SynchronizedBatchNorm)
    ]
    left = {id(buffer) for buffer in unsynchronized_buffers(network)}
    assert left == {id(b) for layer in layers[:2] for b in (layer.running_mean, layer.running_var)}


def test_processes_agree_in_order(worlds: Path) -> None:
    for one in held(worlds, "agreed", 2):
        assert one["total"].tolist() == [[1.0, 20.0]]
        assert one["gathered"].tolist() == [[0.0, 10.0], [1.0, 10.0]]
        assert one["average of the first"].unique().tolist() == [0.5]
        assert one["average of the second"].unique().tolist() == [2.0]
        assert one["broadcast"].unique().tolist() == [0.0]
        assert one["largest"].item() == 3
        assert one["from first"].item() == 0.1
    [alone] = held(worlds, "agreed", 1)
    assert alone["gathered"].tolist() == [[0.0, 10.0]]


def test_tasks_are_shared_out_in_order_without_gaps() -> None:
    shares = [Processes(rank, 3).share(12) for rank in range(3)]
    assert shares == [range(4), range(4, 8), range(8, 12)]
    with pytest.raises(SettingsError, match="8 tasks of a step cannot be shared evenly by 3 proc"):
        Processes(0, 3).share(8)


def test_one_process_keeps_plain_batch_norm(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = FewShotModel(tiny_settings, tiny_dataset.image_shape)
    synchronize_batch_norm(model, SINGLE_PROCESS)
    assert not any(isinstance(module, SynchronizedBatchNorm) for module in model.modules())


def test_synchronizing_keeps_every_name_and_parameter(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = FewShotModel(tiny_settings, tiny_dataset.image_shape)
    names, parameters = list(model.state_dict()), list(model.parameters())
    plain = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    synchronize_batch_norm(model, Processes(0, 2))
    synchronized = [m for m in model.modules() if isinstance(m, SynchronizedBatchNorm)]
    assert len(synchronized) == plain == 4
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_statistics_of_images_far_from_zero_do_not_cancel() -> None:
    images = 1000 + torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    mean, variance = global_statistics(images, SINGLE_PROCESS)
    exact = images.double()
    torch.testing.assert_close(mean.double(), exact.mean((0, 2, 3)), rtol=1e-6, atol=0)
    expected = exact.var((0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), expected, rtol=1e-3, atol=0)


def test_without_an_announced_job_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_processes(torch.device("cpu")) as processes:
        assert processes is SINGLE_PROCESS


def test_a_job_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(ProcessLostError, match=r"did not find each other.*start them with torchrun"),
        join_processes(torch.device("cpu")),
    ):
        pass


def told(folder: Path, count: int) -> list[dict[str, Any]]:
    """What each of ``count`` processes was told by the command line."""
    paths = [folder / f"told-{rank}of{count}.json" for rank in range(count)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def losses(output: Path) -> list[tuple[int, float]]:
    rows = RunDirectory(output).read_metrics()
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def saved_step(output: Path) -> int:
    with safe_open(output / "resume.safetensors", "pt") as file:
        step: int = json.loads(file.metadata()["vsm"])["step"]
    return step


def test_a_request_to_one_process_stops_all_and_resuming_loses_nothing(worlds: Path) -> None:
    for one in told(worlds, 2):
        assert one["stopped"].startswith("143 stopped and saved at step 3 of 6; go on with: vsm")
    for name in (
        "model.safetensors",
        "memory.safetensors",
        "calibration.json",
        "resume.safetensors",
    ):
        whole, parts = ((worlds / run / name).read_bytes() for run in ("whole2", "parts2"))
        assert whole == parts, name
    assert losses(worlds / "whole2") == losses(worlds / "parts2")


def test_a_run_leaves_the_same_directory_as_that_of_one_process(worlds: Path) -> None:
    alone, together = worlds / "whole1", worlds / "whole2"
    assert {path.name for path in alone.iterdir()} == {path.name for path in together.iterdir()}
    assert (alone / "config.yaml").read_text() == (together / "config.yaml").read_text()
    rows = [RunDirectory(run).read_metrics() for run in (alone, together)]
    assert [set(row) for row in rows[0]] == [set(row) for row in rows[1]]
    assert losses(alone)[0][1] == pytest.approx(losses(together)[0][1], rel=1e-3)


def test_a_run_goes_on_with_another_number_of_processes(
    worlds: Path, tmp_path: Path, tiny_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps were done by one process, five by two; the last ten are done here."""
    assert [one["went on"]["code"] for one in told(worlds, 1) + told(worlds, 2)] == [0, 0, 0]
    assert saved_step(worlds / "changed") == 10
    monkeypatch.setattr("vsm.training.open_dataset", lambda name: tiny_dataset)
    shutil.copytree(worlds / "changed", tmp_path / "changed")
    words = ["--data", "tiny", *TINY, "--optimizer.schedule", "constant", "--steps", "20", "--json"]
    assert main(["train", "--output", str(tmp_path / "changed"), "--resume", *words]) == 0
    assert main(["train", "--output", str(tmp_path / "alone"), *words]) == 0
    expected, found = losses(tmp_path / "alone"), losses(tmp_path / "changed")
    assert [step for step, _ in found] == [step for step, _ in expected] == [1, 10, 20]
    for (_, wanted), (_, got) in zip(expected, found, strict=True):
        assert got == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("indivisible", "tasks: 3 tasks of a step cannot be shared evenly by 2 processes"),
        ("diverged", "training diverged: the loss is"),
        ("exists", "already holds a run; go on with --resume"),
    ],
)
def test_mistakes_end_all_processes_and_the_first_alone_names_them(
    worlds: Path, mistake: str, named: str
) -> None:
    first, second = (one[mistake] for one in told(worlds, 2))
    assert (first["code"], second["code"]) == (2, 2)
    assert named in first["said"]
    assert second["said"] == ""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_job_and_its_last_state_resumes(
    killed: int, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    words = ["--output", str(output), *TINY, "--optimizer.schedule", "constant", "--steps"]
    processes = start(2, "-m", "vsm", "train", *words, "100000")
    wait_for(output / "resume.safetensors", processes)
    processes[killed].kill()
    code, said = finish(processes)[1 - killed]
    assert code == 1
    assert "vsm train: a process of this job was lost at step" in said
    assert f"go on with: vsm train --output {output} --resume" in said
    assert "Traceback" not in said
    saved = saved_step(output)
    assert main(["train", *words, str(saved + 2), "--resume", "--json"]) == 0
    assert saved_step(output) == saved + 2


def test_torchrun_trains_and_forwards_a_request_to_stop(tmp_path: Path) -> None:
    output = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "vsm", "train", "--output", str(output), "--steps", "100000", *TINY]
    torchrun = run({}, *launcher, *words)
    wait_for(output / "resume.safetensors", [torchrun])
    torchrun.send_signal(signal.SIGTERM)
    [(code, said)] = finish([torchrun])
    assert code != 0
    assert said.count("vsm train: stopped and saved at step") == 1
    assert f"saved at step {saved_step(output)} of 100000" in said
