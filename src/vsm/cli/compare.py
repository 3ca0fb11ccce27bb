"""``vsm compare``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from vsm.cli.evaluate import SCORE_COLUMNS, add_episode_arguments, score_cells
from vsm.cli.output import counting, print_json, print_table
from vsm.errors import SettingsError

if TYPE_CHECKING:
    from vsm.comparison import MeasuredRun


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the runs and the episodes."""
    parser.add_argument("runs", type=Path, nargs="+", help="Two or more run directories.")
    parser.add_argument(
        "--backbone",
        type=str,
        action="append",
        default=[],
        help="Name a run's own backbone module:attribute again, to allow that it is imported; "
        "may be repeated.",
    )
    add_episode_arguments(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure several runs on identical episodes."""
    parsed = parser.parse_args(arguments)
    if len(parsed.runs) < 2:
        raise SettingsError("runs: two or more are compared, got one; vsm evaluate measures one")

    from vsm.comparison import EpisodeProtocol, evaluate_run
    from vsm.devices import choose_placement
    from vsm.runs import RunDirectory
    from vsm.runtime import keep_allocations

    keep_allocations()
    placement = choose_placement(parsed.device, parsed.precision)
    protocol = EpisodeProtocol.of(parsed.runs[0], parsed)
    measured = []
    for path in parsed.runs:
        backbone = RunDirectory(path).settings().model.backbone
        named = backbone if backbone in parsed.backbone else None
        with counting(f"evaluate {path}", parsed.episodes, quiet=parsed.json) as advance:
            measured.append(
                evaluate_run(path, protocol, advance=advance, backbone=named, placement=placement)
            )
    if parsed.json:
        print_json(comparison_json(measured))
    else:
        print_comparison(measured)


def comparison_json(measured: "Sequence[MeasuredRun]") -> dict[str, Any]:
    """Return what ``--json`` prints: every run, and every paired difference."""
    from vsm.comparison import paired_differences

    return {
        "runs": [{"run": str(one.path), **one.as_dict()} for one in measured],
        "differences": [difference.as_dict() for difference in paired_differences(measured)],
    }


def print_comparison(measured: "Sequence[MeasuredRun]") -> None:
    """Print the scores, and the paired differences below them."""
    from vsm.comparison import paired_differences

    print_table(
        measured[0].protocol.describe(),
        SCORE_COLUMNS,
        [
            [f"{one.path} ({one.as_dict()['method']})", *score_cells(one.as_dict())]
            for one in measured
        ],
    )
    differences = [
        [
            f"{difference.a} − {difference.b}",
            f"{100 * difference.estimate.mean:+.2f} ± {100 * difference.estimate.ci95:.2f}",
        ]
        for difference in paired_differences(measured)
    ]
    if differences:
        print_table(
            "paired differences in accuracy, in points with 95% intervals",
            ["", "difference"],
            differences,
        )
