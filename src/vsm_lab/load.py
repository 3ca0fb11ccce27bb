"""The result page of the load benchmark."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vsm.system.files import write_text
from vsm.system.interruption import StopRequest
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm_lab.benchmarking.load import measure_load, speed_packages
from vsm_lab.benchmarking.suite import describe_conditions, describe_machine
from vsm_lab.benchmarking.timing import Quartiles
from vsm_lab.benchmarking.workloads import LoadWorkload
from vsm_lab.document import Block, Heading, Table, Text, write_markdown
from vsm_lab.provenance import measured_code
from vsm_lab.store import JobStore

LEAST_RATIO, MOST_LATENCY, MOST_GROWTH = 0.7, 5.0, 5.0
COLUMNS = ["", "measured", "target", "reached"]


def measure_all(
    workloads: Sequence[LoadWorkload],
    folder: Path,
    threads: int | None = None,
    progress: Progress = NULL_PROGRESS,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Return the content of ``load.json``; holds the timing lock of ``folder`` meanwhile."""
    with JobStore(folder).timing_lock():
        machine = describe_machine(threads)
        models = [measure_load(workload, threads, progress, stop) for workload in workloads]
    return {
        "models": models,
        "machine": machine | {"speed_packages": speed_packages()},
        "commit": measured_code()["commit"],
    }


def write_load(results: dict[str, Any], folder: Path) -> Path:
    """Write ``load.json`` and ``load.md``; return the page."""
    write_text(folder / "load.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_markdown(folder / "load.md", _page(results))
    return folder / "load.md"


def table(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return title, columns and rows of the results of one model."""
    sizes = result["workload"]
    title = (
        f"{sizes['model']}: {sizes['requests']:,} requests of one image each by "
        f"{sizes['clients']} clients; {sizes['way']} classes of {sizes['shot']} examples"
    )
    return title, COLUMNS, [*_targets(result), *_others(result)]


def _targets(result: dict[str, Any]) -> list[list[str]]:
    ratio = Quartiles(**result["quartiles"]["server_vs_classifier"])
    latency, growth = result["half_load"]["p99_vs_p50"], result["memory"]["growth_percent"]
    answers = result["answers"]
    rows = [
        (
            "server ÷ classifier, images per second",
            ratio.describe(),
            f"≥ {LEAST_RATIO:.2f}",
            ratio.median >= LEAST_RATIO,
        ),
        (
            "p99 ÷ median of the latency at half the load",
            _number(latency, 2),
            f"< {MOST_LATENCY:g}",
            latency is not None and latency < MOST_LATENCY,
        ),
        (
            "growth of the server's memory, %",
            _number(growth, 2),
            f"< {MOST_GROWTH:g}",
            growth is not None and growth < MOST_GROWTH,
        ),
        *((f"{n} answers", f"{answers[n]:,}", "0", answers[n] == 0) for n in ("wrong", "lost")),
    ]
    return [[*cells, "yes" if reached else "no"] for *cells, reached in rows]


def _others(result: dict[str, Any]) -> list[list[str]]:
    rates, half = result["pictures_per_second"], result["half_load"]
    readings = result["memory"]["readings"]
    rows = [
        ("largest deviation of a probability", f"{result['answers']['deviation']:.0e}"),
        ("images per second, classifier", Quartiles(**rates["classifier"]).describe(1)),
        ("images per second, server", Quartiles(**rates["server"]).describe(1)),
        ("images per batch of the model", _number(result["pictures_per_batch"], 1)),
        ("requests per second at half the load", _number(half["requests_per_second"], 1)),
        ("median latency at half the load, ms", _number(half["p50_milliseconds"], 1)),
        ("99th percentile of it, ms", _number(half["p99_milliseconds"], 1)),
        *(
            (f"memory after {one['requests']:,} requests, MB", _number(one["megabytes"], 1))
            for one in (readings[:1] + readings[-1:])
        ),
        *(
            (f"processor time per image, {who}, ms", _number(cpu, 2))
            for who, cpu in result["cpu_milliseconds_per_picture"].items()
        ),
    ]
    return [[*row, "", ""] for row in rows]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _page(results: dict[str, Any]) -> list[Block]:
    packages = ", ".join(results["machine"]["speed_packages"]) or "neither uvloop nor httptools"
    conditions = [
        *describe_conditions(results, packages),
        "classifier, server and clients share the machine, over loopback",
    ]
    blocks: list[Block] = [
        Heading(1, "Load"),
        Text(
            "Written by `vsm bench --load --output benchmarks`; what each line means: "
            "[benchmarks](../docs/benchmarks.md#a-server-under-load)."
        ),
        Text("\n".join(f"- {line}" for line in conditions)),
    ]
    for result in results["models"]:
        title, columns, rows = table(result)
        name, _, rest = title.partition(": ")
        blocks += [Heading(2, name), Text(f"{rest[0].upper()}{rest[1:]}."), Table(columns, rows)]
    return blocks
