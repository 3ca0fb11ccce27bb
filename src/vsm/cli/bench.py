"""``vsm bench``."""

from collections.abc import Sequence
from typing import Any, Literal

import jsonargparse

from vsm.cli.arguments import add_json_argument
from vsm.cli.output import ProgressBar, print_json, print_table

STEP_TITLES = {
    "protonet": "training step of protonet",
    "vpn": "training step of vpn with the paper's network",
    "vsm_conjugate": "training step of vsm",
    "vsm": "training step of vsm with the paper's network",
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
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the speed of this machine."""
    parsed = parser.parse_args(arguments)

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
            *(
                row(title, f"{name}_step", f"{name}_step_vs_backbone")
                for name, title in STEP_TITLES.items()
            ),
            row("reference ProtoNet, task by task", "reference_protonet"),
        ],
    )
    for name, title in STEP_TITLES.items():
        if ratio := ratios.get(f"{name}_step_vs_reference_protonet"):
            print(f"{title} ÷ reference ProtoNet: {ratio.describe()}")
    print(f"images embedded per second: {result['images_per_second']:,.0f}")
