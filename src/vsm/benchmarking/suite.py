"""What is measured together: the short comparison for a user's machine, and all of it.

Nothing here imports torch or computes: works take turns in separate processes, ours with the
allocator as ``vsm train`` sets it and the reference with the default one.
"""

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from vsm.benchmarking.processes import Worker
from vsm.benchmarking.timing import Quartiles, interleaved, quartiles
from vsm.benchmarking.workloads import (
    WORKLOADS,
    ClassifierWorkload,
    EvaluationWorkload,
    PretrainingWorkload,
    StatisticsWorkload,
    StepWorkload,
    Workload,
)
from vsm.errors import SettingsError
from vsm.system.interruption import StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress

Works = Mapping[str, Sequence[Any]]
"""Names of times, and what is timed: one of ``vsm.benchmarking.worker.WORKS``, and its arguments
after the workload."""
Times = Mapping[str, Sequence[float]]
"""Seconds of each work, round by round; equal positions belong together."""
Ratios = Mapping[str, tuple[str, str]]
"""What a ratio is called, and of which two works it is, pair by pair."""
STEPS_SHOWN: Works = {
    "protonet_step": ("step", "protonet"),
    "vpn_step": ("step", "vpn"),
    "vsm_conjugate_step": ("step", "vsm", "conjugate"),
    "vsm_step": ("step", "vsm"),
}
"""The methods, with the paper's network unless it says otherwise."""
MEMORY_WORKS = ("recall", "recall_with_gradient", "consolidation")
CLASSIFIER_WORKS = ("forward_pass", "embedding_pictures", "fit_and_predict", "predict", "explain")
CLASSIFIER_RATIOS: Ratios = {
    "classifying_vs_embedding": ("fit_and_predict", "embedding_pictures"),
    "classifying_vs_forward_pass": ("fit_and_predict", "forward_pass"),
    "explaining_vs_predicting": ("explain", "predict"),
}
BFLOAT16_RATIO = "pretraining_bfloat16_vs_float32"
EVALUATION_RATIO = "evaluation_2k_vs_reference_600"
OUR_STEP, REFERENCE_STEPS = "vsm_step_beside_reference", "reference_protonet"
REFERENCE_RATIOS: Ratios = {
    "vsm_step_vs_reference_protonet": (OUR_STEP, REFERENCE_STEPS),
    "vsm_step_vs_reference_protonet_batched": (OUR_STEP, "reference_protonet_batched"),
    "vsm_conjugate_step_vs_reference_protonet": (
        "vsm_conjugate_step_beside_reference",
        REFERENCE_STEPS,
    ),
    "backbone_vs_reference_protonet": ("backbone_beside_reference", REFERENCE_STEPS),
    "arithmetic_vs_vsm_step": ("arithmetic_of_a_step", OUR_STEP),
    "arithmetic_vs_reference_protonet": ("arithmetic_of_a_step", REFERENCE_STEPS),
}
WORST = (EVALUATION_RATIO, "vsm_step_vs_reference_protonet", *CLASSIFIER_RATIOS)
STATISTICS_WIDTHS = (256, 1280)
BACKBONE_SIZES = (28, 32, 84)  # of images, for steps beside the bare backbone
REFERENCE_SIZES = (28, 32)
SHOTS = (1, 5)  # of evaluations
REFERENCE_PROCESSES = 10
"""Among which the turns of a reference step are shared; each trains and does nothing else.

How much memory glibc gives back and asks for again differs from process to process, and leftovers
of other work can keep it from doing so.
"""


