"""The page of what servers reach under load."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vsm.benchmarking.load import measure_load, speed_packages
from vsm.benchmarking.suite import describe_machine
from vsm.benchmarking.timing import Quartiles
from vsm.benchmarking.workloads import LoadWorkload
from vsm.experiments.document import Block, Heading, Table, Text, write_markdown
from vsm.experiments.provenance import measured_code
from vsm.experiments.store import JobStore
from vsm.system.files import write_text
from vsm.system.interruption import StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress

TARGETS = {"ratio": 0.7, "latency": 5.0, "growth": 5.0}
COLUMNS = ["", "measured", "target", "reached"]


def measure_all(
    workloads: Sequence[LoadWorkload],
    folder: Path,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Return what ``load.json`` holds; nothing else is timed for ``folder`` meanwhile."""
    with JobStore(folder).timing_lock():
        machine = describe_machine(threads)
        models = [measure_load(workload, threads, progress, stop) for workload in workloads]
    return {
        "models": models,
        "machine": machine | {"speed_packages": speed_packages()},
        "commit": measured_code()["commit"],
    }


def write_load(results: dict[str, Any], folder: Path) -> Path:
    """Write ``load.json`` and the page; return the page."""
    write_text(folder / "load.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_markdown(folder / "load.md", _page(results))
    return folder / "load.md"


def table(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, columns and rows of what one model's server reached."""
    work = result["workload"]
    title = (
        f"{work['model']}: {work['requests']:,} requests of one picture each by {work['clients']} "
        f"clients; {work['way']} classes of {work['shot']} examples"
    )
    return title, COLUMNS, [*_targets(result), *_others(result)]


def _targets(result: dict[str, Any]) -> list[list[str]]:
    ratio = Quartiles(**result["quartiles"]["server_vs_classifier"])
    latency, growth = result["half_load"]["p99_vs_p50"], result["memory"]["growth_percent"]
    answers = result["answers"]
    least, most, flat = TARGETS["ratio"], TARGETS["latency"], TARGETS["growth"]
    return [
        [
            "server ÷ classifier, pictures per second",
            *(ratio.describe(), f"≥ {least:.2f}", _yes(ratio.median >= least)),
        ],
        [
            "p99 ÷ median of the latency at half the load",
            *(_number(latency, 2), f"< {most:g}", _yes(latency is not None and latency < most)),
        ],
        [
            "growth of the server's memory, %",
            *(_number(growth, 2), f"< {flat:g}", _yes(growth is not None and growth < flat)),
        ],
        *(
            [f"{kind} answers", f"{answers[kind]:,}", "0", _yes(answers[kind] == 0)]
            for kind in ("wrong", "lost")
        ),
    ]


def _others(result: dict[str, Any]) -> list[list[str]]:
    rates, half, cpu = (
        result[name]
        for name in ("pictures_per_second", "half_load", "cpu_milliseconds_per_picture")
    )
    readings = result["memory"]["readings"]
    memory = [(f"{one['requests']:,}", one["megabytes"]) for one in readings]
    rows = [
        ["largest deviation of a probability", f"{result['answers']['deviation']:.0e}"],
        ["pictures per second, classifier", Quartiles(**rates["classifier"]).describe(1)],
        ["pictures per second, server", Quartiles(**rates["server"]).describe(1)],
        ["pictures per batch of the model", _number(result["pictures_per_batch"], 1)],
        ["requests per second at half the load", _number(half["requests_per_second"], 1)],
        ["median latency at half the load, ms", _number(half["p50_milliseconds"], 1)],
        ["99th percentile of it, ms", _number(half["p99_milliseconds"], 1)],
        *(
            [f"memory after {count} requests, MB", _number(size, 1)]
            for count, size in (memory[:1] + memory[-1:] if memory else [])
        ),
        *([f"processor time per picture, {who}, ms", _number(cpu[who], 2)] for who in cpu),
    ]
    return [[*row, "", ""] for row in rows]


def _yes(reached: bool) -> str:
    return "yes" if reached else "no"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _page(results: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = [
        Heading(1, "Load"),
        Text(
            "Written by `vsm bench --load --output benchmarks`; what each line means: "
            "[benchmarks](../docs/benchmarks.md#a-server-under-load)."
        ),
        Text("\n".join(f"- {line}" for line in _conditions(results))),
    ]
    for result in results["models"]:
        title, columns, rows = table(result)
        name, _, rest = title.partition(": ")
        blocks += [Heading(2, name), Text(f"{rest[0].upper()}{rest[1:]}."), Table(columns, rows)]
    return blocks


def _conditions(results: dict[str, Any]) -> list[str]:
    """Say what was measured where, line by line."""
    machine = results["machine"]
    with_them = ", ".join(machine["speed_packages"]) or "neither uvloop nor httptools"
    return [
        f"{machine['cores']} cores with {machine['vector_instructions']}, torch's threads: "
        f"{machine['threads']}",
        f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}, {with_them}",
        *([f"commit {results['commit']}"] if results["commit"] else []),
        "classifier, server and clients share the machine, over loopback",
    ]
