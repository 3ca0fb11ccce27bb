"""What loading data costs, as a share of a training step, and how much memory it takes.

One batch is 8 tasks of 5 classes with 1 support and 15 query images each, as in the paper. Loading
is: draw the episodes, load their images, augment, normalize. The step is a training step of
ProtoNet, the cheapest method, on such a batch (it loads its own too, without augmentation). The two
take turns, so that whatever else the machine does falls on both; ratios are taken pair by pair.

    python -m benchmarks.data omniglot cifar-fs
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import run
from vsm.benchmarking.timing import interleaved, quartiles, ratios, timed
from vsm.cli.output import print_table
from vsm.data import EpisodeSampler, ImageDataset, open_images
from vsm.model import FewShotModel
from vsm.runs.checkpoints import TrainingState
from vsm.seeding import generator
from vsm.settings import RunSettings
from vsm.system.allocator import keep_allocations
from vsm.training import build_optimizer, load_inputs, training_step

TASKS, WAY, SHOT, QUERIES = 8, 5, 1, 15
PARTS = ("draw", "load", "augment", "normalize")


class Loading:
    """Loads one batch after another, and notes what each part took."""

    def __init__(self, dataset: ImageDataset) -> None:
        self._dataset = dataset
        self._sampler = EpisodeSampler(dataset, "train", WAY, SHOT, QUERIES)
        self._steps = 0
        self.seconds: dict[str, list[float]] = {}

    def __call__(self) -> torch.Tensor:
        """Return one training batch ``[T * N * (K + Q), C, H, W]``."""
        random = generator(0, "batch", self._steps)
        self._steps += 1
        marks = [time.perf_counter()]
        image_ids = self._sampler.draw(TASKS, random).image_ids
        marks.append(time.perf_counter())
        pixels = self._dataset.load(image_ids).flatten(0, 2)
        marks.append(time.perf_counter())
        varied = self._dataset.augment(pixels, random)
        marks.append(time.perf_counter())
        batch = self._dataset.normalize(varied)
        marks.append(time.perf_counter())
        for part, seconds in zip(PARTS, np.diff(marks).tolist(), strict=True):
            self.seconds.setdefault(part, []).append(seconds)
        return batch


class Stepping:
    """Takes one training step after another."""

    def __init__(self, dataset: ImageDataset, name: str) -> None:
        self._settings = RunSettings(data=name, method="protonet", augment=False)
        self._dataset = dataset
        self._sampler = EpisodeSampler(dataset, "train", WAY, SHOT, QUERIES)
        self._model = FewShotModel(self._settings, dataset.image_shape)
        self._optimizer = build_optimizer(self._model, self._settings.optimizer)
        self._state = TrainingState(0, None, None)

    def __call__(self) -> dict[str, float]:
        """Take a step, and return what it measured."""
        batch = self._sampler.draw(TASKS, generator(0, "step", self._state.step))
        inputs = load_inputs(self._dataset, batch, self._settings, self._state.step)
        self._state.step += 1
        return training_step(self._model, self._optimizer, inputs, batch.class_ids, self._state)


def measure(name: str, rounds: int) -> None:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    dataset = open_images(name)
    np.add.reduce(dataset.images, axis=None, dtype=np.int64)  # touch every page, as an epoch would
    load = Loading(dataset)
    for _ in range(rounds):
        load()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
    load.seconds.clear()
    works = {"load": timed(load), "step": timed(Stepping(dataset, name))}
    times = interleaved(works, rounds)
    share = quartiles(ratios(times["load"], times["step"])).times(100)
    parts = {"step": times["step"], **load.seconds}
    stored = dataset.images.nbytes
    print_table(
        f"{name}: medians (quartiles) of {rounds}",
        ["", ""],
        [
            ["loading ÷ step, %", share.describe()],
            *([f"{part}, ms", quartiles(s).times(1000).describe()] for part, s in parts.items()),
            ["peak memory ÷ prepared file", f"{peak / stored:.2f} of {stored / 2**20:.0f} MiB"],
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = "prepared datasets; one per process for exact memory"
    parser.add_argument("names", nargs="+", help=names)
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    keep_allocations()
    for name in chosen.names:
        measure(name, chosen.steps)


if __name__ == "__main__":
    sys.exit(run(main))
