"""What is measured together: the short comparison for a user's machine, and the whole of it.

Nothing here imports torch, and nothing here computes: works take turns in processes of their own,
ours with the allocator as ``vsm train`` sets it and the peer's with the default one.
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vsm.benchmarking.processes import Worker
from vsm.benchmarking.timing import Advance, Spread, interleaved, ratios, spread
from vsm.benchmarking.workloads import ClassifierWorkload, EvaluationWorkload, StepWorkload
from vsm.errors import SettingsError

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

Counting = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows a title and counts rounds, see :func:`vsm.cli.output.counting`."""


@contextmanager
def uncounted(_: str, __: int) -> Iterator[Advance]:
    """Show nothing."""
    yield lambda _: None


@dataclass
class Measurements:
    """Times and ratios by name."""

    milliseconds: dict[str, Spread] = field(default_factory=dict)
    ratios: dict[str, Spread] = field(default_factory=dict)

    def add_times(self, name: str, seconds: Sequence[float]) -> None:
        """Note how long something took, time by time."""
        self.milliseconds[name] = spread(seconds).times(1000)

    def add_ratio(self, name: str, above: Sequence[float], below: Sequence[float]) -> None:
        """Note ``above`` ÷ ``below``, pair by pair."""
        self.ratios[name] = spread(ratios(above, below))

    def add_worst(self, name: str, *others: str) -> None:
        """Note the ratio with the largest median among ``others`` under another name."""
        self.ratios[name] = max((self.ratios[o] for o in others), key=lambda s: s.median)

    def as_dict(self) -> dict[str, Any]:
        """Return the medians of the ratios, and the spreads of everything."""
        return {
            "ratios": {name: found.median for name, found in self.ratios.items()},
            "spreads": {name: asdict(found) for name, found in self.ratios.items()},
            "milliseconds": {name: asdict(found) for name, found in self.milliseconds.items()},
        }


@dataclass(frozen=True)
class Plan:
    """The whole measurement.

    Attributes:
        step: one training step; its image size is set to each of ``sizes``.
        evaluation: the episodes; their shot is set to each of ``shots``.
        sizes: images compared with the bare backbone.
        peer_sizes: images compared with a peer-style ProtoNet.
        shots: support images of the evaluations compared with a peer's.
        slots: sizes of the memory whose cost is measured.
        classifier: what the classifiers of shipped models are asked, with each of ``models``.
        models: names of shipped models.
        pairs: turns of a training step.
        peer_processes: among which the turns of a peer's step are shared; each trains and does
            nothing else. How much memory glibc gives back and asks for again differs from process
            to process, and leftovers of other work can keep it from doing so.
        evaluation_pairs: turns of an evaluation.
        memory_rounds: turns of recall and consolidation.
        warm_up: turns of a training step, a recall or a consolidation that do not count.
        threads: of torch; unset: torch's own choice.
    """

    step: StepWorkload = field(default_factory=StepWorkload)
    evaluation: EvaluationWorkload = field(default_factory=EvaluationWorkload)
    sizes: tuple[int, ...] = (28, 32, 84)
    peer_sizes: tuple[int, ...] = (28, 32)
    shots: tuple[int, ...] = (1, 5)
    slots: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    classifier: ClassifierWorkload = field(default_factory=ClassifierWorkload)
    models: tuple[str, ...] = ("cifar-fs-vsm", "omniglot-vsm")
    pairs: int = 20
    peer_processes: int = 10
    evaluation_pairs: int = 3
    memory_rounds: int = 7
    warm_up: int = 4
    threads: int | None = None


def measure(plan: Plan, counting: Counting = uncounted) -> dict[str, Any]:
    """Measure all of ``plan`` in one run; return what ``benchmarks/results.json`` holds."""
    found = Measurements()
    with _two_workers(plan.threads) as (ours, peer):
        for shot in plan.shots:  # first, so that a mistake in the data shows at once
            _evaluations(plan, shot, ours, peer, found, counting)
        for size in plan.peer_sizes:
            _against_peer(plan, size, ours, found, counting)
        _classifiers(plan, ours, found, counting)
        memory = _memory_sizes(plan, ours, counting)
        for size in plan.sizes:  # the largest images last: the allocator keeps what they took
            _against_backbone(plan, size, ours, found, counting)
        machine = _machine(ours, peer)
    found.add_worst(
        "vsm_step_vs_peer_protonet", *(f"vsm_step_vs_peer_protonet_{s}" for s in plan.peer_sizes)
    )
    found.add_worst(
        "evaluation_2k_vs_peer_600", *(f"evaluation_2k_vs_peer_600_{s}shot" for s in plan.shots)
    )
    workload = {
        "step": asdict(plan.step),
        "evaluation": asdict(plan.evaluation),
        "classifier": asdict(plan.classifier),
    }
    return {**found.as_dict(), "memory_size": memory, "machine": machine, "workload": workload}


