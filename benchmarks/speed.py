"""Speed of training steps, evaluations and the memory, beside the bare backbone and a reference.

Writes results.md, results.json and memory_size.svg. Takes about twenty minutes on two quiet cores.

    make bench
    python -m benchmarks.speed --data omniglot
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vsm.benchmarking.suite import MEMORY_WORKS, Plan, measure
from vsm.benchmarking.timing import Quartiles
from vsm.benchmarking.workloads import EvaluationWorkload
from vsm.cli.output import ProgressBar
from vsm.errors import VsmError
from vsm.experiments.document import Block, Heading, Picture, Table, Text, write_markdown
from vsm.experiments.plots import svg
from vsm.system.files import write_text

FOLDER = Path(__file__).parent
PICTURE = "memory_size"
TARGETS = {
    "vsm_step_vs_backbone_28": 1.35,
    "vsm_step_vs_backbone_32": 1.25,
    "vsm_step_vs_backbone_84": 1.10,
    "vsm_step_vs_reference_protonet": 0.60,
    "evaluation_2k_vs_reference_600": 1.00,
    "classifying_vs_embedding": 1.30,
    "explaining_vs_predicting": 1.10,
}
MEMORY_TITLES = {
    "recall": "recall",
    "recall_with_gradient": "recall in training (forward and backward)",
    "consolidation": "consolidation (forward and backward)",
}


def commit() -> str | None:
    """Return the commit that is measured, marked if files were changed since; None without git.

    Only git's own answer is kept, never where the repository lies.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(
            command, cwd=FOLDER, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def page(results: dict[str, Any]) -> list[Block]:
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
    drawn = svg(draw(results["memory_size"]), PICTURE)
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
        f"an evaluation: {evaluation['data']}, {evaluation['episodes']:,} episodes of VSM with J = "
        f"{evaluation['memory_samples']} and L = {evaluation['prototype_samples']}, "
        f"{evaluation['reference_episodes']:,} of the reference",
        f"a classifier: {classifier['way']} classes of {classifier['shot']} examples each, and "
        f"{classifier['queries']} pictures to classify",
    ]


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
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
    axes.legend()
    return figure


def write(results: dict[str, Any], folder: Path) -> None:
    """Write the page, the object and the picture."""
    write_text(folder / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_markdown(folder / "results.md", page(results))


def main() -> int:
    """Measure, write and print; return the exit code: a known error or Ctrl-C is one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", default="glyphs", help="whose test classes are evaluated")
    parser.add_argument("--threads", type=int, help="of torch; unset: its own choice")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for the results")
    chosen = parser.parse_args()
    plan = replace(Plan(), evaluation=EvaluationWorkload(data=chosen.data), threads=chosen.threads)
    measured_commit = commit()
    try:
        with ProgressBar() as bar:
            results = measure(plan, bar)
    except VsmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    write({**results, "commit": measured_commit}, chosen.output)
    print((chosen.output / "results.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
