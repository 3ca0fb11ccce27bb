"""What each process of ``tests/test_distributed.py`` does: train a little and write what it holds.

    RANK=0 WORLD_SIZE=2 ... python tests/distributed_worker.py FOLDER

Models are compared in double precision, where sums in another order agree to many digits. All is
done in one go, because it takes a process longer to start than to do it.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import vsm.training
from launching_helpers import TINY
from run_helpers import signal_at, train_run
from tiny import make_dataset, make_settings, variant
from vsm.cli import main
from vsm.data import EpisodeSampler
from vsm.data.dataset import Augmentation
from vsm.model import FewShotModel
from vsm.nn.batch_norm import SynchronizedBatchNorm, synchronize_batch_norm
from vsm.runs.checkpoints import TrainingState
from vsm.seeding import generator
from vsm.settings import (
    MemorySettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    RunSettings,
    SamplingSettings,
)
from vsm.system.distributed import Processes, join_processes
from vsm.system.interruption import Interrupted
from vsm.training import build_optimizer, load_inputs, training_step

NUM_STEPS = 5
CONSTANT = ("--optimizer.schedule", "constant")
BASE = replace(make_settings(), tasks=4, steps=NUM_STEPS)
BY_BAYES_RULE = SamplingSettings(train_prototypes=4, evaluation_prototypes=4)
SCENARIOS: dict[str, RunSettings] = {
    "attention": variant(BASE, model=replace(BASE.model, residual=False, keep_probability=0.8)),
    "mixture": variant(
        BASE,
        memory=MemorySettings(update="mean", recall="mixture", mask="own", capacity=8),
        objective=ObjectiveSettings(kl="monte_carlo"),
    ),
    "resnet12": variant(
        BASE,
        method="rote",
        model=ModelSettings(backbone="resnet12", channels=2, hidden_units=8, keep_probability=0.9),
        sampling=BY_BAYES_RULE,
    ),
    "mann": variant(BASE, method="mann"),
    "kanerva": variant(BASE, method="kanerva"),
    "protonet": variant(BASE, method="protonet", optimizer=OptimizerSettings(clip_norm=0.1)),
    "unsynchronized": variant(
        BASE,
        model=ModelSettings(channels=4, hidden_units=8, synchronize_batch_norm=False),
        sampling=BY_BAYES_RULE,
    ),
}


def trained(settings: RunSettings, processes: Processes) -> dict[str, Tensor]:
    """Train a few steps on augmented images; return the losses and all that training changed."""
    dataset = replace(make_dataset(), augmentation=Augmentation(2, 0.5))
    sampler = EpisodeSampler(dataset, "train", settings.way, settings.shot, settings.queries)
    model = FewShotModel(settings, dataset.image_shape)
    if settings.model.synchronize_batch_norm:
        synchronize_batch_norm(model, processes)
    optimizer = build_optimizer(model, settings.optimizer)
    state = TrainingState(0, model.empty_memory(), None)
    tasks = processes.share(settings.tasks)
    losses = []
    for state.step in range(1, NUM_STEPS + 1):
        batch = sampler.draw(settings.tasks, generator(0, "episodes", state.step)).part(tasks)
        inputs = load_inputs(dataset, batch, settings, state.step, tasks)
        measured = training_step(model, optimizer, inputs, batch.class_ids, state, processes)
        losses.append([measured["loss"], measured["gradient_norm"]])
    held = {f"model.{name}": value for name, value in model.state_dict().items()}
    if state.memory is not None and state.pending is not None:
        held |= {f"memory.{name}": value for name, value in state.memory.tensors().items()}
        held |= {"pending.features": state.pending.features}
        held |= {"pending.class_ids": state.pending.class_ids}
    return {"losses": torch.tensor(losses, dtype=torch.float64), **held}


def normalized(kind: torch.dtype, processes: Processes) -> dict[str, Tensor]:
    """Batch norm of this process's share of a batch, forth and back; see ``whole_batch``."""
    plain, images, gradient = whole_batch(kind)
    layer = SynchronizedBatchNorm(plain, processes) if processes.count > 1 else plain
    own = processes.share(len(images))
    share = images[own.start : own.stop].clone().requires_grad_()
    output = layer(share)
    variables = [share, layer.weight, layer.bias]
    gradients = torch.autograd.grad(output, variables, gradient[own.start : own.stop])
    layer.eval()
    return {
        "output": output,
        "images.grad": gradients[0],
        "weight.grad": processes.all_reduce(gradients[1]),
        "bias.grad": processes.all_reduce(gradients[2]),
        "evaluated": layer(share),
        **layer.state_dict(),
    }


