"""``vsm compare``."""

from collections.abc import Sequence
from pathlib import Path

import jsonargparse

from vsm.cli.evaluate import SCORE_COLUMNS, add_episode_arguments, score_cells
from vsm.cli.output import counting, print_json, print_table


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the runs and the episodes."""
    parser.add_argument("runs", type=Path, nargs="+", help="Two or more run directories.")
    add_episode_arguments(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure several runs on identical episodes."""
    parsed = parser.parse_args(arguments)

    from vsm.comparison import Protocol, evaluate_run, paired_differences
    from vsm.runtime import keep_allocations

    keep_allocations()
    protocol = Protocol.of(parsed.runs[0], parsed)
    measured = []
    for path in parsed.runs:
        with counting(f"evaluate {path}", parsed.episodes, quiet=parsed.json) as advance:
            measured.append(evaluate_run(path, protocol, advance=advance))
    differences = paired_differences(measured)
    if parsed.json:
        print_json(
            {
                "runs": [{"run": str(one.path), **one.as_dict()} for one in measured],
                "differences": [difference.as_dict() for difference in differences],
            }
        )
        return
    print_comparison(
        f"{protocol.data}, {protocol.split} classes, {protocol.way}-way {protocol.shot}-shot, "
        f"{protocol.episodes} identical episodes",
        [[f"{one.path} ({one.as_dict()['method']})", *score_cells(one.as_dict())] for one in measured],
        [
            [
                f"{difference.a} − {difference.b}",
                f"{100 * difference.estimate.mean:+.2f} ± {100 * difference.estimate.ci95:.2f}",
            ]
            for difference in differences
        ],
    )


def print_comparison(
    title: str, scores: Sequence[Sequence[str]], differences: Sequence[Sequence[str]]
) -> None:
    """Print the scores, and the paired differences below them."""
    print_table(title, SCORE_COLUMNS, scores)
    if differences:
        print_table(
            "paired differences in accuracy, in points with 95% intervals",
            ["", "difference"],
            differences,
        )
