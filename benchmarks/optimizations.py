"""What each optimization gains: the same work with one of them undone, beside the work as it is.

Each runs in a process of its own, undone from outside, and takes turns with an unchanged one. All
but a step for each task compute the same numbers. Prints the table and writes optimizations.md.

    python -m benchmarks.optimizations
    python -m benchmarks.optimizations --image-size 32 --only channels_last allocator
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import run
from vsm.backbones import BACKBONES, Conv4
from vsm.benchmarking import worker
from vsm.benchmarking.processes import Worker
from vsm.benchmarking.timing import interleaved, quartiles, ratios
from vsm.benchmarking.workloads import EvaluationWorkload, StepWorkload
from vsm.cli.output import progress_bar
from vsm.data import EpisodeSampler
from vsm.errors import SettingsError
from vsm.evaluation.evaluator import Embedder, embed_images
from vsm.experiments.document import Block, Heading, Table, Text, to_markdown, write_markdown
from vsm.model import FewShotModel
from vsm.nn.networks import MemoryConditionedNetwork
from vsm.probability import DiagonalGaussian, GaussianMixture
from vsm.runs.checkpoints import TrainingState
from vsm.seeding import Randomness
from vsm.training import training_step

FOLDER = Path(__file__).parent


class ChannelsFirstConv4(Conv4):
    """Conv4 in torch's default layout."""

    def __init__(
        self, image_shape: tuple[int, int, int], channels: int = 64, keep_probability: float = 1.0
    ) -> None:
        super().__init__(image_shape, channels, keep_probability)
        for parameter in self.parameters():  # a copy: see vsm.benchmarking.reference.channels_first
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Embed images ``[B, C, H, W]`` without dropout: ``[B, D]``."""
        del random
        hidden = images.clone(memory_format=torch.contiguous_format)
        for block in self.blocks:
            hidden = F.relu(F.max_pool2d(block(hidden), 2, ceil_mode=self.pool_rounds_up))
        return hidden.flatten(1)


class RectifyingFirstConv4(Conv4):
    """Conv4 with ReLU before pooling, as the paper's table has it."""

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Embed images ``[B, C, H, W]`` without dropout: ``[B, D]``."""
        del random
        hidden = images.contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            hidden = F.max_pool2d(F.relu(block(hidden)), 2, ceil_mode=self.pool_rounds_up)
        return hidden.flatten(1)


def one_task_at_a_time(
    model: FewShotModel,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    class_ids: Tensor,
    state: TrainingState,
) -> dict[str, float]:
    """Take a training step for each task of the batch."""
    for task in range(len(inputs)):
        one = slice(task, task + 1)
        measured = training_step(model, optimizer, inputs[one], class_ids[one], state)
    return measured


def concatenated_first_layer(
    self: MemoryConditionedNetwork, memory_samples: Tensor, support_mean: Tensor
) -> DiagonalGaussian:
    """φ on [m, h̄], with h̄ repeated for every sample of m."""
    weight = torch.cat([self.first_memory.weight, self.first_support.weight], -1)
    support = support_mean.unsqueeze(-2)
    joined = torch.cat([memory_samples, support.expand_as(memory_samples)], -1)
    first_layer = F.linear(joined, weight, self.first_support.bias)
    gaussian: DiagonalGaussian = self.head(first_layer, support)
    return gaussian


def broadcast_bound(posterior: GaussianMixture, prior: DiagonalGaussian) -> Tensor:
    """Mean over the components of their KL from every query's prior, one by one."""
    components = posterior.components.unsqueeze(-2)  # [T, N, C, 1, D]
    return components.kl(prior.unsqueeze(-3)).mean(-2)  # [T, N, C, Q] → [T, N, Q]


def embedding_every_episode(model: FewShotModel, sampler: EpisodeSampler) -> Embedder:
    """Embed the images of each episode when it comes."""

    def embed(image_ids: Tensor) -> Tensor:
        return torch.stack(
            [
                embed_images(model, sampler.dataset, one.flatten()).unflatten(0, one.shape)
                for one in image_ids
            ]
        )

    return embed


@dataclass(frozen=True)
class Undoing:
    """How to do without one optimization.

    Attributes:
        title: what is done instead.
        patch: undoes it while the block lasts.
        keep_allocations: whether the process sets its allocator.
        work: ``step`` or ``evaluation``.
    """

    title: str
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    keep_allocations: bool = True
    work: str = "step"


