"""``vsm compare``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jsonargparse

from vsm.cli.arguments import add_backbones_argument
from vsm.cli.evaluate import (
    SCORE_COLUMNS,
    add_episode_arguments,
    episode_options,
    score_cells,
)
from vsm.cli.output import ProgressBar, print_json, print_table
from vsm.cli.processes import prepare_placement
from vsm.errors import SettingsError
from vsm.settings import BASELINE_NAMES, BaselineName, BaselineSettings

if TYPE_CHECKING:
    from vsm.runs.measurement import Comparison


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the runs and the episodes."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="Run directories or names of shipped models; two or more, or one with --baselines.",
    )
    parser.add_argument(
        "--baselines",
        type=str,
        default="",
        help="Also measure these on the features of the first run, by comma: "
        f"{', '.join(BASELINE_NAMES)}.",
    )
    add_backbones_argument(parser)
    add_episode_arguments(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure several runs, and baselines on the first one's features, on identical episodes."""
    parsed = parser.parse_args(arguments)
    names = baseline_names(parsed.baselines)
    settings = BaselineSettings(**parsed.baseline.as_dict())
    if len(parsed.runs) < 2 and not names:
        raise SettingsError(
            "runs: two or more are compared, or one with --baselines, got one; vsm evaluate "
            "measures one"
        )

    from vsm.runs.loading import load

    placement = prepare_placement(parsed)
    # All are loaded first: a run that is missing is named before anything is measured.
    models = [
        load(path, backbone=parsed.backbone, placement=placement, inference=parsed.inference)
        for path in parsed.runs
    ]
    with ProgressBar(parsed.json) as bar:
        comparison = models[0].compare(
            *models[1:],
            **episode_options(parsed),
            baselines=names,
            baseline=settings,
            progress=bar,
        )
    if parsed.json:
        print_json(comparison.as_dict())
    else:
        print_comparison(comparison)


def baseline_names(listed: str) -> list[BaselineName]:
    """Return the baselines of a list with commas, each once."""
    names = list(dict.fromkeys(word.strip() for word in listed.split(",") if word.strip()))
    for name in names:
        if name not in BASELINE_NAMES:
            raise SettingsError(
                f"baselines: unknown baseline {name!r}; known: {', '.join(BASELINE_NAMES)}"
            )
    return cast(list[BaselineName], names)


def print_comparison(comparison: "Comparison") -> None:
    """Print the scores, and the paired differences below them."""
    measured = comparison.measured
    print_table(
        measured[0].protocol.describe(),
        SCORE_COLUMNS,
        [[one.describe(), *score_cells(one.as_dict())] for one in measured],
    )
    rows = [
        [f"{one.a} − {one.b}", f"{100 * one.estimate.mean:+.2f} ± {100 * one.estimate.ci95:.2f}"]
        for one in comparison.differences
    ]
    if rows:
        title = "paired differences in accuracy, in points with 95% intervals"
        print_table(title, ["", "difference"], rows)