def measure_classifiers(plan: Plan, counting: Counting = uncounted) -> dict[str, Any]:
    """Measure the classifiers of ``plan`` alone."""
    found = Measurements()
    with _two_workers(plan.threads) as (ours, peer):
        _classifiers(plan, ours, found, counting)
        machine = _machine(ours, peer)
    return {**found.as_dict(), "machine": machine, "workload": asdict(plan.classifier)}


def _classifiers(plan: Plan, ours: Worker, found: Measurements, counting: Counting) -> None:
    """Compare classifying with embedding alone, and explaining with predicting."""
    for model in plan.models:
        sizes = asdict(replace(plan.classifier, model=model))
        works = {work: ours.prepare(work, **sizes) for work in CLASSIFIER_WORKS}
        with counting(f"classifier, {model}", plan.pairs) as advance:
            times = interleaved(works, plan.pairs, plan.warm_up, advance=advance)
        for work in CLASSIFIER_WORKS:
            found.add_times(f"{work}_{model}", times[work])
        for name, (above, below) in CLASSIFIER_RATIOS.items():
            found.add_ratio(f"{name}_{model}", times[above], times[below])
    for name in CLASSIFIER_RATIOS:
        found.add_worst(name, *(f"{name}_{model}" for model in plan.models))


def _against_backbone(
    plan: Plan, size: int, ours: Worker, found: Measurements, counting: Counting
) -> None:
    """Compare a VSM step with forward and backward of its backbone, in one process."""
    sizes = asdict(replace(plan.step, image_size=size))
    works = {
        "step": ours.prepare("step", method="vsm", **sizes),
        "backbone": ours.prepare("backbone", **sizes),
    }
    with counting(f"step and bare backbone, {size}×{size}", plan.pairs) as advance:
        times = interleaved(works, plan.pairs, plan.warm_up, advance=advance)
    found.add_times(f"vsm_step_{size}", times["step"])
    found.add_times(f"backbone_{size}", times["backbone"])
    found.add_ratio(f"vsm_step_vs_backbone_{size}", times["step"], times["backbone"])


