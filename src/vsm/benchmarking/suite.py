"""What is measured together: the short comparison for a user's machine, and all of it.

Nothing here imports torch or computes: works take turns in separate processes, ours with the
allocator as ``vsm train`` sets it and the reference with the default one.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from vsm.benchmarking.processes import Worker
from vsm.benchmarking.timing import Quartiles, interleaved, quartiles, ratios
from vsm.benchmarking.workloads import ClassifierWorkload, EvaluationWorkload, StepWorkload
from vsm.errors import SettingsError
from vsm.system.progress import NULL_PROGRESS, Progress

STEPS_SHOWN: dict[str, dict[str, str]] = {
    "protonet": {"method": "protonet"},
    "vpn": {"method": "vpn"},
    "vsm_conjugate": {"method": "vsm", "inference": "conjugate"},
    "vsm": {"method": "vsm"},
}
"""The methods, with the paper's network unless it says otherwise."""
MEMORY_WORKS = ("recall", "recall_with_gradient", "consolidation")
CLASSIFIER_WORKS = ("embedding_alone", "fit_and_predict", "predict", "explain")
CLASSIFIER_RATIOS = {
    "classifying_vs_embedding": ("fit_and_predict", "embedding_alone"),
    "explaining_vs_predicting": ("explain", "predict"),
}

Value = TypeVar("Value")
Times = Mapping[str, Sequence[float]]
"""Seconds of every work, round by round."""


