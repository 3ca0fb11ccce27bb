"""``vsm bench``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse

from vsm.cli.arguments import add_json_argument
from vsm.cli.classify import default_model
from vsm.cli.output import ProgressBar, need_matplotlib, print_json, print_table, say
from vsm.cli.running import add_output_argument, require_success, run_jobs
from vsm.cli.serve import require_serving
from vsm.errors import SettingsError

ARGUMENTS_OF = {
    "brief": ("image_size", "channels", "repeats", "seconds"),
    "full": ("data", "again", "output"),
    "load": ("model", "clients", "pictures", "requests", "repeats", "output"),
}
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
    _add_load_arguments(parser)
    add_output_argument(parser, Path("runs/bench"))
    add_json_argument(parser)


def _add_load_arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load",
        action="store_true",
        help="Measure a server that many clients ask at once, beside the Python classifier, and "
        "write load.md and load.json into --output.",
    )
    parser.add_argument(
        "--model",
        type=str,
        nargs="+",
        help="With --load: models that vsm models lists, or runs; unset: as classify.",
    )
    parser.add_argument("--clients", type=int, default=32, help="With --load: how many ask.")
    parser.add_argument(
        "--pictures", type=int, default=320, help="With --load: how many different ones they ask."
    )
    parser.add_argument(
        "--requests", type=int, default=10_000, help="With --load: in all, one picture each."
    )


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the speed of this machine."""
    parsed = parser.parse_args(arguments)
    if parsed.full and parsed.load:
        raise SettingsError("load: is measured by itself; give one of --full and --load")
    _check_meaning(parser, parsed, "full" if parsed.full else "load" if parsed.load else "brief")
    if parsed.full:
        _measure_all(parsed)
    elif parsed.load:
        _measure_load(parsed)
    else:
        _measure_briefly(parsed)


def _check_meaning(
    parser: jsonargparse.ArgumentParser, parsed: jsonargparse.Namespace, kind: str
) -> None:
    """Refuse arguments of the other kinds of measurement."""
    for name in dict.fromkeys(one for names in ARGUMENTS_OF.values() for one in names):
        kinds = [one for one, names in ARGUMENTS_OF.items() if name in names]
        if kind not in kinds and parsed[name] != parser.get_default(name):
            others = " or ".join(f"--{one}" for one in kinds)
            when = f"with --{kind}" if "brief" in kinds else f"without {others}"
            raise SettingsError(f"{name}: has no meaning {when}")


def _measure_load(parsed: jsonargparse.Namespace) -> None:
    """Measure one model after another."""
    require_serving("bench --load")
    from vsm.benchmarking.workloads import LoadWorkload
    from vsm.experiments.load import measure_all, table, write_load
    from vsm.system.interruption import stop_request

    sizes = {name: parsed[name] for name in ("clients", "pictures", "requests")}
    workloads = [
        LoadWorkload(model=name, pairs=parsed.repeats, **sizes)
        for name in parsed.model or [default_model()]
    ]
    with ProgressBar(quiet=parsed.json) as bar, stop_request() as stop:
        results = measure_all(workloads, parsed.output, parsed.threads, bar, stop)
    page = write_load(results, parsed.output)
    if parsed.json:
        print_json(results)
        return
    for result in results["models"]:
        print_table(*table(result))
    say(page)


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
    print_json(results) if parsed.json else say(page.read_text(encoding="utf-8"))


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
            say(f"{title} ÷ reference ProtoNet: {ratio.describe()}")
    say(f"images embedded per second: {result['images_per_second']:,.0f}")
