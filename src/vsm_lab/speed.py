"""The jobs and the result page of the full benchmark suite. Needs matplotlib.

Times belong to one machine and one state of the code, so both are part of a job's name.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vsm.system.files import write_text
from vsm_lab.benchmarking.suite import Plan, describe_conditions, describe_machine
from vsm_lab.benchmarking.timing import Quartiles
from vsm_lab.document import Block, Heading, Picture, Table, Text, write_markdown
from vsm_lab.jobs import Job
from vsm_lab.plots import svg
from vsm_lab.provenance import measured_code
from vsm_lab.store import JobStore

PLOT = "memory_size"
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
        self.plan = plan
        self.machine, code = describe_machine(plan.threads), measured_code()
        self.commit = code["commit"]
        where = {"machine": self.machine, **code}
        self.jobs = [
            Job("speed", group.title, {**group.recipe(), **where}) for group in plan.groups()
        ]

    def results(self, store: JobStore) -> dict[str, Any]:
        """Return the content of ``results.json`` for finished jobs."""
        found = self.plan.results(store.outcome(job)["seconds"] for job in self.jobs)
        return {**found, "machine": self.machine, "commit": self.commit}


def write_results(results: dict[str, Any], folder: Path) -> Path:
    """Write ``results.json``, ``results.md`` and its plot; return the page."""
    write_text(folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_markdown(folder / "results.md", _page(results))
    return folder / "results.md"


def _page(results: dict[str, Any]) -> list[Block]:
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
        [f"{row['slots']:,}", *(Quartiles(**row[name]).describe(2) for name in MEMORY_TITLES)]
        for row in results["memory_size"]
    ]
    plot = svg(_plot(results["memory_size"]), PLOT)
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
        Picture(PLOT, plot, caption, ".", ".svg"),
    ]


def _conditions(results: dict[str, Any]) -> list[str]:
    machine, workload = results["machine"], results["workload"]
    step, evaluation, classifier, pretraining = (
        workload[part] for part in ("step", "evaluation", "classifier", "pretraining")
    )
    return [
        *describe_conditions(results),
        f"allocations kept: {machine['keeps_allocations']} (reference: "
        f"{machine['reference_keeps_allocations']})",
        f"training step: {step['tasks']} tasks, {step['way']}-way {step['shot']}-shot with "
        f"{step['queries']} queries per class, conv4-{step['channels']}, J = "
        f"{step['memory_samples']}, L = {step['prototype_samples']}, {step['remembered']} classes "
        "remembered",
        f"pre-training step: {pretraining['images']} images of 32×32, {pretraining['classes']} "
        f"classes, resnet12-{pretraining['channels']}",
        f"evaluation: {evaluation['data']}, {evaluation['episodes']:,} episodes of VSM with J = "
        f"{evaluation['memory_samples']} and L = {evaluation['prototype_samples']}, "
        f"{evaluation['reference_episodes']:,} of the reference",
        f"classifier: {classifier['way']} classes of {classifier['shot']} examples each; the last "
        "number of a name is the number of images to classify",
    ]


def _plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plot the cost of recall and consolidation against the size of the memory."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    slots = [row["slots"] for row in rows]
    for name, title in MEMORY_TITLES.items():
        found = [Quartiles(**row[name]) for row in rows]
        [line] = axes.plot(slots, [q.median for q in found], "o-", label=title)
        low, high = [q.low for q in found], [q.high for q in found]
        axes.fill_between(slots, low, high, alpha=0.2, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="slots", ylabel="milliseconds per batch")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return figure
