"""Groups of benchmarks that are compared: the short comparison, and the full suite.

Nothing here imports torch: benchmarks run in separate processes, ours with the allocator as
``vsm train`` configures it and the reference with the default one.
"""

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from vsm.errors import SettingsError
from vsm.system.interruption import StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm_lab.benchmarking.processes import Worker
from vsm_lab.benchmarking.timing import Quartiles, interleave, quartiles
from vsm_lab.benchmarking.workloads import (
    WORKLOADS,
    ClassifierWorkload,
    EvaluationWorkload,
    PretrainingWorkload,
    StatisticsWorkload,
    StepWorkload,
    Workload,
)

Benchmarks = Mapping[str, Sequence[Any]]
"""Name in the results → name in ``worker.BENCHMARKS``, and arguments after the workload."""
Times = Mapping[str, Sequence[float]]
"""Seconds of each benchmark, one value per round."""
Ratios = Mapping[str, tuple[str, str]]
"""Name of a ratio → names of the two benchmarks."""
STEPS: Benchmarks = {
    "protonet_step": ("step", "protonet"),
    "vpn_step": ("step", "vpn"),
    "vsm_conjugate_step": ("step", "vsm", "conjugate"),
    "vsm_step": ("step", "vsm"),
}
MEMORY_BENCHMARKS = ("recall", "recall_with_gradient", "consolidation")
CLASSIFIER_BENCHMARKS = (
    *("forward_pass", "embedding_pictures", "fit_and_predict", "predict", "explain"),
)
CLASSIFIER_RATIOS: Ratios = {
    "classifying_vs_embedding": ("fit_and_predict", "embedding_pictures"),
    "classifying_vs_forward_pass": ("fit_and_predict", "forward_pass"),
    "explaining_vs_predicting": ("explain", "predict"),
}
EVALUATION_RATIO = "evaluation_2k_vs_reference_600"
OUR_STEP, CONJUGATE_STEP = "vsm_step_beside_reference", "vsm_conjugate_step_beside_reference"
REFERENCE_STEPS, ARITHMETIC = "reference_protonet", "arithmetic_of_a_step"
REFERENCE_RATIOS: Ratios = {
    "vsm_step_vs_reference_protonet": (OUR_STEP, REFERENCE_STEPS),
    "vsm_step_vs_reference_protonet_batched": (OUR_STEP, "reference_protonet_batched"),
    "vsm_conjugate_step_vs_reference_protonet": (CONJUGATE_STEP, REFERENCE_STEPS),
    "backbone_vs_reference_protonet": ("backbone_beside_reference", REFERENCE_STEPS),
    "arithmetic_vs_vsm_step": (ARITHMETIC, OUR_STEP),
    "arithmetic_vs_reference_protonet": (ARITHMETIC, REFERENCE_STEPS),
}
WORST = (EVALUATION_RATIO, "vsm_step_vs_reference_protonet", *CLASSIFIER_RATIOS)
"""Ratios whose largest median is also reported without suffix."""
REFERENCE_PROCESSES = 10
"""Processes that share the rounds of a reference step: how much memory glibc returns to the system
and requests again differs between processes."""


