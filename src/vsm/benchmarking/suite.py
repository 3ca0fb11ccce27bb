"""What is measured together: the short comparison for a user's machine, and all of it.

Nothing here imports torch or computes: works take turns in separate processes, ours with the
allocator as ``vsm train`` sets it and the reference with the default one.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vsm.benchmarking.processes import Worker
from vsm.benchmarking.timing import Quartiles, Timed, interleaved, quartiles
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
OUR_STEP, REFERENCE_STEPS = "vsm_step_beside_reference", "reference_protonet"
REFERENCE_RATIOS = {
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


@dataclass
class Measurements:
    """Times and ratios by name."""

    milliseconds: dict[str, Quartiles] = field(default_factory=dict)
    ratios: dict[str, Quartiles] = field(default_factory=dict)

    def add(
        self,
        times: Mapping[str, Sequence[float]],
        divided: Mapping[str, tuple[str, str]],
        suffix: str = "",
    ) -> None:
        """Add what was timed.

        Args:
            times: seconds of each work, round by round.
            divided: what a ratio is called, and of which two works it is, pair by pair.
            suffix: of the names of times and ratios.
        """
        for name, seconds in times.items():
            self.milliseconds[name + suffix] = quartiles([1000 * s for s in seconds])
        for name, (above, below) in divided.items():
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


def measure(plan: Plan, progress: Progress = NULL_PROGRESS) -> dict[str, Any]:
    """Measure all of ``plan`` in one run; return what ``benchmarks/results.json`` holds."""
    found = Measurements()
    with _two_workers(plan.threads) as (ours, reference):
        for shot in SHOTS:  # first, so that a mistake in the data shows at once
            episodes = replace(plan.evaluation, shot=shot)
            works = {
                "evaluation_2k": ours.prepare("evaluation", episodes),
                "reference_evaluation_600": reference.prepare("reference_evaluation", episodes),
            }
            progress.start(f"evaluation, {shot}-shot", plan.evaluation_pairs)
            times = interleaved(works, plan.evaluation_pairs, progress=progress)
            ratio = {
                "evaluation_2k_vs_reference_600": ("evaluation_2k", "reference_evaluation_600")
            }
            found.add(times, ratio, f"_{shot}shot")
        for size in REFERENCE_SIZES:
            times = _beside_reference(plan, size, ours, progress)
            found.add(times, REFERENCE_RATIOS, f"_{size}")
        for model in plan.models:
            task = replace(plan.classifier, model=model)
            works = {work: ours.prepare(work, task) for work in CLASSIFIER_WORKS}
            progress.start(f"classifier, {model}", plan.pairs)
            times = interleaved(works, plan.pairs, plan.warm_up, progress=progress)
            found.add(times, CLASSIFIER_RATIOS, f"_{model}")
        memory = _memory_sizes(plan, ours, progress)
        for size in BACKBONE_SIZES:  # the largest images last: the allocator keeps what they took
            step = replace(plan.step, image_size=size)
            works = {
                "vsm_step": ours.prepare("step", step, "vsm"),
                "backbone": ours.prepare("backbone", step),
            }
            progress.start(f"step and bare backbone, {size}×{size}", plan.pairs)
            times = interleaved(works, plan.pairs, plan.warm_up, progress=progress)
            found.add(times, {"vsm_step_vs_backbone": ("vsm_step", "backbone")}, f"_{size}")
        machine = _machine(ours, reference)
    found.add_worst("evaluation_2k_vs_reference_600", *(f"_{shot}shot" for shot in SHOTS))
    found.add_worst("vsm_step_vs_reference_protonet", *(f"_{size}" for size in REFERENCE_SIZES))
    for name in CLASSIFIER_RATIOS:
        found.add_worst(name, *(f"_{model}" for model in plan.models))
    workload = {name: asdict(plan)[name] for name in ("step", "evaluation", "classifier")}
    return {**found.as_dict(), "memory_size": memory, "machine": machine, "workload": workload}


def _beside_reference(
    plan: Plan, size: int, ours: Worker, progress: Progress
) -> dict[str, list[float]]:
    """Time a VSM step and the reference on the same tasks, one or all of them at once."""
    step = replace(plan.step, image_size=size)
    own = {
        OUR_STEP: ours.prepare("step", step, "vsm"),
        "arithmetic_of_a_step": ours.prepare("arithmetic", step, "vsm"),
        "vsm_conjugate_step_beside_reference": ours.prepare("step", step, "vsm", "conjugate"),
        "backbone_beside_reference": ours.prepare("backbone", step),
    }
    interleaved(own, 0, plan.warm_up)
    times: dict[str, list[float]] = {}
    progress.start(f"step and reference ProtoNet, {size}×{size}", plan.pairs)
    for rounds in _shares(plan.pairs, REFERENCE_PROCESSES):
        with Worker(False, plan.threads) as one, Worker(False, plan.threads) as other:
            references = {
                REFERENCE_STEPS: one.prepare("reference_steps", step, 1),
                "reference_protonet_batched": other.prepare("reference_steps", step, step.tasks),
            }
            interleaved(references, 0, plan.warm_up // 2)
            measured = interleaved(own | references, rounds, progress=progress)
        for name, values in measured.items():
            times.setdefault(name, []).extend(values)
    return times


def _shares(total: int, most: int) -> list[int]:
    """Split ``total`` turns as evenly as possible among at most ``most`` processes."""
    number = min(total, most)
    return [total // number + (place < total % number) for place in range(number)]


def _memory_sizes(plan: Plan, ours: Worker, progress: Progress) -> list[dict[str, Any]]:
    """Return the milliseconds of recall and consolidation for every size of the memory."""
    works: dict[str, Timed] = {}
    for slots in plan.slots:
        workload = replace(plan.step, remembered=slots)
        works |= {f"{work} {slots}": ours.prepare(work, workload) for work in MEMORY_WORKS}
    progress.start("recall and consolidation", plan.memory_rounds)
    found = Measurements()
    found.add(interleaved(works, plan.memory_rounds, plan.warm_up, progress=progress), {})
    return [
        {
            "slots": slots,
            **{work: asdict(found.milliseconds[f"{work} {slots}"]) for work in MEMORY_WORKS},
        }
        for slots in plan.slots
    ]


def measure_briefly(
    workload: StepWorkload,
    rounds: int,
    seconds: float | None = None,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, Any]:
    """Measure steps of three methods, their backbone, the reference ProtoNet, and embedding.

    ``seconds`` and ``threads`` are as in :func:`vsm.benchmarking.timing.interleaved` and
    :class:`Plan`.
    """
    if rounds < 1:
        raise SettingsError(f"repeats: must be at least 1, got {rounds}")
    found = Measurements()
    with _two_workers(threads) as (ours, reference):
        works = {
            "backbone": ours.prepare("backbone", workload),
            **{
                f"{name}_step": ours.prepare("step", workload, **chosen)
                for name, chosen in STEPS_SHOWN.items()
            },
            "reference_protonet": reference.prepare("reference_steps", workload, 1),
            "embedding": ours.prepare("embedding", workload),
        }
        progress.start("benchmark", rounds)
        times = interleaved(works, rounds, 1, seconds, progress)
        machine = _machine(ours, reference)
    divided = {f"{name}_step_vs_backbone": (f"{name}_step", "backbone") for name in STEPS_SHOWN}
    for name in ("vsm_conjugate", "vsm"):
        divided[f"{name}_step_vs_reference_protonet"] = (f"{name}_step", "reference_protonet")
    found.add(times, divided)
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


def _machine(ours: Worker, reference: Worker) -> dict[str, Any]:
    """Return what a reader of the times should know, and nothing that identifies the machine."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **ours.metadata,
        "reference_keeps_allocations": reference.metadata["keeps_allocations"],
    }