OPTIMIZATIONS: dict[str, Undoing] = {
    "allocator": Undoing("default allocator", keep_allocations=False),
    "channels_last": Undoing(
        "NCHW instead of channels-last",
        lambda: mock.patch.dict(BACKBONES, conv4=ChannelsFirstConv4),
    ),
    "pooling_first": Undoing(
        "ReLU before pooling", lambda: mock.patch.dict(BACKBONES, conv4=RectifyingFirstConv4)
    ),
    "tasks_together": Undoing(
        "a step for each task instead of one for all",
        lambda: mock.patch("vsm.benchmarking.step.training_step", one_task_at_a_time),
    ),
    "split_first_layer": Undoing(
        "first layer of φ on the concatenation",
        lambda: mock.patch.object(MemoryConditionedNetwork, "forward", concatenated_first_layer),
    ),
    "moments": Undoing(
        "bound on KL_z by broadcasting components × queries",
        lambda: mock.patch("vsm.objective.prototype_kl_bound", broadcast_bound),
    ),
    "cached_features": Undoing(
        "evaluation that embeds every episode anew",
        lambda: mock.patch("vsm.evaluation.evaluator.cached_embedder", embedding_every_episode),
        work="evaluation",
    ),
}


def measure(name: str, image_size: int, pairs: dict[str, int], threads: int | None) -> list[str]:
    """Return one row of the table: times as it is and undone, and their ratio."""
    undoing = OPTIMIZATIONS[name]
    command = (sys.executable, "-m", "benchmarks.optimizations", "--worker", name)
    workload = StepWorkload(image_size) if undoing.work == "step" else EvaluationWorkload()
    parameters: dict[str, Any] = asdict(workload)
    if undoing.work == "step":
        parameters["method"] = "vsm"
    with (
        Worker(True, threads) as unchanged,
        Worker(undoing.keep_allocations, threads, command) as changed,
    ):
        works = {
            "as it is": unchanged.prepare(undoing.work, **parameters),
            "undone": changed.prepare(undoing.work, **parameters),
        }
        rounds = pairs[undoing.work]
        with progress_bar(undoing.title, rounds, quiet=False) as bar:
            warm_up = 2 if undoing.work == "step" else 0
            times = interleaved(works, rounds, warm_up, progress=bar)
    cells = {key: quartiles(values).times(1000) for key, values in times.items()}
    ratio = quartiles(ratios(times["undone"], times["as it is"]))
    return [
        undoing.title,
        undoing.work,
        *(cells[key].describe(0) for key in ("as it is", "undone")),
        ratio.describe(),
        str(ratio.count),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--image-size", type=int, choices=(28, 32, 84), default=28)
    parser.add_argument("--pairs", type=int, default=15, help="turns of a training step")
    parser.add_argument("--evaluation-pairs", type=int, default=3, help="turns of an evaluation")
    parser.add_argument("--threads", type=int, help="of torch; unset: its own choice")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=", ".join(OPTIMIZATIONS))
    parser.add_argument("--output", type=Path, default=FOLDER / "optimizations.md")
    parser.add_argument("--worker", choices=OPTIMIZATIONS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        with OPTIMIZATIONS[chosen.worker].patch():
            worker.main()
    for name in chosen.only or ():
        if name not in OPTIMIZATIONS:
            raise SettingsError(f"only: expected one of {', '.join(OPTIMIZATIONS)}, got {name!r}")
    pairs = {"step": chosen.pairs, "evaluation": chosen.evaluation_pairs}
    rows = [
        measure(name, chosen.image_size, pairs, chosen.threads)
        for name in chosen.only or OPTIMIZATIONS
    ]
    columns = ["undone", "work", "as it is, ms", "undone, ms", "undone ÷ as it is", "pairs"]
    size = f"{chosen.image_size}×{chosen.image_size}"
    introduction = Text(f"Steps of VSM on {size} images; medians (quartiles).")
    page: list[Block] = [
        Heading(1, "What each optimization gains"),
        introduction,
        Table(columns, rows),
    ]
    write_markdown(chosen.output, page)
    print(to_markdown(page))


if __name__ == "__main__":
    sys.exit(run(main))
