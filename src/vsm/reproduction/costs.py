"""How long jobs will take: stored costs of their parts, times how fast this machine is.

The costs in costs.json were printed by ``benchmarks/reproduction_costs.py``. The factor of a
machine is that of the jobs it has finished, or else of one short measurement. All this is rough,
for people who wonder whether to wait for minutes, hours or days.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vsm.backbones import BACKBONES
from vsm.reproduction.jobs import Job, pretrain_settings, run_settings
from vsm.reproduction.store import JobStore
from vsm.seeding import default_generator, generator
from vsm.settings import RunSettings

COSTS = Path(__file__).with_name("costs.json")
FORWARD_SHARE = 1 / 3  # of a forward and backward pass
FULL_WIDTH = 64
DATA_SIZES: dict[str, tuple[int, dict[str, int]]] = {
    "glyphs": (28, {"train": 13_000, "validation": 3_000, "test": 5_000}),
    "omniglot": (28, {"train": 88_000, "validation": 8_000, "test": 33_840}),
    "cifar-fs": (32, {"train": 38_400, "validation": 9_600, "test": 12_000}),
    "mini-imagenet": (84, {"train": 38_400, "validation": 9_600, "test": 12_000}),
    "tiered-imagenet": (84, {"train": 448_695, "validation": 124_261, "test": 206_209}),
}
"""Side and number of images by split; other data is taken to be like miniImageNet."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Forecast:
    """How long a list of jobs will take.

    Attributes:
        seconds: of all jobs, one after another.
        basis: what the estimate rests on, for people.
    """

    seconds: float
    basis: str

    def describe(self, at_once: int) -> str:
        """Say it in words, if ``at_once`` jobs run side by side on cores of their own."""
        return f"about {duration(self.seconds / at_once)} ({self.basis})"


def forecast(jobs: Sequence[Job], store: JobStore) -> Forecast:
    """Estimate how long the jobs that are not done will take on this machine."""
    finished = [job for job in jobs if store.is_done(job)]
    waiting = [job for job in jobs if not store.is_done(job)]
    needed = sum(_remaining(job, store) for job in waiting)
    known = [seconds / reference_seconds(job) for job, seconds in _timed(finished, store)]
    if known:
        factor = statistics.median(known)
        basis = f"by {len(known)} finished job{'s' * (len(known) != 1)} here"
    else:
        factor = time_reference() / _costs()["reference_seconds"]
        basis = "a guess: stored costs of a step, scaled by a short measurement of this machine"
    return Forecast(factor * needed, basis)


def _timed(jobs: Sequence[Job], store: JobStore) -> list[tuple[Job, float]]:
    """Return the trainings that were done in one go, and what they took."""
    taken = [(job, store.result(job)) for job in jobs if job.kind == "train"]
    return [(job, found["seconds"]) for job, found in taken if found and found["seconds"]]


def _remaining(job: Job, store: JobStore) -> float:
    """Return the reference seconds of what is left of a job."""
    seconds = reference_seconds(job)
    if job.kind != "train":
        return seconds
    return seconds * (1 - min(1.0, store.progress(job) / run_settings(job).steps))


def reference_seconds(job: Job) -> float:
    """Return what a job takes on the machine of the stored costs."""
    return {"pretrain": _pretraining, "train": _training, "evaluate": _evaluation}[job.kind](job)


def _training(job: Job) -> float:
    settings = run_settings(job)
    side, counts = _size(settings.data)
    image = _image_seconds(settings.model.backbone, settings.model.channels, side)
    encoded = 0.0
    if settings.freeze_backbone:  # every image is encoded once, and none in a step
        encoded = FORWARD_SHARE * image * (counts["train"] + counts["validation"])
        image = 0.0
    images = settings.tasks * settings.way * (settings.shot + settings.queries)
    head = settings.tasks * _head_seconds(settings, settings.queries, training=True)
    step: float = _costs()["seconds_per_step"] + images * image + head
    validations = -(-settings.steps // settings.validation.every)
    validation = _measuring(
        settings, image, counts["validation"], settings.validation.episodes, settings.queries
    )
    return encoded + settings.steps * step + validations * validation


def _evaluation(job: Job) -> float:
    if job.after is None:
        raise ValueError("job: a measurement needs a training run")
    settings, protocol = run_settings(job.after), job.recipe["protocol"]
    side, counts = _size(settings.data)
    image = _image_seconds(settings.model.backbone, settings.model.channels, side)
    return _measuring(settings, image, counts["test"], protocol["episodes"], protocol["queries"])


def _measuring(
    settings: RunSettings, image: float, images: int, episodes: int, queries: int
) -> float:
    head = _head_seconds(settings, queries, training=False)
    return FORWARD_SHARE * (images * image + episodes * head)


def _pretraining(job: Job) -> float:
    settings = pretrain_settings(job)
    side, counts = _size(settings.data)
    image = _image_seconds(settings.backbone, settings.channels, side)
    validations = -(-settings.epochs // settings.validation.every)
    seen = settings.epochs * counts["train"]
    return image * (seen + FORWARD_SHARE * validations * counts["validation"])


def _image_seconds(backbone: str, channels: int, side: int) -> float:
    """Forward and backward of one image; widths that were not measured scale as their square."""
    measured = _costs()["seconds_per_megapixel"]
    exact = measured.get(f"{backbone}-{channels}")
    scaled = measured[f"{backbone}-{FULL_WIDTH}"] * (channels / FULL_WIDTH) ** 2
    return float(exact or scaled) * side**2 / 1e6


def _head_seconds(settings: RunSettings, queries: int, training: bool) -> float:
    """All that comes after the features, of one task."""
    if settings.method == "protonet":
        return 0.0
    costs = _costs()
    sampling = settings.sampling
    draws = settings.uses_memory and settings.inference == "network"
    drawn = settings.way * (sampling.num_memories(training) if draws else 1)
    prototypes = sampling.train_prototypes if training else sampling.evaluation_prototypes
    compared = settings.way * settings.way * queries * prototypes
    seconds = drawn * costs["seconds_per_memory"] + compared * costs["seconds_per_distance"]
    return float(seconds)


def _size(data: str) -> tuple[int, dict[str, int]]:
    return DATA_SIZES.get(data, DATA_SIZES["mini-imagenet"])


@cache
def _costs() -> dict[str, Any]:
    costs: dict[str, Any] = json.loads(COSTS.read_text(encoding="utf-8"))
    return costs


def time_reference(clock: Clock = time.perf_counter) -> float:
    """Time the piece of work that machines are compared by: a narrow network on 64 images."""
    return time_backbone("conv4", 32, side=28, images=64, repeats=5, clock=clock)


def time_backbone(
    backbone: str,
    channels: int,
    side: int,
    images: int,
    repeats: int,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the seconds of the quickest of ``repeats`` forward and backward passes."""
    with default_generator(0, "costs"):
        network = BACKBONES[backbone]((3, side, side), channels, 1.0)
    pixels = torch.randn(images, 3, side, side, generator=generator(0, "costs"))
    return quickest(lambda: network(pixels, None).sum().backward(), repeats, clock)


def quickest(work: Callable[[], Any], repeats: int, clock: Clock = time.perf_counter) -> float:
    """Return the least time that ``work`` took, after one try that does not count."""
    taken = []
    for _ in range(repeats + 1):
        started = clock()
        work()
        taken.append(clock() - started)
    return min(taken[1:])


def duration(seconds: float) -> str:
    """Say a time span in the unit people would use."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}s"
    count = max(1, round(seconds))
    return f"{count} second{'s' * (count != 1)}"
