"""The full suite as jobs, and its result page.

Times belong to one machine and one state of the code, so both are part of a job's name.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vsm.system.files import write_text
from vsm_lab.benchmarking.suite import (
    Group,
    describe_conditions,
    describe_machine,
    summarize,
)
from vsm_lab.benchmarking.timing import Quartiles
from vsm_lab.document import Block, Heading, Table, Text, write_markdown
from vsm_lab.jobs import Job
from vsm_lab.provenance import measured_code
from vsm_lab.store import JobStore

TARGETS = {
    "vsm_step_vs_backbone_28": 1.35,
    "vsm_step_vs_backbone_32": 1.25,
    "vsm_step_vs_backbone_84": 1.10,
    "vsm_step_vs_reference_protonet": 0.60,
    "evaluation_2k_vs_reference_600": 1.00,
    "classifying_vs_embedding": 1.10,
    "explaining_vs_predicting": 1.10,
}


def speed_jobs(groups: Sequence[Group]) -> list[Job]:
    """Return a job for each group, on this machine and with the code as it is now."""
    where = {"machine": describe_machine(groups[0].threads), **measured_code()}
    return [Job("speed", one.title, {"group": asdict(one), **where}) for one in groups]


def collect_results(jobs: Sequence[Job], store: JobStore) -> dict[str, Any]:
    """Return the content of ``results.json`` for finished jobs."""
    measured = [(Group(**job.recipe["group"]), store.outcome(job)["seconds"]) for job in jobs]
    recipe = jobs[0].recipe
    return {**summarize(measured), "machine": recipe["machine"], "commit": recipe["commit"]}


def write_results(results: dict[str, Any], folder: Path) -> Path:
    """Write ``results.json`` and ``results.md``; return the page."""
    write_text(folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    conditions = [
        *describe_conditions(results),
        f"allocations kept: {results['machine']['keeps_allocations']} (reference: False)",
    ]
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
    blocks: list[Block] = [
        Heading(1, "Speed"),
        Text(about),
        Text("\n".join(f"- {line}" for line in conditions)),
        Heading(2, "Ratios"),
        Table(["", "median (quartiles)", "target", "pairs"], ratios),
        Heading(2, "Milliseconds"),
        Table(["", "median (quartiles)"], times),
    ]
    write_markdown(folder / "results.md", blocks)
    return folder / "results.md"
