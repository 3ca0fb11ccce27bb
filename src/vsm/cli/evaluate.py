"""``vsm evaluate``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jsonargparse

from vsm.cli.output import counting, print_json, print_table
from vsm.cli.processes import add_placement_arguments


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the run and the episodes."""
    parser.add_argument("run", type=Path, help="A run directory.")
    parser.add_argument(
        "--checkpoint",
        type=Literal["best", "last"],
        default="best",
        help="The best model by validation, or the last state.",
    )
    parser.add_argument(
        "--backbone",
        type=str | None,
        help="Name the run's own backbone module:attribute again, to allow that it is imported.",
    )
    add_episode_arguments(parser)


def add_episode_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare what ``evaluate`` and ``compare`` share."""
    parser.add_argument("--way", type=int | None, help="Classes of an episode; unset: the run's.")
    parser.add_argument("--shot", type=int | None, help="Support images; unset: the run's.")
    parser.add_argument("--queries", type=int, default=15, help="Query images of a class.")
    parser.add_argument("--episodes", type=int, default=2000, help="How many episodes.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the list of episodes.")
    parser.add_argument(
        "--split",
        type=Literal["train", "validation", "test"],
        default="test",
        help="Whose classes; a model has seen those of train.",
    )
    parser.add_argument(
        "--batch_norm",
        type=Literal["inductive", "transductive"],
        default="inductive",
        help="Running statistics, or each episode's own (queries then see each other).",
    )
    parser.add_argument(
        "--memory_slots",
        type=int | None,
        help="Keep only the first n classes of the memory, 0 for none; unset: all.",
    )
    add_placement_arguments(parser)
    parser.add_argument("--json", action="store_true", help="Print exactly one JSON object.")


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure one run."""
    parsed = parser.parse_args(arguments)

    from vsm.comparison import EpisodeProtocol, evaluate_run
    from vsm.devices import choose_placement
    from vsm.runtime import keep_allocations

    keep_allocations()
    placement = choose_placement(parsed.device, parsed.precision)
    protocol = EpisodeProtocol.of(parsed.run, parsed)
    with counting(f"evaluate {parsed.run}", parsed.episodes, quiet=parsed.json) as advance:
        measured = evaluate_run(
            parsed.run, protocol, parsed.checkpoint, advance, parsed.backbone, placement
        )
    result = measured.as_dict()
    if parsed.json:
        print_json(result)
        return
    print_table(protocol.describe(), SCORE_COLUMNS, [[result["method"], *score_cells(result)]])


SCORE_COLUMNS = ["", "accuracy", "NLL", "ECE"]


def score_cells(result: dict[str, object]) -> list[str]:
    """Format accuracy with its interval, NLL and calibration error."""
    return [
        f"{result['accuracy']:.2%} ± {result['ci95']:.2%}",
        f"{result['nll']:.3f}",
        f"{result['ece']:.2%}",
    ]
