"""What each process of ``tests/test_distributed.py`` does: train a little and write what it holds.

    RANK=0 WORLD_SIZE=2 ... python tests/distributed_worker.py FOLDER

Almost all is computed in double precision, where sums in another order agree to many digits.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tiny import make_dataset, make_settings
from vsm.batch_norm import SynchronisedBatchNorm2d, synchronise_batch_norm
from vsm.data import EpisodeSampler
from vsm.data.augmentation import Augmentation
from vsm.distributed import Processes, joined_processes
from vsm.memory import Memory
from vsm.model import FewShotModel
from vsm.runs import TrainingState
from vsm.seeding import generator
from vsm.settings import (
    MemorySettings,
    ModelSettings,
    ObjectiveSettings,
    OptimiserSettings,
    RunSettings,
)
from vsm.training import build_optimiser, load_inputs, training_step

NUM_STEPS = 5
BASE = replace(make_settings(), tasks=4, steps=NUM_STEPS)
SCENARIOS: dict[str, RunSettings] = {
    "attention": replace(
        BASE, model=ModelSettings(channels=4, hidden_units=8, residual=False, keep_probability=0.8)
    ),
    "mixture": replace(
        BASE,
        memory=MemorySettings(update="mean", recall="mixture", mask="own", capacity=8),
        objective=ObjectiveSettings(kl="monte_carlo"),
    ),
    "resnet12": replace(
        BASE,
        method="rote",
        model=ModelSettings(backbone="resnet12", channels=2, hidden_units=8, keep_probability=0.9),
    ),
    "protonet": replace(BASE, method="protonet", optimiser=OptimiserSettings(clip_norm=0.1)),
    "unsynchronised": replace(
        BASE, model=ModelSettings(channels=4, hidden_units=8, synchronise_batch_norm=False)
    ),
}


def trained(settings: RunSettings, processes: Processes) -> dict[str, Tensor]:
    """Train a few steps on augmented images; return the losses and all that training changed."""
    dataset = replace(make_dataset(), augmentation=Augmentation(2, 0.5))
    sampler = EpisodeSampler(dataset, "train", settings.way, settings.shot, settings.queries)
    model = FewShotModel(settings, dataset.image_shape)
    if settings.model.synchronise_batch_norm:
        synchronise_batch_norm(model, processes)
    optimiser = build_optimiser(model, settings.optimiser)
    memory = Memory.empty(model.num_features) if settings.uses_memory else None
    state = TrainingState(0, memory, None)
    tasks = processes.share(settings.tasks)
    losses = []
    for state.step in range(1, NUM_STEPS + 1):
        batch = sampler.draw(settings.tasks, generator(0, "episodes", state.step)).part(tasks)
        inputs = load_inputs(dataset, batch, settings, state.step, tasks)
        measured = training_step(model, optimiser, inputs, batch.class_ids, state, processes)
        losses.append([measured["loss"], measured["gradient_norm"]])
    held = {f"model.{name}": value for name, value in model.state_dict().items()}
    if state.memory is not None and state.pending is not None:
        held |= {"memory.content": state.memory.content, "memory.counts": state.memory.counts}
        held |= {"memory.class_ids": state.memory.class_ids}
        held |= {"pending.features": state.pending.features}
        held |= {"pending.class_ids": state.pending.class_ids}
    return {"losses": torch.tensor(losses, dtype=torch.float64), **held}


def normalised(kind: torch.dtype, processes: Processes) -> dict[str, Tensor]:
    """Batch norm of this process's share of a batch, forth and back; see ``whole_batch``."""
    layer, images, gradient = whole_batch(kind)
    layer = SynchronisedBatchNorm2d(layer, processes) if processes.count > 1 else layer
    own = processes.share(len(images))
    share = images[own.start : own.stop].clone().requires_grad_()
    output = layer(share)
    output.backward(gradient[own.start : own.stop])
    layer.eval()
    return {
        "output": output,
        "images.grad": share.grad,
        "weight.grad": processes.total(layer.weight.grad),
        "bias.grad": processes.total(layer.bias.grad),
        "evaluated": layer(share),
        **layer.state_dict(),
    }


def whole_batch(kind: torch.dtype) -> tuple[nn.BatchNorm2d, Tensor, Tensor]:
    """A layer that has seen something, images whose shares differ much, and a gradient."""
    random = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(3, momentum=0.3)
    nn.init.uniform_(layer.weight, 0.5, 2.0, generator=random)
    nn.init.normal_(layer.bias, generator=random)
    nn.init.uniform_(layer.running_var, 0.5, 2.0, generator=random)
    shape = (6, 3, 5, 4)
    images = 3 * torch.randn(shape, generator=random) + torch.arange(6.0).view(6, 1, 1, 1)
    gradient = torch.randn(shape, generator=random)
    layout = torch.channels_last
    return layer, *(t.to(kind).contiguous(memory_format=layout) for t in (images, gradient))


def agreed(processes: Processes) -> dict[str, Tensor]:
    """One call of every way to agree."""
    rank = processes.rank
    own = torch.tensor([[rank, 10.0]])
    first, second = torch.full((2, 3), float(rank)).T, torch.full((2,), 4.0 * rank)
    processes.average([first, second])
    from_zero = torch.full((2, 2), float(rank)).T
    processes.equalise([from_zero])
    return {
        "total": processes.total(own),
        "gathered": processes.gather(own),
        "average of the first": first,
        "average of the second": second,
        "equalised": from_zero,
        "largest": torch.tensor(processes.largest(3 * rank)),
        "from first": torch.tensor(processes.from_first(0.1 + rank)),
    }


@contextmanager
def default_dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def main(folder: Path) -> None:
    with joined_processes(torch.device("cpu")) as processes:

        def record(name: str, kind: torch.dtype, work: Callable[[], dict[str, Tensor]]) -> None:
            with default_dtype(kind):
                results = {
                    key: value.detach().clone(memory_format=torch.contiguous_format)
                    for key, value in work().items()
                }
            save_file(results, folder / f"{name}-{processes.rank}of{processes.count}.safetensors")

        record("agreed", torch.float64, partial(agreed, processes))
        for kind in (torch.float64, torch.float32, torch.bfloat16):
            default = torch.promote_types(kind, torch.float32)
            record(f"batch_norm {kind}", default, partial(normalised, kind, processes))
        for name, settings in SCENARIOS.items():
            record(name, torch.float64, partial(trained, settings, processes))
        single = partial(trained, SCENARIOS["attention"], processes)
        record("single precision", torch.float32, single)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
