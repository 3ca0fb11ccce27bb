"""``vsm bench``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse

from vsm.cli.arguments import JsonOption, default_model
from vsm.cli.output import ProgressBar, print_json, print_table, require_extra, say
from vsm.errors import SettingsError
from vsm_lab.cli.running import add_output_argument, require_success, run_jobs

MODES_OF = {
    **dict.fromkeys(("image_size", "channels", "seconds"), ("brief",)),
    **dict.fromkeys(("model", "clients", "images", "requests"), ("load",)),
    "again": ("full",),
    "repeats": ("brief", "load"),
    "output": ("full", "load"),
}
"""Arguments → kinds of benchmarks in which they have a meaning."""


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the arguments of the three kinds of benchmarks."""
    add = parser.add_argument
    add(
        "--image_size",
        type=Literal[28, 32, 84],
        default=28,
        help="Pixels per side: 28 as Omniglot (gray), 32 as CIFAR-FS, 84 as miniImageNet.",
    )
    add("--channels", type=int, default=64, help="Width of the conv4 backbone.")
    add("--repeats", type=int, default=10, help="How often each benchmark is timed.")
    add("--seconds", type=float, default=45.0, help="No further repeat begins after this time.")
    add("--threads", type=int | None, help="Of torch; unset: its default.")
    add(
        "--full",
        action="store_true",
        help="Run all benchmarks, about twenty minutes, and write results.md and results.json into "
        "--output. If stopped, the same command continues.",
    )
    add("--again", action="store_true", help="With --full: discard earlier measurements.")
    add(
        "--load",
        action="store_true",
        help="Measure a server with many clients beside the Python classifier, and write load.md "
        "and load.json into --output.",
    )
    add(
        "--model",
        type=str,
        nargs="+",
        help="With --load: models that vsm models lists, or runs; unset: as classify.",
    )
    add("--clients", type=int, default=32, help="With --load: number of concurrent clients.")
    add("--images", "--pictures", type=int, default=320, help="With --load: different images.")
    add(
        "--requests",
        type=int,
        default=10_000,
        help="With --load: number of requests, one image each.",
    )
    add_output_argument(parser, Path("runs/bench"))
    JsonOption.add_arguments(parser)


def start(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the speed of this machine."""
    parsed = parser.parse_args(arguments)
    if parsed.full and parsed.load:
        raise SettingsError("load: is measured by itself; give one of --full and --load")
    mode = "full" if parsed.full else "load" if parsed.load else "brief"
    for name, modes in MODES_OF.items():
        if mode not in modes and parsed[name] != parser.get_default(name):
            others = " or ".join(f"--{one}" for one in modes)
            when = f"with --{mode}" if "brief" in modes else f"without {others}"
            raise SettingsError(f"{name}: has no meaning {when}")
    {"full": _run_all, "load": _run_load, "brief": _run_brief}[mode](parsed)


def _run_load(parsed: jsonargparse.Namespace) -> None:
    require_extra("bench --load", "serve")
    from vsm.system.interruption import stop_request
    from vsm_lab.benchmarking.load import Load, measure_all, table, write_load

    sizes = {name: parsed[name] for name in ("clients", "images", "requests")}
    names = parsed.model or [default_model()]
    loads = [Load(model=name, pairs=parsed.repeats, **sizes) for name in names]
    with ProgressBar(quiet=parsed.json) as bar, stop_request() as stop:
        results = measure_all(loads, parsed.output, parsed.threads, bar, stop)
    page = write_load(results, parsed.output)
    if parsed.json:
        print_json(results)
        return
    for result in results["models"]:
        print_table(*table(result))
    say(page)


def _run_all(parsed: jsonargparse.Namespace) -> None:
    """Run the missing jobs one after another: concurrent measurements would disturb each other."""
    from vsm_lab.benchmarking.suite import collect_results, full_suite, speed_jobs, write_results
    from vsm_lab.job_files import JobStore
    from vsm_lab.launchers import InProcess

    jobs, store = speed_jobs(full_suite(parsed.threads)), JobStore(parsed.output)
    if parsed.again:
        for job in jobs:
            store.forget(job)
    launcher = InProcess(parsed.output)
    require_success(run_jobs("bench", jobs, launcher, parsed.output, parsed.json))
    results = collect_results(jobs, store)
    page = write_results(results, parsed.output)
    print_json(results) if parsed.json else say(page.read_text(encoding="utf-8"))


def _run_brief(parsed: jsonargparse.Namespace) -> None:
    from vsm_lab.benchmarking.suite import measure_briefly

    sizes = (parsed.image_size, parsed.channels, parsed.repeats, parsed.seconds, parsed.threads)
    with ProgressBar(quiet=parsed.json) as bar:
        result = measure_briefly(*sizes, bar)
    print_json(result) if parsed.json else _print_times(result)


def _print_times(result: dict[str, Any]) -> None:
    from vsm_lab.benchmarking.suite import Quartiles

    sizes = result["workload"]
    title = (
        f"{sizes['tasks']} tasks of {sizes['way']}-way {sizes['shot']}-shot with "
        f"{sizes['queries']} queries per class, {sizes['image_size']}×{sizes['image_size']} "
        f"pixels, conv4-{sizes['channels']}, {result['machine']['threads']} threads"
    )
    times = [[n, Quartiles(**found).describe(0)] for n, found in result["milliseconds"].items()]
    ratios = [[n, Quartiles(**found).describe()] for n, found in result["quartiles"].items()]
    print_table(title, ["milliseconds", "median (quartiles)"], times)
    print_table("", ["ratio", "median (quartiles)"], ratios)