@dataclass(frozen=True)
class Group:
    """Works of one workload that take turns.

    Attributes:
        title: what people call it.
        workload: how much is done.
        ours: works that share one process.
        reference: works that have a process each.
        ratios: of these works.
        suffix: of the names of times and ratios.
        rounds: how often each work is timed.
        warm_up: rounds of ours that do not count; the reference has half as many.
        processes: among which the rounds of each work of the reference are shared.
        threads: of torch; None: torch's own choice.
    """

    title: str
    workload: Workload
    ours: Works
    reference: Works = field(default_factory=dict)
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
        """Return everything that is timed as JSON values."""
        return {**asdict(self), "kind_of_workload": type(self.workload).__name__}

    @staticmethod
    def from_recipe(recipe: Mapping[str, Any]) -> "Group":
        """Return what :meth:`recipe` described."""
        values = {one.name: recipe[one.name] for one in fields(Group)}
        values["workload"] = WORKLOADS[recipe["kind_of_workload"]](**recipe["workload"])
        return Group(**values)

    def measure(
        self,
        seconds: float | None = None,
        progress: Progress = NULL_PROGRESS,
        stop: StopRequest | None = None,
    ) -> Times:
        """Do all rounds; unless it is None, none but the first begins after so many ``seconds``.

        ``progress`` and ``stop`` are as in :func:`vsm.benchmarking.timing.interleaved`.
        """
        times: dict[str, list[float]] = {name: [] for name in (*self.ours, *self.reference)}
        with Worker(True, self.threads) as process:
            own = process.prepare_all({name: self._set_up(w) for name, w in self.ours.items()})
            deadline = None if seconds is None else time.monotonic() + seconds
            interleaved(own, self.warm_up, stop=stop)
            for rounds in _shares(self.rounds, self.processes):
                with ExitStack() as opened:
                    others = {
                        name: opened.enter_context(Worker(False, self.threads)).prepare(
                            *self._set_up(work)
                        )
                        for name, work in self.reference.items()
                    }
                    interleaved(others, (self.warm_up + 1) // 2, stop=stop)
                    measured = interleaved(own | others, rounds, deadline, progress, stop)
                for name, values in measured.items():
                    times[name] += values
        return times

    def _set_up(self, work: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a worker is told of a work: which, how much, and what else."""
        name, *arguments = work
        return name, self.workload, *arguments


def _statistics(width: int, usual: Any) -> Group:
    """Return the update of class statistics of so many features."""
    work, workload = "statistics_update", StatisticsWorkload(num_features=width)
    title = f"update of class statistics, {width} features"
    return Group(title, workload, {work: [work]}, suffix=f"_{width}", **usual)


def _shares(total: int, most: int) -> list[int]:
    """Split ``total`` turns as evenly as possible among at most ``most`` processes."""
    number = min(total, most)
    return [total // number + (place < total % number) for place in range(number)]


def summarize(measured: Sequence[tuple[Group, Times]]) -> dict[str, Any]:
    """Return the medians of all ratios, and the quartiles of everything, by name and suffix.

    Of ``WORST``, the ratio with the largest median stands without a suffix as well.
    """
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
    """All of the measurement.

    Attributes:
        step: one training step; its image size is set to each that is compared.
        pretraining: one step of it, in both precisions.
        evaluation: the episodes; their shot is set to each of ``SHOTS``.
        classifier: what the classifiers of the shipped ``models`` are asked.
        queries: how many pictures these are asked, and turns of each number: what takes a few
            milliseconds needs many.
        photographs: models of large encoders, and so few pictures that these are asked.
        slots: sizes of the memory whose cost is measured.
        pairs: turns of a training step.
        warm_up: turns of a training step, a recall or a consolidation that do not count.
        threads: of torch; None: torch's own choice.
    """

    step: StepWorkload = field(default_factory=StepWorkload)
    evaluation: EvaluationWorkload = field(default_factory=EvaluationWorkload)
    classifier: ClassifierWorkload = field(default_factory=ClassifierWorkload)
    models: tuple[str, ...] = ("cifar-fs-vsm", "glyphs-5w1s", "omniglot-vsm")
    queries: tuple[tuple[int, int], ...] = ((100, 100), (1_000, 20))
    photographs: tuple[tuple[str, int], ...] = (
        ("cifar-fs-resnet12-vsm", 75),
        ("photos-vsm", 75),
    )
    pretraining: PretrainingWorkload = field(default_factory=PretrainingWorkload)
    slots: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    pairs: int = 20
    evaluation_pairs: int = 3
    memory_rounds: int = 7
    warm_up: int = 4
    threads: int | None = None

    def groups(self) -> list[Group]:
        """Return what is measured, in this order."""
        usual: Any = {"rounds": self.pairs, "warm_up": self.warm_up, "threads": self.threads}
        evaluations = usual | {"rounds": self.evaluation_pairs, "warm_up": 0}
        memories = usual | {"rounds": self.memory_rounds}
        return [
            *(
                Group(
                    f"evaluation, {shot}-shot",
                    replace(self.evaluation, shot=shot),
                    {"evaluation_2k": ["evaluation"]},
                    {"reference_evaluation_600": ["reference_evaluation"]},
                    {EVALUATION_RATIO: ("evaluation_2k", "reference_evaluation_600")},
                    f"_{shot}shot",
                    **evaluations,
                )
                for shot in SHOTS
            ),
            *(self._beside_reference(size, usual) for size in REFERENCE_SIZES),
            self._pretraining(memories),
            *(
                self._classifying(model, queries, "pictures", usual | {"rounds": rounds})
                for queries, rounds in self.queries
                for model in self.models
            ),
            *(
                self._classifying(
                    model, queries, "photographs", memories | {"warm_up": min(1, self.warm_up)}
                )
                for model, queries in self.photographs
            ),
            *(_statistics(width, usual) for width in STATISTICS_WIDTHS),
            *(
                Group(
                    f"recall and consolidation, {slots:,} slots",
                    replace(self.step, remembered=slots),
                    {work: [work] for work in MEMORY_WORKS},
                    suffix=f" {slots}",
                    **memories,
                )
                for slots in self.slots
            ),
            *(
                Group(
                    f"step and bare backbone, {size}×{size}",
                    replace(self.step, image_size=size),
                    {"vsm_step": ["step", "vsm"], "backbone": ["backbone"]},
                    ratios={"vsm_step_vs_backbone": ("vsm_step", "backbone")},
                    suffix=f"_{size}",
                    **usual,
                )
                for size in BACKBONE_SIZES
            ),
        ]

    def _pretraining(self, usual: Any) -> Group:
        """A step of pre-training in both precisions."""
        names = {one: f"pretraining_step_{one}" for one in ("float32", "bfloat16")}
        return Group(
            "step of pre-training in float32 and bfloat16",
            self.pretraining,
            {name: ["pretraining_step", precision] for precision, name in names.items()},
            ratios={BFLOAT16_RATIO: (names["bfloat16"], names["float32"])},
            **usual,
        )

    def _classifying(self, model: str, queries: int, pictures: str, usual: Any) -> Group:
        """What the classifier of a shipped model is asked."""
        return Group(
            f"classifier, {model}, {queries:,} {pictures}",
            replace(self.classifier, model=model, queries=queries),
            {work: [work] for work in CLASSIFIER_WORKS},
            ratios=CLASSIFIER_RATIOS,
            suffix=f"_{model}_{queries}",
            **usual,
        )

    def _beside_reference(self, size: int, usual: Any) -> Group:
        """A VSM step and the reference on the same tasks, one or all of them at once."""
        return Group(
            f"step and reference ProtoNet, {size}×{size}",
            replace(self.step, image_size=size),
            {
                OUR_STEP: ["step", "vsm"],
                "arithmetic_of_a_step": ["arithmetic", "vsm"],
                "vsm_conjugate_step_beside_reference": ["step", "vsm", "conjugate"],
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

    def results(self, measured: Iterable[Times]) -> dict[str, Any]:
        """Return what ``benchmarks/results.json`` holds of the times of all groups."""
        found = summarize(list(zip(self.groups(), measured, strict=True)))
        times = found["milliseconds"]
        memory = [
            {"slots": slots, **{work: times.pop(f"{work} {slots}") for work in MEMORY_WORKS}}
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
    """Measure steps of three methods, their backbone, the reference ProtoNet, and embedding.

    ``seconds`` and ``threads`` are as in :class:`Group`.
    """
    ratios = {f"{name}_vs_backbone": (name, "backbone") for name in STEPS_SHOWN}
    for name in ("vsm_conjugate_step", "vsm_step"):
        ratios[f"{name}_vs_reference_protonet"] = (name, "reference_protonet")
    works = {"backbone": ["backbone"], **STEPS_SHOWN, "embedding": ["embedding"]}
    reference = {"reference_protonet": ["reference_steps", 1]}
    usual: Any = {"rounds": rounds, "warm_up": 1, "threads": threads}
    group = Group("benchmark", workload, works, reference, ratios, **usual)
    progress.start(group.title, rounds)
    times = group.measure(seconds, progress)
    return {
        **summarize([(group, times)]),
        "images_per_second": workload.num_images / quartiles(times["embedding"]).median,
        "machine": describe_machine(threads),
        "workload": asdict(workload),
    }


def describe_machine(threads: int | None) -> dict[str, Any]:
    """Return what a reader of the times should know, and nothing that identifies the machine."""
    has_affinity = hasattr(os, "sched_getaffinity")
    with Worker(True, threads) as ours:
        return {
            "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            **ours.metadata,
            "reference_keeps_allocations": False,
        }