def _against_peer(
    plan: Plan, size: int, ours: Worker, found: Measurements, counting: Counting
) -> None:
    """Compare a VSM step with a peer's ProtoNet on the same tasks, one or all of them at once."""
    sizes = asdict(replace(plan.step, image_size=size))
    own = {
        "step": ours.prepare("step", method="vsm", **sizes),
        "arithmetic": ours.prepare("arithmetic", method="vsm", **sizes),
        "conjugate": ours.prepare("step", method="vsm", inference="conjugate", **sizes),
        "backbone": ours.prepare("backbone", **sizes),
    }
    interleaved(own, 0, plan.warm_up)
    times: dict[str, list[float]] = {}
    with counting(f"step and peer-style ProtoNet, {size}×{size}", plan.pairs) as advance:
        for rounds in _shares(plan.pairs, plan.peer_processes):
            with Worker(False, plan.threads) as one, Worker(False, plan.threads) as other:
                peers = {
                    "peer": one.prepare("peer_steps", tasks_at_once=1, **sizes),
                    "batched": other.prepare("peer_steps", tasks_at_once=plan.step.tasks, **sizes),
                }
                interleaved(peers, 0, plan.warm_up // 2)
                measured = interleaved(own | peers, rounds, 0, advance=advance)
            for name, values in measured.items():
                times.setdefault(name, []).extend(values)
    found.add_times(f"vsm_step_beside_peer_{size}", times["step"])
    found.add_times(f"peer_protonet_{size}", times["peer"])
    found.add_times(f"peer_protonet_batched_{size}", times["batched"])
    found.add_ratio(f"vsm_step_vs_peer_protonet_{size}", times["step"], times["peer"])
    found.add_ratio(f"vsm_step_vs_peer_protonet_batched_{size}", times["step"], times["batched"])
    found.add_times(f"vsm_conjugate_step_beside_peer_{size}", times["conjugate"])
    found.add_ratio(
        f"vsm_conjugate_step_vs_peer_protonet_{size}", times["conjugate"], times["peer"]
    )
    found.add_times(f"backbone_beside_peer_{size}", times["backbone"])
    found.add_ratio(f"backbone_vs_peer_protonet_{size}", times["backbone"], times["peer"])
    found.add_times(f"arithmetic_of_a_step_{size}", times["arithmetic"])
    found.add_ratio(f"arithmetic_vs_vsm_step_{size}", times["arithmetic"], times["step"])
    found.add_ratio(f"arithmetic_vs_peer_protonet_{size}", times["arithmetic"], times["peer"])


def _shares(total: int, most: int) -> list[int]:
    """Split ``total`` turns as evenly as can be among at most so many processes."""
    number = min(total, most)
    return [total // number + (place < total % number) for place in range(number)]


def _evaluations(
    plan: Plan, shot: int, ours: Worker, peer: Worker, found: Measurements, counting: Counting
) -> None:
    """Compare an evaluation of VSM with a peer's of ProtoNet on fewer episodes."""
    sizes = asdict(replace(plan.evaluation, shot=shot))
    works = {
        "evaluation": ours.prepare("evaluation", **sizes),
        "peer": peer.prepare("peer_evaluation", **sizes),
    }
    with counting(f"evaluation, {shot}-shot", plan.evaluation_pairs) as advance:
        times = interleaved(works, plan.evaluation_pairs, warm_up=0, advance=advance)
    found.add_times(f"evaluation_2k_{shot}shot", times["evaluation"])
    found.add_times(f"peer_evaluation_600_{shot}shot", times["peer"])
    found.add_ratio(f"evaluation_2k_vs_peer_600_{shot}shot", times["evaluation"], times["peer"])


def _memory_sizes(plan: Plan, ours: Worker, counting: Counting) -> list[dict[str, Any]]:
    """Return the milliseconds of recall and consolidation for every size of the memory."""
    works = {
        (slots, work): ours.prepare(work, **asdict(replace(plan.step, remembered=slots)))
        for slots in plan.slots
        for work in MEMORY_WORKS
    }
    named = {f"{work} {slots}": timed for (slots, work), timed in works.items()}
    with counting("recall and consolidation", plan.memory_rounds) as advance:
        times = interleaved(named, plan.memory_rounds, plan.warm_up, advance=advance)
    return [
        {
            "slots": slots,
            **{w: asdict(spread(times[f"{w} {slots}"]).times(1000)) for w in MEMORY_WORKS},
        }
        for slots in plan.slots
    ]


def measure_briefly(
    workload: StepWorkload,
    rounds: int,
    seconds: float | None = None,
    threads: int | None = None,
    counting: Counting = uncounted,
) -> dict[str, Any]:
    """Measure steps of three methods, their backbone, a peer's ProtoNet, and embedding.

    Args:
        workload: the step.
        rounds: turns of each.
        seconds: no turn but the first begins after so many; unset: all are done.
        threads: of torch; unset: torch's own choice.
        counting: shows progress.
    """
    if rounds < 1:
        raise SettingsError(f"repeats: must be at least 1, got {rounds}")
    found, sizes = Measurements(), asdict(workload)
    with _two_workers(threads) as (ours, peer):
        works = {
            "backbone": ours.prepare("backbone", **sizes),
            **{
                name: ours.prepare("step", **chosen, **sizes)
                for name, chosen in STEPS_SHOWN.items()
            },
            "peer_protonet": peer.prepare("peer_steps", tasks_at_once=1, **sizes),
            "embedding": ours.prepare("embedding", **sizes),
        }
        with counting("benchmark", rounds) as advance:
            times = interleaved(works, rounds, warm_up=1, seconds=seconds, advance=advance)
        machine = _machine(ours, peer)
    for name, values in times.items():
        found.add_times(f"{name}_step" if name in STEPS_SHOWN else name, values)
    for name in STEPS_SHOWN:
        found.add_ratio(f"{name}_step_vs_backbone", times[name], times["backbone"])
    for name in ("vsm_conjugate", "vsm"):
        found.add_ratio(f"{name}_step_vs_peer_protonet", times[name], times["peer_protonet"])
    images_per_second = workload.num_images / spread(times["embedding"]).median
    return {
        **found.as_dict(),
        "images_per_second": images_per_second,
        "machine": machine,
        "workload": asdict(workload),
    }


@contextmanager
def _two_workers(threads: int | None) -> Iterator[tuple[Worker, Worker]]:
    """Yield our process and the peer's."""
    if threads is not None and threads < 1:
        raise SettingsError(f"threads: must be at least 1, got {threads}")
    with Worker(True, threads) as ours, Worker(False, threads) as peer:
        yield ours, peer


def _machine(ours: Worker, peer: Worker) -> Mapping[str, Any]:
    """Return what a reader of the times should know, and nothing that identifies the machine."""
    return {
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **ours.facts,
        "peer_keeps_allocations": peer.facts["keeps_allocations"],
    }