@dataclass
class Measurements:
    """Times and ratios by name."""

    milliseconds: dict[str, Quartiles] = field(default_factory=dict)
    ratios: dict[str, Quartiles] = field(default_factory=dict)

    def add(
        self, times: Times, names: Mapping[str, str], divided: Mapping[str, tuple[str, str]]
    ) -> None:
        """Add what was timed.

        Args:
            times: of each work.
            names: what the times of a work are called, and which work that is.
            divided: what a ratio is called, and of which two works it is, pair by pair.
        """
        for name, work in names.items():
            self.milliseconds[name] = quartiles(times[work]).times(1000)
        for name, (above, below) in divided.items():
            self.ratios[name] = quartiles(ratios(times[above], times[below]))

    def add_worst(self, name: str, *others: str) -> None:
        """Add the ratio with the largest median among ``others`` under another name."""
        self.ratios[name] = max((self.ratios[o] for o in others), key=lambda q: q.median)

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
        step: one training step; its image size is set to each of ``sizes``.
        evaluation: the episodes; their shot is set to each of ``shots``.
        sizes: images compared with the bare backbone.
        reference_sizes: images compared with the reference ProtoNet.
        shots: support images of the evaluations compared with the reference's.
        slots: sizes of the memory whose cost is measured.
        classifier: what the classifiers of shipped models are asked, with each of ``models``.
        models: names of shipped models.
        pairs: turns of a training step.
        reference_processes: among which the turns of a reference step are shared; each trains
            and does nothing else. How much memory glibc gives back and asks for again differs from
            process to process, and leftovers of other work can keep it from doing so.
        evaluation_pairs: turns of an evaluation.
        memory_rounds: turns of recall and consolidation.
        warm_up: turns of a training step, a recall or a consolidation that do not count.
        threads: of torch; unset: torch's own choice.
    """

    step: StepWorkload = field(default_factory=StepWorkload)
    evaluation: EvaluationWorkload = field(default_factory=EvaluationWorkload)
    sizes: tuple[int, ...] = (28, 32, 84)
    reference_sizes: tuple[int, ...] = (28, 32)
    shots: tuple[int, ...] = (1, 5)
    slots: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    classifier: ClassifierWorkload = field(default_factory=ClassifierWorkload)
    models: tuple[str, ...] = ("cifar-fs-vsm", "omniglot-vsm")
    pairs: int = 20
    reference_processes: int = 10
    evaluation_pairs: int = 3
    memory_rounds: int = 7
    warm_up: int = 4
    threads: int | None = None


def measure(plan: Plan, progress: Progress = NULL_PROGRESS) -> dict[str, Any]:
    """Measure all of ``plan`` in one run; return what ``benchmarks/results.json`` holds."""
    found = Measurements()
    with _two_workers(plan.threads) as (ours, reference):
        for shot in plan.shots:  # first, so that a mistake in the data shows at once
            _evaluations(plan, shot, ours, reference, found, progress)
        for size in plan.reference_sizes:
            _against_reference(plan, size, ours, found, progress)
        _classifiers(plan, ours, found, progress)
        memory = _memory_sizes(plan, ours, progress)
        for size in plan.sizes:  # the largest images last: the allocator keeps what they took
            _against_backbone(plan, size, ours, found, progress)
        machine = _machine(ours, reference)
    step, evaluation = "vsm_step_vs_reference_protonet", "evaluation_2k_vs_reference_600"
    found.add_worst(step, *(f"{step}_{size}" for size in plan.reference_sizes))
    found.add_worst(evaluation, *(f"{evaluation}_{shot}shot" for shot in plan.shots))
    workload = {
        "step": asdict(plan.step),
        "evaluation": asdict(plan.evaluation),
        "classifier": asdict(plan.classifier),
    }
    return {**found.as_dict(), "memory_size": memory, "machine": machine, "workload": workload}


def _evaluations(
    plan: Plan, shot: int, ours: Worker, reference: Worker, found: Measurements, progress: Progress
) -> None:
    """Compare an evaluation of VSM with one of the reference ProtoNet on fewer episodes."""
    sizes = asdict(replace(plan.evaluation, shot=shot))
    works = {
        "evaluation": ours.prepare("evaluation", **sizes),
        "reference": reference.prepare("reference_evaluation", **sizes),
    }
    progress.start(f"evaluation, {shot}-shot", plan.evaluation_pairs)
    times = interleaved(works, plan.evaluation_pairs, warm_up=0, progress=progress)
    names = {
        f"evaluation_2k_{shot}shot": "evaluation",
        f"reference_evaluation_600_{shot}shot": "reference",
    }
    divided = {f"evaluation_2k_vs_reference_600_{shot}shot": ("evaluation", "reference")}
    found.add(times, names, divided)


def _against_reference(
    plan: Plan, size: int, ours: Worker, found: Measurements, progress: Progress
) -> None:
    """Compare a VSM step with the reference on the same tasks, one or all of them at once."""
    sizes = asdict(replace(plan.step, image_size=size))
    own = {
        "step": ours.prepare("step", method="vsm", **sizes),
        "arithmetic": ours.prepare("arithmetic", method="vsm", **sizes),
        "conjugate": ours.prepare("step", method="vsm", inference="conjugate", **sizes),
        "backbone": ours.prepare("backbone", **sizes),
    }
    interleaved(own, 0, plan.warm_up)
    times: dict[str, list[float]] = {}
    progress.start(f"step and reference ProtoNet, {size}×{size}", plan.pairs)
    for rounds in _shares(plan.pairs, plan.reference_processes):
        with Worker(False, plan.threads) as one, Worker(False, plan.threads) as other:
            tasks = plan.step.tasks
            references = {
                "reference": one.prepare("reference_steps", tasks_at_once=1, **sizes),
                "batched": other.prepare("reference_steps", tasks_at_once=tasks, **sizes),
            }
            interleaved(references, 0, plan.warm_up // 2)
            measured = interleaved(own | references, rounds, 0, progress=progress)
        for name, values in measured.items():
            times.setdefault(name, []).extend(values)
    names = {
        "vsm_step_beside_reference": "step",
        "reference_protonet": "reference",
        "reference_protonet_batched": "batched",
        "vsm_conjugate_step_beside_reference": "conjugate",
        "backbone_beside_reference": "backbone",
        "arithmetic_of_a_step": "arithmetic",
    }
    divided = {
        "vsm_step_vs_reference_protonet": ("step", "reference"),
        "vsm_step_vs_reference_protonet_batched": ("step", "batched"),
        "vsm_conjugate_step_vs_reference_protonet": ("conjugate", "reference"),
        "backbone_vs_reference_protonet": ("backbone", "reference"),
        "arithmetic_vs_vsm_step": ("arithmetic", "step"),
        "arithmetic_vs_reference_protonet": ("arithmetic", "reference"),
    }
    found.add(times, _suffixed(names, size), _suffixed(divided, size))


def _shares(total: int, most: int) -> list[int]:
    """Split ``total`` turns as evenly as can be among at most so many processes."""
    number = min(total, most)
    return [total // number + (place < total % number) for place in range(number)]


def _suffixed(names: Mapping[str, Value], suffix: object) -> dict[str, Value]:
    return {f"{name}_{suffix}": value for name, value in names.items()}


def _classifiers(plan: Plan, ours: Worker, found: Measurements, progress: Progress) -> None:
    """Compare classifying with embedding alone, and explaining with predicting."""
    for model in plan.models:
        sizes = asdict(replace(plan.classifier, model=model))
        works = {work: ours.prepare(work, **sizes) for work in CLASSIFIER_WORKS}
        progress.start(f"classifier, {model}", plan.pairs)
        times = interleaved(works, plan.pairs, plan.warm_up, progress=progress)
        names = {work: work for work in CLASSIFIER_WORKS}
        found.add(times, _suffixed(names, model), _suffixed(CLASSIFIER_RATIOS, model))
    for name in CLASSIFIER_RATIOS:
        found.add_worst(name, *(f"{name}_{model}" for model in plan.models))


def _memory_sizes(plan: Plan, ours: Worker, progress: Progress) -> list[dict[str, Any]]:
    """Return the milliseconds of recall and consolidation for every size of the memory."""
    works = {
        f"{work} {slots}": ours.prepare(work, **asdict(replace(plan.step, remembered=slots)))
        for slots in plan.slots
        for work in MEMORY_WORKS
    }
    progress.start("recall and consolidation", plan.memory_rounds)
    times = interleaved(works, plan.memory_rounds, plan.warm_up, progress=progress)
    return [
        {
            "slots": slots,
            **{w: asdict(quartiles(times[f"{w} {slots}"]).times(1000)) for w in MEMORY_WORKS},
        }
        for slots in plan.slots
    ]


def _against_backbone(
    plan: Plan, size: int, ours: Worker, found: Measurements, progress: Progress
) -> None:
    """Compare a VSM step with forward and backward of its backbone, in one process."""
    sizes = asdict(replace(plan.step, image_size=size))
    works = {
        "step": ours.prepare("step", method="vsm", **sizes),
        "backbone": ours.prepare("backbone", **sizes),
    }
    progress.start(f"step and bare backbone, {size}×{size}", plan.pairs)
    times = interleaved(works, plan.pairs, plan.warm_up, progress=progress)
    names = {f"vsm_step_{size}": "step", f"backbone_{size}": "backbone"}
    found.add(times, names, {f"vsm_step_vs_backbone_{size}": ("step", "backbone")})


def measure_briefly(
    workload: StepWorkload,
    rounds: int,
    seconds: float | None = None,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, Any]:
    """Measure steps of three methods, their backbone, the reference ProtoNet, and embedding.

    Args:
        workload: the step.
        rounds: turns of each.
        seconds: no turn but the first begins after so many; unset: all are done.
        threads: of torch; unset: torch's own choice.
        progress: told of every round.
    """
    if rounds < 1:
        raise SettingsError(f"repeats: must be at least 1, got {rounds}")
    found, sizes = Measurements(), asdict(workload)
    with _two_workers(threads) as (ours, reference):
        steps = {
            name: ours.prepare("step", **chosen, **sizes) for name, chosen in STEPS_SHOWN.items()
        }
        works = {
            "backbone": ours.prepare("backbone", **sizes),
            **steps,
            "reference_protonet": reference.prepare("reference_steps", tasks_at_once=1, **sizes),
            "embedding": ours.prepare("embedding", **sizes),
        }
        progress.start("benchmark", rounds)
        times = interleaved(works, rounds, warm_up=1, seconds=seconds, progress=progress)
        machine = _machine(ours, reference)
    names = {f"{name}_step" if name in STEPS_SHOWN else name: name for name in works}
    divided = {f"{name}_step_vs_backbone": (name, "backbone") for name in STEPS_SHOWN}
    for name in ("vsm_conjugate", "vsm"):
        divided[f"{name}_step_vs_reference_protonet"] = (name, "reference_protonet")
    found.add(times, names, divided)
    return {
        **found.as_dict(),
        "images_per_second": workload.num_images / quartiles(times["embedding"]).median,
        "machine": machine,
        "workload": asdict(workload),
    }


@contextmanager
def _two_workers(threads: int | None) -> Iterator[tuple[Worker, Worker]]:
    """Yield our process and that of the reference."""
    if threads is not None and threads < 1:
        raise SettingsError(f"threads: must be at least 1, got {threads}")
    with Worker(True, threads) as ours, Worker(False, threads) as reference:
        yield ours, reference


def _machine(ours: Worker, reference: Worker) -> Mapping[str, Any]:
    """Return what a reader of the times should know, and nothing that identifies the machine."""
    return {
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **ours.metadata,
        "reference_keeps_allocations": reference.metadata["keeps_allocations"],
    }
