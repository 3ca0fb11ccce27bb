"""What is measured together: the short comparison for a user's machine, and all of it.

Nothing here imports torch or computes: works take turns in separate processes, ours with the
allocator as ``vsm train`` sets it and the reference with the default one.
"""

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from vsm.benchmarking.processes import Worker
from vsm.benchmarking.timing import Quartiles, Timed, interleaved, quartiles
from vsm.benchmarking.workloads import (
    WORKLOADS,
    ClassifierWorkload,
    EvaluationWorkload,
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
CLASSIFIER_WORKS = ("embedding_alone", "fit_and_predict", "predict", "explain")
CLASSIFIER_RATIOS: Ratios = {
    "classifying_vs_embedding": ("fit_and_predict", "embedding_alone"),
    "explaining_vs_predicting": ("explain", "predict"),
}
EVALUATION_RATIOS: Ratios = {
    "evaluation_2k_vs_reference_600": ("evaluation_2k", "reference_evaluation_600")
}
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
BACKBONE_SIZES = (28, 32, 84)  # of images, for steps beside the bare backbone
REFERENCE_SIZES = (28, 32)
SHOTS = (1, 5)  # of evaluations
REFERENCE_PROCESSES = 10
"""Among which the turns of a reference step are shared; each trains and does nothing else.

How much memory glibc gives back and asks for again differs from process to process, and leftovers
of other work can keep it from doing so.
"""


@dataclass(frozen=True)
class Turns:
    """Works of one workload that take turns.

    Attributes:
        workload: how much is done.
        ours: works that share one process.
        reference: works that have a process each.
        rounds: how often each is timed.
        warm_up: rounds of ours that do not count; the reference has half as many.
        processes: among which the rounds of each work of the reference are shared.
        threads: of torch; None: torch's own choice.
    """

    workload: Workload
    ours: Works
    reference: Works = field(default_factory=dict)
    rounds: int = 20
    warm_up: int = 0
    processes: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("repeats", self.rounds), ("threads", self.threads)):
            if value is not None and value < 1:
                raise SettingsError(f"{name}: must be at least 1, got {value}")

    def recipe(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {**asdict(self), "kind_of_workload": type(self.workload).__name__}

    @staticmethod
    def from_recipe(recipe: Mapping[str, Any]) -> "Turns":
        """Return what :meth:`recipe` described."""
        values = {one: recipe[one] for one in Turns.__dataclass_fields__}
        workload = WORKLOADS[recipe["kind_of_workload"]](**values.pop("workload"))
        return Turns(workload, **values)

    def measure(
        self,
        seconds: float | None = None,
        progress: Progress = NULL_PROGRESS,
        stop: StopRequest | None = None,
    ) -> Times:
        """Return the seconds of each work.

        Args:
            seconds: no round begins after this time, except the first; None: all are done.
            progress: told of every round that counted.
            stop: see :func:`vsm.benchmarking.timing.interleaved`.
        """
        times: dict[str, list[float]] = {name: [] for name in (*self.ours, *self.reference)}
        with Worker(True, self.threads) as process:
            own = {name: self._prepare(process, work) for name, work in self.ours.items()}
            deadline = None if seconds is None else time.monotonic() + seconds
            interleaved(own, self.warm_up, stop=stop)
            for rounds in _shares(self.rounds, self.processes):
                with ExitStack() as opened:
                    others = {
                        name: self._prepare(opened.enter_context(Worker(False, self.threads)), work)
                        for name, work in self.reference.items()
                    }
                    interleaved(others, (self.warm_up + 1) // 2, stop=stop)
                    measured = interleaved(own | others, rounds, deadline, progress, stop)
                for name, values in measured.items():
                    times[name] += values
        return times

    def _prepare(self, process: Worker, work: Sequence[Any]) -> Timed:
        name, *arguments = work
        return process.prepare(name, self.workload, *arguments)


def _shares(total: int, most: int) -> list[int]:
    """Split ``total`` turns as evenly as possible among at most ``most`` processes."""
    number = min(total, most)
    return [total // number + (place < total % number) for place in range(number)]


class Group(NamedTuple):
    """What is measured at once, the ratios of it, and the suffix of all names."""

    title: str
    turns: Turns
    ratios: Ratios
    suffix: str


@dataclass
class Measurements:
    """Times and ratios by name."""

    milliseconds: dict[str, Quartiles] = field(default_factory=dict)
    ratios: dict[str, Quartiles] = field(default_factory=dict)

    def add(self, times: Times, ratios: Ratios, suffix: str = "") -> None:
        """Add times and ratios of them, under names with a ``suffix``."""
        for name, seconds in times.items():
            self.milliseconds[name + suffix] = quartiles([1000 * s for s in seconds])
        for name, (above, below) in ratios.items():
            pairs = zip(times[above], times[below], strict=True)
            self.ratios[name + suffix] = quartiles([a / b for a, b in pairs])

    def add_worst(self, name: str, *suffixes: str) -> None:
        """Add the ratio with the largest median among those with suffixes, without a suffix."""
        self.ratios[name] = max((self.ratios[name + s] for s in suffixes), key=lambda q: q.median)

    def as_dict(self) -> dict[str, Any]:
        """Return the medians of the ratios, and the quartiles of everything."""
        return {
            "ratios": {name: found.median for name, found in self.ratios.items()},
            "quartiles": {name: asdict(found) for name, found in self.ratios.items()},
            "milliseconds": {name: asdict(found) for name, found in self.milliseconds.items()},
        }


@dataclass(frozen=True)
class Plan:
    """All of the measurement.

    Attributes:
        step: one training step; its image size is set to each that is compared.
        evaluation: the episodes; their shot is set to each of ``SHOTS``.
        classifier: what the classifiers of the shipped ``models`` are asked.
        slots: sizes of the memory whose cost is measured.
        pairs: turns of a training step.
        warm_up: turns of a training step, a recall or a consolidation that do not count.
        threads: of torch; None: torch's own choice.
    """

    step: StepWorkload = field(default_factory=StepWorkload)
    evaluation: EvaluationWorkload = field(default_factory=EvaluationWorkload)
    classifier: ClassifierWorkload = field(default_factory=ClassifierWorkload)
    models: tuple[str, ...] = ("cifar-fs-vsm", "omniglot-vsm")
    slots: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    pairs: int = 20
    evaluation_pairs: int = 3
    memory_rounds: int = 7
    warm_up: int = 4
    threads: int | None = None

    def groups(self) -> list[Group]:
        """Return what is measured, in this order."""
        return [
            *map(self._evaluation, SHOTS),
            *map(self._beside_reference, REFERENCE_SIZES),
            *map(self._classifier, self.models),
            *map(self._memory_size, self.slots),
            *map(self._beside_backbone, BACKBONE_SIZES),
        ]

    def _evaluation(self, shot: int) -> Group:
        ours, reference = ["evaluation"], ["reference_evaluation"]
        turns = self._turns(
            replace(self.evaluation, shot=shot),
            {"evaluation_2k": ours},
            reference={"reference_evaluation_600": reference},
            rounds=self.evaluation_pairs,
            warm_up=0,
        )
        return Group(f"evaluation, {shot}-shot", turns, EVALUATION_RATIOS, f"_{shot}shot")

    def _beside_reference(self, size: int) -> Group:
        """A VSM step and the reference on the same tasks, one or all of them at once."""
        ours = {
            OUR_STEP: ["step", "vsm"],
            "arithmetic_of_a_step": ["arithmetic", "vsm"],
            "vsm_conjugate_step_beside_reference": ["step", "vsm", "conjugate"],
            "backbone_beside_reference": ["backbone"],
        }
        reference = {
            REFERENCE_STEPS: ["reference_steps", 1],
            "reference_protonet_batched": ["reference_steps", self.step.tasks],
        }
        step = replace(self.step, image_size=size)
        turns = self._turns(step, ours, reference=reference, processes=REFERENCE_PROCESSES)
        title = f"step and reference ProtoNet, {size}×{size}"
        return Group(title, turns, REFERENCE_RATIOS, f"_{size}")

    def _classifier(self, model: str) -> Group:
        works = {work: [work] for work in CLASSIFIER_WORKS}
        turns = self._turns(replace(self.classifier, model=model), works)
        return Group(f"classifier, {model}", turns, CLASSIFIER_RATIOS, f"_{model}")

    def _memory_size(self, slots: int) -> Group:
        works = {work: [work] for work in MEMORY_WORKS}
        step = replace(self.step, remembered=slots)
        turns = self._turns(step, works, rounds=self.memory_rounds)
        return Group(f"recall and consolidation, {slots:,} slots", turns, {}, f" {slots}")

    def _beside_backbone(self, size: int) -> Group:
        works = {"vsm_step": ["step", "vsm"], "backbone": ["backbone"]}
        turns = self._turns(replace(self.step, image_size=size), works)
        ratios = {"vsm_step_vs_backbone": ("vsm_step", "backbone")}
        return Group(f"step and bare backbone, {size}×{size}", turns, ratios, f"_{size}")

    def _turns(self, workload: Workload, ours: Works, **others: Any) -> Turns:
        usual = {"rounds": self.pairs, "warm_up": self.warm_up, "threads": self.threads}
        return Turns(workload, ours, **usual | others)

    def results(self, measured: Iterable[Times]) -> dict[str, Any]:
        """Return what ``benchmarks/results.json`` holds of the times of all groups."""
        found = Measurements()
        for group, times in zip(self.groups(), measured, strict=True):
            found.add(times, group.ratios, group.suffix)
        found.add_worst(*EVALUATION_RATIOS, *(f"_{shot}shot" for shot in SHOTS))
        found.add_worst("vsm_step_vs_reference_protonet", *(f"_{size}" for size in REFERENCE_SIZES))
        for name in CLASSIFIER_RATIOS:
            found.add_worst(name, *(f"_{model}" for model in self.models))
        memory = [
            {
                "slots": slots,
                **{
                    work: asdict(found.milliseconds.pop(f"{work} {slots}")) for work in MEMORY_WORKS
                },
            }
            for slots in self.slots
        ]
        workload = {name: asdict(self)[name] for name in ("step", "evaluation", "classifier")}
        return {**found.as_dict(), "memory_size": memory, "workload": workload}


def measure_briefly(
    workload: StepWorkload,
    rounds: int,
    seconds: float | None = None,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, Any]:
    """Measure steps of three methods, their backbone, the reference ProtoNet, and embedding.

    ``seconds`` and ``threads`` are as in :class:`Turns`.
    """
    works = {"backbone": ["backbone"], **STEPS_SHOWN, "embedding": ["embedding"]}
    reference = {"reference_protonet": ["reference_steps", 1]}
    turns = Turns(workload, works, reference, rounds, warm_up=1, threads=threads)
    progress.start("benchmark", rounds)
    times = turns.measure(seconds, progress)
    ratios = {f"{name}_vs_backbone": (name, "backbone") for name in STEPS_SHOWN}
    for name in ("vsm_conjugate_step", "vsm_step"):
        ratios[f"{name}_vs_reference_protonet"] = (name, "reference_protonet")
    found = Measurements()
    found.add(times, ratios)
    return {
        **found.as_dict(),
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
