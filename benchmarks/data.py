"""What feeding a training step costs, as a share of the step, and how much memory it takes.

One batch is 8 tasks of 5 classes with 1 support and 15 query images each, as in the paper. Feeding
is: draw the episodes, load their images, augment, normalize. The step is a whole training step of
ProtoNet, the cheapest method, on such a batch (it feeds itself too, without augmentation). The two
alternate, so that whatever else the machine does falls on both; the ratio is taken pair by pair.
Medians with quartiles.

    python benchmarks/data.py omniglot cifar-fs
"""

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from vsm.benchmarking.timing import ratios, spread
from vsm.data import EpisodeSampler, ImageDataset, open_images
from vsm.model import FewShotModel
from vsm.runs.trained_model import TrainingState
from vsm.seeding import generator
from vsm.settings import RunSettings
from vsm.system.allocator import keep_allocations
from vsm.training import build_optimizer, load_inputs, training_step

TASKS, WAY, SHOT, QUERIES = 8, 5, 1, 15
WARM_UP = 2  # steps that do not count


def feed(
    dataset: ImageDataset, sampler: EpisodeSampler, step: int, seconds: dict[str, list[float]]
) -> Tensor:
    """Return one training batch ``[T * N * (K + Q), C, H, W]`` and note what each part took."""
    random = generator(0, "batch", step)
    marks = [time.perf_counter()]

    def timed(part: str, work: Callable[[], Tensor]) -> Tensor:
        made = work()
        marks.append(time.perf_counter())
        seconds.setdefault(part, []).append(marks[-1] - marks[-2])
        return made

    image_ids = timed("draw", lambda: sampler.draw(TASKS, random).image_ids)
    pixels = timed("load", lambda: dataset.load(image_ids).flatten(0, 2))
    varied = timed("augment", lambda: dataset.augment(pixels, random))
    return timed("normalize", lambda: dataset.normalize(varied))


def measure(name: str, num_steps: int) -> None:
    resident = resident_bytes()
    dataset = open_images(name)
    sampler = EpisodeSampler(dataset, "train", WAY, SHOT, QUERIES)
    parts: dict[str, list[float]] = {}
    np.add.reduce(dataset.images, axis=None, dtype=np.int64)  # touch every page, as an epoch would
    for step in range(num_steps):
        feed(dataset, sampler, step, parts)
    peak = peak_bytes() - resident
    settings = RunSettings(data=name, method="protonet", augment=False)
    model = FewShotModel(settings, dataset.image_shape)
    optimizer = build_optimizer(model, settings.optimizer)
    parts.clear()
    feeding, stepping = [], []
    for step in range(num_steps):
        start = time.perf_counter()
        feed(dataset, sampler, step, parts)
        fed = time.perf_counter()
        batch = sampler.draw(TASKS, generator(0, "step", step))
        inputs = load_inputs(dataset, batch, settings, step)
        training_step(
            model, optimizer, inputs, batch.class_ids, TrainingState(step + 1, None, None)
        )
        feeding.append(fed - start)
        stepping.append(time.perf_counter() - fed)
    shares = spread(ratios(feeding[WARM_UP:], stepping[WARM_UP:])).times(100)
    print(f"{name}: feeding / step    {shares.describe()} %")
    print(f"{name}: step              {milliseconds(stepping)}")
    for part, seconds in parts.items():
        print(f"{name}: {part:<17} {milliseconds(seconds)}")
    print(
        f"{name}: peak memory / prepared file  {peak / dataset.images.nbytes:.2f} "
        f"({peak / 2**20:.0f} of {dataset.images.nbytes / 2**20:.0f} MiB)"
    )


def milliseconds(seconds: list[float]) -> str:
    return f"{spread(seconds[WARM_UP:]).times(1000).describe()} ms"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "names", nargs="+", help="prepared datasets; one a process for exact memory"
    )
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    keep_allocations()
    for dataset_name in chosen.names:
        measure(dataset_name, chosen.steps)
