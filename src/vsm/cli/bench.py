"""``vsm bench``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse

from vsm.cli.arguments import add_json_argument
from vsm.cli.output import ProgressBar, need_matplotlib, print_json, print_table
from vsm.cli.running import add_output_argument, require_success, run_jobs
from vsm.errors import SettingsError

BRIEF_ARGUMENTS = ("image_size", "channels", "repeats", "seconds")
FULL_ARGUMENTS = ("data", "again", "output")
STEP_TITLES = {
    "protonet_step": "training step of protonet",
    "vpn_step": "training step of vpn with the paper's network",
    "vsm_conjugate_step": "training step of vsm",
    "vsm_step": "training step of vsm with the paper's network",
}


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the images and for how long they are worked on."""
    parser.add_argument(
        "--image_size",
        type=Literal[28, 32, 84],
        default=28,
        help="Pixels per side: 28 as Omniglot (gray), 32 as CIFAR-FS, 84 as miniImageNet.",
    )
    parser.add_argument("--channels", type=int, default=64, help="Width of the conv4 backbone.")
    parser.add_argument("--repeats", type=int, default=10, help="How often each work is timed.")
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="No further repeat begins after this time."
    )
    parser.add_argument("--threads", type=int | None, help="Of torch; unset: its own choice.")
    parser.add_argument(
        "--full",
        action="store_true",
        help="Measure everything, about twenty minutes, and write results.md, results.json and "
        "memory_size.svg into --output. If it is stopped, the same command goes on.",
    )
    parser.add_argument(
        "--data", type=str, default="glyphs", help="Whose test classes --full evaluates."
    )
    parser.add_argument(
        "--again", action="store_true", help="With --full: measure anew what is measured already."
    )
    add_output_argument(parser, Path("runs/bench"))
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the speed of this machine."""
    parsed = parser.parse_args(arguments)
    for name in BRIEF_ARGUMENTS if parsed.full else FULL_ARGUMENTS:
        if parsed[name] != parser.get_default(name):
            when = "with" if parsed.full else "without"
            raise SettingsError(f"{name}: has no meaning {when} --full")
    if parsed.full:
        _measure_all(parsed)
    else:
        _measure_briefly(parsed)


def _measure_all(parsed: jsonargparse.Namespace) -> None:
    """Measure what is not measured yet, one job after another: times of two at once are of none."""
    need_matplotlib("bench --full")
    from vsm.benchmarking.suite import Plan
    from vsm.benchmarking.workloads import EvaluationWorkload
    from vsm.data import open_images
    from vsm.experiments.launchers import InProcess
    from vsm.experiments.speed import SpeedPlan, write_results
    from vsm.experiments.store import JobStore

    open_images(parsed.data)  # says if there is no such dataset
    evaluation = EvaluationWorkload(data=parsed.data)
    plan, store = (
        SpeedPlan(Plan(evaluation=evaluation, threads=parsed.threads)),
        JobStore(parsed.output),
    )
    if parsed.again:
        for job in plan.jobs:
            store.forget(job)
    launcher = InProcess(parsed.output)
    require_success(run_jobs("bench", plan.jobs, launcher, parsed.output, parsed.json))
    results = plan.results(store)
    page = write_results(results, parsed.output)
    print_json(results) if parsed.json else print(page.read_text(encoding="utf-8"))


def _measure_briefly(parsed: jsonargparse.Namespace) -> None:
    from vsm.benchmarking.suite import measure_briefly
    from vsm.benchmarking.workloads import StepWorkload

    workload = StepWorkload(image_size=parsed.image_size, channels=parsed.channels)
    with ProgressBar(quiet=parsed.json) as bar:
        result = measure_briefly(workload, parsed.repeats, parsed.seconds, parsed.threads, bar)
    if parsed.json:
        print_json(result)
    else:
        _print_times(result)


def _print_times(result: dict[str, Any]) -> None:
    from vsm.benchmarking.timing import Quartiles

    work, machine = result["workload"], result["machine"]
    milliseconds = {name: Quartiles(**value) for name, value in result["milliseconds"].items()}
    ratios = {name: Quartiles(**value) for name, value in result["quartiles"].items()}

    def row(title: str, name: str, ratio: str | None = None) -> list[str]:
        beside = ratios[ratio].describe() if ratio else "–"
        return [title, milliseconds[name].describe(0), beside]

    print_table(
        f"{work['tasks']} tasks of {work['way']}-way {work['shot']}-shot with {work['queries']} "
        f"queries per class, {work['image_size']}×{work['image_size']} pixels, "
        f"conv4-{work['channels']}, {machine['threads']} threads; medians (quartiles) of "
        f"{milliseconds['backbone'].count}",
        ["", "milliseconds", "÷ bare backbone"],
        [
            row("bare backbone, forward and backward", "backbone"),
            *(row(title, name, f"{name}_vs_backbone") for name, title in STEP_TITLES.items()),
            row("reference ProtoNet, task by task", "reference_protonet"),
        ],
    )
    for name, title in STEP_TITLES.items():
        if ratio := ratios.get(f"{name}_vs_reference_protonet"):
            print(f"{title} ÷ reference ProtoNet: {ratio.describe()}")
    print(f"images embedded per second: {result['images_per_second']:,.0f}")
