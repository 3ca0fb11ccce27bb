"""Which benchmarks are compared: the short comparison, the full suite, and its result page.

Times belong to one machine and one state of the code, so both are part of a job's name.

Nothing here imports torch: benchmarks run in separate processes, ours with the allocator as
``vsm train`` configures it and the reference with the default one.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsm.errors import SettingsError
from vsm.system.files import write_text
from vsm.system.interruption import Interrupted, StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm_lab.benchmarking.processes import Timed, Worker
from vsm_lab.document import Block, Heading, Table, Text, write_markdown
from vsm_lab.jobs import Job
from vsm_lab.provenance import measured_code

if TYPE_CHECKING:
    from vsm_lab.job_files import JobStore

Call = tuple[str, dict[str, Any]]
"""A function that sets up a benchmark, see :func:`.runner.find`, and keyword arguments."""
Times = Mapping[str, Sequence[float]]
"""Seconds of each benchmark, one value per round."""
IMAGE_SIZES, REFERENCE_IMAGE_SIZES = (28, 32, 84), (28, 32)
SMALL_ENCODERS = ("cifar-fs-vsm", "glyphs-5w1s", "omniglot-vsm")
LARGE_ENCODERS = ("cifar-fs-resnet12-vsm", "photos-vsm")
STEPS = ("vsm_step", "vsm_conjugate_step")
SLOTS = (100, 1_000, 10_000, 100_000)
WORST = (
    "evaluation_2k_vs_reference_600",
    "vsm_step_vs_reference_protonet",
    "classifying_vs_embedding",
    "explaining_vs_predicting",
    "using_together_vs_embedding",
)
"""Ratios whose largest median is also reported without suffix."""
TARGETS = {
    "vsm_step_vs_backbone_28": 1.35,
    "vsm_step_vs_backbone_32": 1.25,
    "vsm_step_vs_backbone_84": 1.10,
    "vsm_step_vs_reference_protonet": 0.60,
    "evaluation_2k_vs_reference_600": 1.00,
    "classifying_vs_embedding": 1.10,
    "explaining_vs_predicting": 1.10,
    "using_together_vs_embedding": 0.10,
}
REFERENCE_PROCESSES = 10
"""Processes that share the rounds of a reference step: how much memory glibc returns to the system
and requests again differs between processes."""


@dataclass(frozen=True)
class Sizes:
    """8 tasks of the paper, 5-way 1-shot with J = 150 and L = 100, and a memory of 512 classes.

    Images of 28×28 are gray, other sizes RGB.
    """

    way: int = 5
    shot: int = 1
    queries: int = 15
    tasks: int = 8
    image_size: int = 28
    channels: int = 64
    memory_samples: int = 150
    prototype_samples: int = 100
    remembered: int = 512

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""
        return (1 if self.image_size == 28 else 3), self.image_size, self.image_size


@dataclass(frozen=True)
class Group:
    """Benchmarks that are run alternately; ``ratios`` name two of them each."""

    title: str
    ours: Mapping[str, Call]  # share one process
    reference: Mapping[str, Call] = field(default_factory=dict)  # have a process each
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    suffix: str = ""  # of the names of times and ratios
    rounds: int = 20
    warm_up: int = 4  # rounds of ours that do not count; the reference has half as many
    processes: int = 1  # share the rounds of each reference benchmark
    threads: int | None = None  # of torch; None: torch's default

    def __post_init__(self) -> None:
        for name, value in (("repeats", self.rounds), ("threads", self.threads)):
            if value is not None and value < 1:
                raise SettingsError(f"{name}: must be at least 1, got {value}")

    def measure(
        self,
        seconds: float | None = None,
        progress: Progress = NULL_PROGRESS,
        stop: StopRequest | None = None,
    ) -> Times:
        """Run all rounds; with ``seconds``, no round but the first begins after that time.

        ``progress`` and ``stop`` are as in :func:`interleave`.
        """
        times: dict[str, list[float]] = {name: [] for name in (*self.ours, *self.reference)}
        shares = min(self.rounds, self.processes)
        with Worker(True, self.threads) as process:
            own = process.prepare(self.ours)
            deadline = None if seconds is None else time.monotonic() + seconds
            interleave(own, self.warm_up, stop=stop)
            for share in range(shares):
                with ExitStack() as opened:
                    others: dict[str, Timed] = {}
                    for name, call in self.reference.items():
                        worker = opened.enter_context(Worker(False, self.threads))
                        others |= worker.prepare({name: call})
                    interleave(others, (self.warm_up + 1) // 2, stop=stop)
                    rounds = self.rounds // shares + (share < self.rounds % shares)
                    measured = interleave(own | others, rounds, deadline, progress, stop)
                for name, values in measured.items():
                    times[name] += values
        return times


def interleave(
    benchmarks: Mapping[str, Timed],
    rounds: int,
    deadline: float | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, list[float]]:
    """Run benchmarks alternately, so that other load on the machine affects all of them.

    No round but the first begins after ``deadline`` (of ``time.monotonic``). Returns the seconds
    of each benchmark, one value per round.

    Raises:
        Interrupted: if a stop was requested.
    """
    times: dict[str, list[float]] = {name: [] for name in benchmarks}
    for done in range(rounds):
        if deadline is not None and done and time.monotonic() > deadline:
            break
        for name, benchmark in benchmarks.items():
            if stop is not None and stop.signal_number is not None:
                raise Interrupted(stop.signal_number, "stopped in the middle of a measurement")
            times[name].append(benchmark())
        progress.advance()
    return times


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of ``count`` values."""

    low: float
    median: float
    high: float
    count: int

    def describe(self, digits: int = 2) -> str:
        """Format as ``median (low … high)``."""
        low, median, high = (f"{v:,.{digits}f}" for v in (self.low, self.median, self.high))
        return f"{median} ({low} … {high})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the median and quartiles of ``values``, inclusive of the smallest and largest."""
    if len(values) == 1:  # statistics.quantiles needs two before Python 3.13
        return Quartiles(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(low, median, high, len(values))


def full_suite(threads: int | None = None) -> list[Group]:
    """Return all groups of ``vsm bench --full`` in the order of measurement."""
    float32, bfloat16 = "pretraining_step_float32", "pretraining_step_bfloat16"
    groups = [
        *(_evaluation(shot) for shot in (1, 5)),
        *(_step_beside_reference(image_size=size) for size in REFERENCE_IMAGE_SIZES),
        Group(
            "pre-training step in float32 and bfloat16",
            {
                float32: ("pretraining_step", {"precision": "float32"}),
                bfloat16: ("pretraining_step", {"precision": "bfloat16"}),
            },
            ratios={"pretraining_bfloat16_vs_float32": (bfloat16, float32)},
            rounds=7,
        ),
        *(_classifier(model, 100, rounds=100) for model in SMALL_ENCODERS),
        *(_classifier(model, 75, rounds=7, warm_up=1) for model in LARGE_ENCODERS),
        *(_together(model, 1000) for model in (SMALL_ENCODERS[0], LARGE_ENCODERS[0])),
        *(
            Group(
                f"recall and consolidation, {slots:,} slots",
                {
                    "recall": ("recall", {"remembered": slots}),
                    "recall_with_gradient": ("recall", {"gradient": True, "remembered": slots}),
                    "consolidation": ("consolidation", {"remembered": slots}),
                },
                suffix=f"_{slots}",
                rounds=7,
            )
            for slots in SLOTS
        ),
        *(
            Group(
                f"training step and bare backbone, {size}×{size}",
                {
                    "vsm_step": ("training_step", {"method": "vsm", "image_size": size}),
                    "backbone": ("backbone_pass", {"image_size": size}),
                },
                ratios={"vsm_step_vs_backbone": ("vsm_step", "backbone")},
                suffix=f"_{size}",
            )
            for size in IMAGE_SIZES
        ),
    ]
    return [replace(group, threads=threads) for group in groups]


def _evaluation(shot: int) -> Group:
    """2,000 episodes of VSM with J = 100, and 600 of the reference."""
    ours = {"episodes": 2000, "shot": shot, "memory_samples": 100}
    return Group(
        f"evaluation, {shot}-shot",
        {"evaluation_2k": ("evaluation", ours)},
        {"reference_evaluation_600": ("reference_evaluation", {"episodes": 600, "shot": shot})},
        {"evaluation_2k_vs_reference_600": ("evaluation_2k", "reference_evaluation_600")},
        f"_{shot}shot",
        rounds=3,
        warm_up=0,
    )


def _step_beside_reference(beside: str = "_beside_reference", **sizes: int) -> Group:
    """VSM steps and the reference on the same tasks, one of them per update.

    ``beside`` is added to the names of our times, since other groups time the same steps.
    """
    size, step = sizes["image_size"], {"method": "vsm", **sizes}
    ours: dict[str, Call] = {
        "vsm_step": ("training_step", step),
        "vsm_conjugate_step": ("training_step", {**step, "inference": "conjugate"}),
        "backbone": ("backbone_pass", sizes),
    }
    return Group(
        f"training step and reference ProtoNet, {size}×{size}",
        {f"{name}{beside}": call for name, call in ours.items()},
        {"reference_protonet": ("reference_steps", sizes)},
        {
            f"{name}_vs_reference_protonet": (f"{name}{beside}", "reference_protonet")
            for name in ours
        },
        f"_{size}" if beside else "",
        processes=REFERENCE_PROCESSES,
    )


def _classifier(model: str, queries: int, rounds: int, warm_up: int = 4) -> Group:
    """A classifier of ``queries`` images; short benchmarks need many rounds."""
    sizes = {"model": model, "queries": queries}
    tasks = ("embed_images", "fit_and_predict", "predict", "explain")
    return Group(
        f"classifier, {model}, {queries:,} images",
        {task: ("classifier", {"task": task, **sizes}) for task in tasks},
        ratios={
            "classifying_vs_embedding": ("fit_and_predict", "embed_images"),
            "explaining_vs_predicting": ("explain", "predict"),
        },
        suffix=f"_{model}_{queries}",
        rounds=rounds,
        warm_up=warm_up,
    )


def _together(model: str, queries: int) -> Group:
    """Images of 20 classes used together, after they were embedded, beside embedding them."""
    sizes = {"model": model, "queries": queries, "way": 20}
    return Group(
        f"transductive, {model}, {queries:,} images of 20 classes",
        {
            task: ("classifier", {"task": task, **sizes})
            for task in ("embed_images", "use_together")
        },
        ratios={"using_together_vs_embedding": ("use_together", "embed_images")},
        suffix=f"_{model}_{queries}",
        rounds=5,
        warm_up=1,
    )


def summarize(measured: Sequence[tuple[Group, Times]]) -> dict[str, Any]:
    """Return the medians of all ratios, and the quartiles of all ratios and times."""
    milliseconds: dict[str, Quartiles] = {}
    ratios: dict[str, Quartiles] = {}
    for group, times in measured:
        for name, seconds in times.items():
            milliseconds[name + group.suffix] = quartiles([1000 * s for s in seconds])
        for name, (above, below) in group.ratios.items():
            pairs = zip(times[above], times[below], strict=True)
            ratios[name + group.suffix] = quartiles([a / b for a, b in pairs])
    for name in WORST:
        found = [ratios[name + group.suffix] for group, _ in measured if name in group.ratios]
        if found:
            ratios[name] = max(found, key=lambda one: one.median)
    return {
        "ratios": {name: found.median for name, found in ratios.items()},
        "quartiles": {name: asdict(found) for name, found in ratios.items()},
        "milliseconds": {name: asdict(found) for name, found in milliseconds.items()},
    }


def measure_briefly(
    image_size: int,
    channels: int,
    rounds: int,
    seconds: float,
    threads: int | None,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, Any]:
    """Compare training steps with their backbone and the reference ProtoNet."""
    group = _step_beside_reference("", image_size=image_size, channels=channels)
    ratios = {f"{name}_vs_backbone": (name, "backbone") for name in STEPS}
    group = replace(group, ratios={**group.ratios, **ratios}, processes=1)
    group = replace(group, rounds=rounds, warm_up=1, threads=threads)
    progress.start(group.title, rounds)
    return {
        **summarize([(group, group.measure(seconds, progress))]),
        "machine": describe_machine(threads),
        "workload": asdict(Sizes(image_size=image_size, channels=channels)),
    }


def describe_machine(threads: int | None) -> dict[str, Any]:
    """Return the conditions of a measurement, without anything that identifies the machine."""
    has_affinity = hasattr(os, "sched_getaffinity")
    with Worker(True, threads) as ours:
        return {
            "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            **ours.metadata,
        }


def describe_conditions(results: dict[str, Any], *further: str) -> Text:
    """List the machine and the code of a measurement."""
    machine, commit = results["machine"], results["commit"]
    lines = [
        f"{machine['cores']} cores with {machine['vector_instructions']}, torch's threads: "
        f"{machine['threads']}",
        f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}",
        *([f"commit {commit}"] if commit else []),
        *further,
    ]
    return Text("\n".join(f"- {line}" for line in lines))


