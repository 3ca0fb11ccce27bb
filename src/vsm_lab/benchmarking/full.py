"""The full suite as jobs, and its result page. Needs matplotlib.

Times belong to one machine and one state of the code, so both are part of a job's name.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vsm.system.files import write_text
from vsm_lab.benchmarking.suite import (
    MEMORY_BENCHMARKS,
    SLOTS,
    Group,
    describe_conditions,
    describe_machine,
    summarize,
)
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


def speed_jobs(groups: Sequence[Group]) -> list[Job]:
    """Return a job for each group, on this machine and with the code as it is now."""
    where = {"machine": describe_machine(groups[0].threads), **measured_code()}
    return [Job("speed", one.title, {"group": asdict(one), **where}) for one in groups]


def collect_results(jobs: Sequence[Job], store: JobStore) -> dict[str, Any]:
    """Return the content of ``results.json`` for finished jobs."""
    groups = [Group(**job.recipe["group"]) for job in jobs]
    times = [store.outcome(job)["seconds"] for job in jobs]
    found = summarize(list(zip(groups, times, strict=True)))
    memory = [
        {"slots": n, **{one: found["milliseconds"].pop(f"{one} {n}") for one in MEMORY_BENCHMARKS}}
        for n in SLOTS
    ]
    recipe = jobs[0].recipe
    return {
        **found,
        "memory_size": memory,
        "machine": recipe["machine"],
        "commit": recipe["commit"],
    }


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
    conditions = [
        *describe_conditions(results),
        f"allocations kept: {results['machine']['keeps_allocations']} (reference: False)",
    ]
    caption = "Milliseconds of recall and consolidation against slots"
    return [
        Heading(1, "Speed"),
        Text(
            "Written by `make bench`; what each line means, and all sizes: "
            "[benchmarks](../docs/benchmarks.md)."
        ),
        Text("\n".join(f"- {line}" for line in conditions)),
        Heading(2, "Ratios"),
        Table(["", "median (quartiles)", "target", "pairs"], ratios),
        Heading(2, "Milliseconds"),
        Table(["", "median (quartiles)"], times),
        Heading(2, "Cost against the size of the memory, in milliseconds"),
        Table(["slots", *MEMORY_TITLES.values()], memory),
        Picture(PLOT, svg(_plot(results["memory_size"]), PLOT), caption, ".", ".svg"),
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