@dataclass(frozen=True)
class Group:
    """Benchmarks of one workload that are run alternately.

    Attributes:
        title: shown to users.
        workload: sizes.
        ours: benchmarks that share one process.
        reference: benchmarks with a process each.
        ratios: of these benchmarks.
        suffix: of the names of times and ratios.
        rounds: how often each benchmark is timed.
        warm_up: rounds of ours that do not count; the reference has half as many.
        processes: among which the rounds of each reference benchmark are shared.
        threads: of torch; None: torch's default.
    """

    title: str
    workload: Workload
    ours: Benchmarks
    reference: Benchmarks = field(default_factory=dict)
    ratios: Ratios = field(default_factory=dict)
    suffix: str = ""
    rounds: int = 20
    warm_up: int = 0
    processes: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("repeats", self.rounds), ("threads", self.threads)):
            if value is not None and value < 1:
                raise SettingsError(f"{name}: must be at least 1, got {value}")

    def recipe(self) -> dict[str, Any]:
        """Return the group as JSON values."""
        return {**asdict(self), "kind_of_workload": type(self.workload).__name__}

    @staticmethod
    def from_recipe(recipe: Mapping[str, Any]) -> "Group":
        """Inverse of :meth:`recipe`."""
        values = {one.name: recipe[one.name] for one in fields(Group)}
        values["workload"] = WORKLOADS[recipe["kind_of_workload"]](**recipe["workload"])
        return Group(**values)

    def measure(
        self,
        seconds: float | None = None,
        progress: Progress = NULL_PROGRESS,
        stop: StopRequest | None = None,
    ) -> Times:
        """Run all rounds; with ``seconds``, no round but the first begins after that time.

        ``progress`` and ``stop`` are as in :func:`vsm_lab.benchmarking.timing.interleave`.
        """
        times: dict[str, list[float]] = {name: [] for name in (*self.ours, *self.reference)}
        with Worker(True, self.threads) as process:
            own = process.prepare_all({name: self._call(b) for name, b in self.ours.items()})
            deadline = None if seconds is None else time.monotonic() + seconds
            interleave(own, self.warm_up, stop=stop)
            for rounds in _shares(self.rounds, self.processes):
                with ExitStack() as opened:
                    others = {
                        name: opened.enter_context(Worker(False, self.threads)).prepare(
                            *self._call(benchmark)
                        )
                        for name, benchmark in self.reference.items()
                    }
                    interleave(others, (self.warm_up + 1) // 2, stop=stop)
                    measured = interleave(own | others, rounds, deadline, progress, stop)
                for name, values in measured.items():
                    times[name] += values
        return times

    def _call(self, benchmark: Sequence[Any]) -> tuple[Any, ...]:
        name, *arguments = benchmark
        return name, self.workload, *arguments


def _shares(total: int, most: int) -> list[int]:
    """Split ``total`` rounds as evenly as possible among at most ``most`` processes."""
    number = min(total, most)
    return [total // number + (place < total % number) for place in range(number)]


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


@dataclass(frozen=True)
class Plan:
    """The full suite.

    Attributes:
        step: one training step, for every image size.
        evaluation: episodes, for 1 and 5 shots.
        classifier: examples of a classifier of each of the ``models``.
        models: shipped models with small encoders.
        queries: pairs of a number of images to classify and rounds; short benchmarks need many.
        photographs: pairs of a model with a large encoder and a number of images.
        pretraining: one step, in float32 and bfloat16.
        slots: sizes of the memory.
        pairs: rounds of a training step.
        evaluation_pairs: rounds of an evaluation.
        memory_rounds: rounds of the memory and of large encoders.
        warm_up: rounds that do not count.
        threads: of torch; None: torch's default.
    """

    step: StepWorkload = field(default_factory=StepWorkload)
    evaluation: EvaluationWorkload = field(default_factory=EvaluationWorkload)
    classifier: ClassifierWorkload = field(default_factory=ClassifierWorkload)
    models: tuple[str, ...] = ("cifar-fs-vsm", "glyphs-5w1s", "omniglot-vsm")
    queries: tuple[tuple[int, int], ...] = ((100, 100), (1_000, 20))
    photographs: tuple[tuple[str, int], ...] = (("cifar-fs-resnet12-vsm", 75), ("photos-vsm", 75))
    pretraining: PretrainingWorkload = field(default_factory=PretrainingWorkload)
    slots: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    pairs: int = 20
    evaluation_pairs: int = 3
    memory_rounds: int = 7
    warm_up: int = 4
    threads: int | None = None

    def groups(self) -> list[Group]:
        """Return all groups in the order of measurement."""
        usual: Any = {"rounds": self.pairs, "warm_up": self.warm_up, "threads": self.threads}
        evaluations = usual | {"rounds": self.evaluation_pairs, "warm_up": 0}
        fewer = usual | {"rounds": self.memory_rounds}
        photographs = fewer | {"warm_up": min(1, self.warm_up)}
        return [
            *(self._evaluation(shot, evaluations) for shot in (1, 5)),
            *(self._beside_reference(size, usual) for size in (28, 32)),
            Group(
                "pre-training step in float32 and bfloat16",
                self.pretraining,
                {
                    f"pretraining_step_{precision}": ["pretraining_step", precision]
                    for precision in ("float32", "bfloat16")
                },
                ratios={
                    "pretraining_bfloat16_vs_float32": (
                        "pretraining_step_bfloat16",
                        "pretraining_step_float32",
                    )
                },
                **fewer,
            ),
            *(
                self._classifier(model, queries, usual | {"rounds": rounds})
                for queries, rounds in self.queries
                for model in self.models
            ),
            *(self._classifier(model, count, photographs) for model, count in self.photographs),
            *(
                Group(
                    f"update of class statistics, {width} features",
                    StatisticsWorkload(num_features=width),
                    {"statistics_update": ["statistics_update"]},
                    suffix=f"_{width}",
                    **usual,
                )
                for width in (256, 1280)
            ),
            *(
                Group(
                    f"recall and consolidation, {slots:,} slots",
                    replace(self.step, remembered=slots),
                    {name: [name] for name in MEMORY_BENCHMARKS},
                    suffix=f" {slots}",
                    **fewer,
                )
                for slots in self.slots
            ),
            *(
                Group(
                    f"training step and bare backbone, {size}×{size}",
                    replace(self.step, image_size=size),
                    {"vsm_step": ["step", "vsm"], "backbone": ["backbone"]},
                    ratios={"vsm_step_vs_backbone": ("vsm_step", "backbone")},
                    suffix=f"_{size}",
                    **usual,
                )
                for size in (28, 32, 84)
            ),
        ]

    def _evaluation(self, shot: int, usual: Any) -> Group:
        return Group(
            f"evaluation, {shot}-shot",
            replace(self.evaluation, shot=shot),
            {"evaluation_2k": ["evaluation"]},
            {"reference_evaluation_600": ["reference_evaluation"]},
            {EVALUATION_RATIO: ("evaluation_2k", "reference_evaluation_600")},
            f"_{shot}shot",
            **usual,
        )

    def _beside_reference(self, size: int, usual: Any) -> Group:
        """A VSM step and the reference on the same tasks, one or all of them per update."""
        return Group(
            f"training step and reference ProtoNet, {size}×{size}",
            replace(self.step, image_size=size),
            {
                OUR_STEP: ["step", "vsm"],
                ARITHMETIC: ["arithmetic", "vsm"],
                CONJUGATE_STEP: ["step", "vsm", "conjugate"],
                "backbone_beside_reference": ["backbone"],
            },
            {
                REFERENCE_STEPS: ["reference_steps", 1],
                "reference_protonet_batched": ["reference_steps", self.step.tasks],
            },
            REFERENCE_RATIOS,
            f"_{size}",
            processes=REFERENCE_PROCESSES,
            **usual,
        )

    def _classifier(self, model: str, queries: int, usual: Any) -> Group:
        return Group(
            f"classifier, {model}, {queries:,} images",
            replace(self.classifier, model=model, queries=queries),
            {name: [name] for name in CLASSIFIER_BENCHMARKS},
            ratios=CLASSIFIER_RATIOS,
            suffix=f"_{model}_{queries}",
            **usual,
        )

    def results(self, measured: Iterable[Times]) -> dict[str, Any]:
        """Return the content of ``benchmarks/results.json`` for the times of all groups."""
        found = summarize(list(zip(self.groups(), measured, strict=True)))
        times = found["milliseconds"]
        memory = [
            {"slots": slots, **{name: times.pop(f"{name} {slots}") for name in MEMORY_BENCHMARKS}}
            for slots in self.slots
        ]
        workload = {
            name: asdict(self)[name] for name in ("step", "pretraining", "evaluation", "classifier")
        }
        return {**found, "memory_size": memory, "workload": workload}


def measure_briefly(
    workload: StepWorkload,
    rounds: int,
    seconds: float | None = None,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, Any]:
    """Compare training steps with their backbone and the reference ProtoNet; time embedding.

    ``seconds`` and ``threads`` are as in :class:`Group`.
    """
    ratios = {f"{name}_vs_backbone": (name, "backbone") for name in STEPS}
    for name in ("vsm_conjugate_step", "vsm_step"):
        ratios[f"{name}_vs_reference_protonet"] = (name, REFERENCE_STEPS)
    ours = {"backbone": ["backbone"], **STEPS, "embedding": ["embedding"]}
    reference = {REFERENCE_STEPS: ["reference_steps", 1]}
    usual: Any = {"rounds": rounds, "warm_up": 1, "threads": threads}
    group = Group("benchmark", workload, ours, reference, ratios, **usual)
    progress.start(group.title, rounds)
    times = group.measure(seconds, progress)
    return {
        **summarize([(group, times)]),
        "images_per_second": workload.num_images / quartiles(times["embedding"]).median,
        "machine": describe_machine(threads),
        "workload": asdict(workload),
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
            "reference_keeps_allocations": False,
        }


def describe_conditions(results: dict[str, Any], *extra: str) -> list[str]:
    """Describe the machine and the code of a measurement, line by line."""
    machine = results["machine"]
    versions = f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}"
    return [
        f"{machine['cores']} cores with {machine['vector_instructions']}, torch's threads: "
        f"{machine['threads']}",
        ", ".join([versions, *extra]),
        *([f"commit {results['commit']}"] if results["commit"] else []),
    ]