def speed_jobs(groups: Sequence[Group]) -> list[Job]:
    """Return a job for each group, on this machine and with the code as it is now."""
    where = {"machine": describe_machine(groups[0].threads), **measured_code()}
    return [Job("speed", one.title, {"group": asdict(one), **where}) for one in groups]


def collect_results(jobs: Sequence[Job], store: "JobStore") -> dict[str, Any]:
    """Return the content of ``results.json`` for finished jobs."""
    measured = [(Group(**job.recipe["group"]), store.outcome(job)["seconds"]) for job in jobs]
    recipe = jobs[0].recipe
    return {**summarize(measured), "machine": recipe["machine"], "commit": recipe["commit"]}


def write_results(results: dict[str, Any], folder: Path) -> Path:
    """Write ``results.json`` and ``results.md``; return the page."""
    ratios = [
        [
            f"`{name}`",
            Quartiles(**value).describe(),
            f"≤ {TARGETS[name]:.2f}" if name in TARGETS else "",
            str(value["count"]),
        ]
        for name, value in results["quartiles"].items()
    ]
    times = [
        [f"`{name}`", Quartiles(**value).describe(1)]
        for name, value in results["milliseconds"].items()
    ]
    about = (
        "Written by `make bench`; what each line means, and all sizes: "
        "[benchmarks](../docs/benchmarks.md)."
    )
    allocations = results["machine"]["keeps_allocations"]
    blocks: list[Block] = [
        Heading(1, "Speed"),
        Text(about),
        describe_conditions(results, f"allocations kept: {allocations} (reference: False)"),
        Heading(2, "Ratios"),
        Table(["", "median (quartiles)", "target", "pairs"], ratios),
        Heading(2, "Milliseconds"),
        Table(["", "median (quartiles)"], times),
    ]
    return write_page(results, blocks, folder / "results.md")


def write_page(results: dict[str, Any], blocks: Sequence[Block], path: Path) -> Path:
    """Write results as JSON, and ``blocks`` as Markdown beside them; return its path."""
    text = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
    write_text(path.with_suffix(".json"), text)
    write_markdown(path, blocks)
    return path