def whole_batch(kind: torch.dtype) -> tuple[nn.BatchNorm2d, Tensor, Tensor]:
    """A layer that has seen something, images whose shares differ much, and a gradient."""
    random = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(3, momentum=0.3)
    nn.init.uniform_(layer.weight, 0.5, 2.0, generator=random)
    nn.init.normal_(layer.bias, generator=random)
    for name, buffer in layer.named_buffers():
        if name == "running_var":
            nn.init.uniform_(buffer, 0.5, 2.0, generator=random)
    shape = (6, 3, 5, 4)
    images = 3 * torch.randn(shape, generator=random) + torch.arange(6.0).view(6, 1, 1, 1)
    gradient = torch.randn(shape, generator=random)
    layout = torch.channels_last
    images, gradient = (t.to(kind).contiguous(memory_format=layout) for t in (images, gradient))
    return layer, images, gradient


def normalized_rows(processes: Processes) -> dict[str, Tensor]:
    """The same of rows ``[B, C]``, through the conversion of a whole network."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 3, generator=random)
    network = nn.Sequential(nn.BatchNorm1d(3))
    synchronize_batch_norm(network, processes)
    own = processes.share(len(rows))
    share = rows[own.start : own.stop].clone().requires_grad_()
    output = network(share)
    [gradient] = torch.autograd.grad(output.square().sum() + output[:, 0].exp().sum(), [share])
    return {"output": output, "gradient": gradient, **network.state_dict()}


def agreed(processes: Processes) -> dict[str, Tensor]:
    """One call of every way to agree."""
    rank = processes.rank
    own = torch.tensor([[rank, 10.0]])
    first, second = torch.full((2, 3), float(rank)).T, torch.full((2,), 4.0 * rank)
    processes.average([first, second])
    from_zero = torch.full((2, 2), float(rank)).T
    processes.broadcast([from_zero])
    return {
        "total": processes.all_reduce(own),
        "gathered": processes.all_gather(own),
        "average of the first": first,
        "average of the second": second,
        "broadcast": from_zero,
        "largest": torch.tensor(processes.all_reduce_max(3 * rank)),
        "from first": torch.tensor(processes.broadcast_value(0.1 + rank)),
    }


def stopped_and_resumed(folder: Path, processes: Processes) -> dict[str, Any]:
    """Train a run as a whole, and another one in two parts; the first process is signalled."""
    settings = make_settings()
    train_run(settings, folder / f"whole{processes.count}", processes=processes)
    parts = folder / f"parts{processes.count}"
    message = ""
    try:
        train_run(settings, parts, progress=signal_at(3, signal.SIGTERM), processes=processes)
    except Interrupted as stopped:
        message = f"{stopped.exit_code} {stopped}"
    train_run(settings, parts, resume=True, processes=processes)
    return {"stopped": message}


def commanded(*words: str | Path) -> dict[str, Any]:
    """``vsm train`` on tiny data: its exit code and what it said."""
    if "SPARE_PORTS" in os.environ:
        os.environ["MASTER_PORT"], _, os.environ["SPARE_PORTS"] = os.environ[
            "SPARE_PORTS"
        ].partition(" ")
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        code = main(["train", "--data", "tiny", *map(str, words), "--json"])
    return {"code": code, "said": said.getvalue()}


def commands(folder: Path, count: int) -> dict[str, Any]:
    """Mistakes, and a run that goes on with whatever number of processes there is."""
    changed: list[str | Path] = ["--output", folder / "changed", "--resume", *TINY, *CONSTANT]
    mistakes: list[str | Path] = ["--output", folder / f"mistakes{count}", "--steps", "20", *TINY]
    return {
        "went on": commanded(*changed, "--steps", {1: "5", 2: "10"}[count]),
        "indivisible": commanded(*mistakes, "--tasks", "3"),
        "diverged": commanded(*mistakes, "--tasks", "2", "--optimizer.learning-rate", "1e30"),
        "exists": commanded("--output", folder / "whole1", *TINY),
    }


@contextmanager
def default_dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def write(folder: Path, processes: Processes) -> None:
    """Compute all that needs one job."""

    def record(name: str, kind: torch.dtype, work: Callable[[], dict[str, Tensor]]) -> None:
        with default_dtype(kind):
            results = {key: value.detach().clone().contiguous() for key, value in work().items()}
        save_file(results, folder / f"{name}-{processes.rank}of{processes.count}.safetensors")

    record("agreed", torch.float64, partial(agreed, processes))
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        default = torch.promote_types(kind, torch.float32)
        record(f"batch_norm {kind}", default, partial(normalized, kind, processes))
    record("rows", torch.float64, partial(normalized_rows, processes))
    for name, settings in SCENARIOS.items():
        record(name, torch.float64, partial(trained, settings, processes))
    record("single precision", torch.float32, partial(trained, SCENARIOS["attention"], processes))


def work(folder: Path) -> None:
    """Write what this process holds, and what it was told."""
    with join_processes(torch.device("cpu")) as processes:
        write(folder, processes)
        told = stopped_and_resumed(folder, processes)
    told |= commands(folder, processes.count)  # each joins the others by itself
    place = folder / f"told-{processes.rank}of{processes.count}.json"
    place.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    vars(vsm.training)["open_dataset"] = lambda name: make_dataset()
    work(Path(sys.argv[1]))
