"""The benchmark: a job for each group of works, and the page of what they took.

Times are those of one machine and one state of the code, so both are part of what names a job.
Needs matplotlib.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vsm.benchmarking.suite import MEMORY_WORKS, Plan, describe_machine
from vsm.benchmarking.timing import Quartiles
from vsm.experiments.document import Block, Heading, Picture, Table, Text, write_markdown
from vsm.experiments.jobs import Job
from vsm.experiments.plots import svg
from vsm.experiments.provenance import measured_code
from vsm.experiments.store import JobStore
from vsm.system.files import write_text

PICTURE = "memory_size"
TARGETS = {
    "vsm_step_vs_backbone_28": 1.35,
    "vsm_step_vs_backbone_32": 1.25,
    "vsm_step_vs_backbone_84": 1.10,
    "vsm_step_vs_reference_protonet": 0.60,
    "evaluation_2k_vs_reference_600": 1.00,
    "classifying_vs_embedding": 1.10,
    "explaining_vs_predicting": 1.10,
}
MEMORY_TITLES = {
    "recall": "recall",
    "recall_with_gradient": "recall in training (forward and backward)",
    "consolidation": "consolidation (forward and backward)",
}


class SpeedPlan:
    """The jobs of ``plan`` on this machine, with the code as it is now."""

    def __init__(self, plan: Plan) -> None:
        self.plan, groups = plan, plan.groups()
        self.machine, code = describe_machine(plan.threads), measured_code()
        self.commit = code["commit"]
        where = {"machine": self.machine, **code}
        self.jobs = [Job("speed", group.title, {**group.recipe(), **where}) for group in groups]

    def results(self, store: JobStore) -> dict[str, Any]:
        """Return what ``results.json`` holds, of finished jobs."""
        found = self.plan.results(store.outcome(job)["seconds"] for job in self.jobs)
        return {**found, "machine": self.machine, "commit": self.commit}


def write_results(results: dict[str, Any], folder: Path) -> Path:
    """Write ``results.json``, the page and its picture; return the page."""
    write_text(folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_markdown(folder / "results.md", _page(results))
    return folder / "results.md"


def _page(results: dict[str, Any]) -> list[Block]:
    """Return all results as blocks."""
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
    memory = [
        [f"{row['slots']:,}", *(Quartiles(**row[work]).describe(2) for work in MEMORY_WORKS)]
        for row in results["memory_size"]
    ]
    drawn = svg(_draw(results["memory_size"]), PICTURE)
    caption = "Milliseconds of recall and consolidation against slots"
    return [
        Heading(1, "Speed"),
        Text("Written by `make bench`; what each line means: [benchmarks](../docs/benchmarks.md)."),
        Text("\n".join(f"- {line}" for line in _conditions(results))),
        Heading(2, "Ratios"),
        Table(["", "median (quartiles)", "target", "pairs"], ratios),
        Heading(2, "Milliseconds"),
        Table(["", "median (quartiles)"], times),
        Heading(2, "Cost against the size of the memory, in milliseconds"),
        Table(["slots", *MEMORY_TITLES.values()], memory),
        Picture(PICTURE, drawn, caption, ".", ".svg"),
    ]


def _conditions(results: dict[str, Any]) -> list[str]:
    """Say what was measured where, line by line."""
    machine, workload = results["machine"], results["workload"]
    step, evaluation, classifier = (workload[part] for part in ("step", "evaluation", "classifier"))
    return [
        f"{machine['cores']} cores with {machine['vector_instructions']}, torch's threads: "
        f"{machine['threads']}",
        f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}",
        f"allocations kept: {machine['keeps_allocations']} (reference: "
        f"{machine['reference_keeps_allocations']})",
        *([f"commit {results['commit']}"] if results["commit"] else []),
        f"a step: {step['tasks']} tasks, {step['way']}-way {step['shot']}-shot with "
        f"{step['queries']} queries per class, conv4-{step['channels']}, J = "
        f"{step['memory_samples']}, L = {step['prototype_samples']}, {step['remembered']} classes "
        "remembered",
        *_pretraining_condition(workload.get("pretraining")),
        f"an evaluation: {evaluation['data']}, {evaluation['episodes']:,} episodes of VSM with J = "
        f"{evaluation['memory_samples']} and L = {evaluation['prototype_samples']}, "
        f"{evaluation['reference_episodes']:,} of the reference",
        f"a classifier: {classifier['way']} classes of {classifier['shot']} examples each, and as "
        "many pictures to classify as the name of its line says",
    ]


def _pretraining_condition(workload: dict[str, Any] | None) -> list[str]:
    """Say what a step of pre-training is, where one was measured."""
    if workload is None:
        return []
    return [
        f"a step of pre-training: {workload['images']} images of 32×32 and {workload['classes']} "
        f"classes, resnet12-{workload['channels']}"
    ]


def _draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw the cost of recall and consolidation against the size of the memory."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    slots = [row["slots"] for row in rows]
    for work in MEMORY_WORKS:
        found = [Quartiles(**row[work]) for row in rows]
        [line] = axes.plot(slots, [q.median for q in found], "o-", label=MEMORY_TITLES[work])
        low, high = [q.low for q in found], [q.high for q in found]
        axes.fill_between(slots, low, high, alpha=0.2, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="slots", ylabel="milliseconds per batch")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return figure
