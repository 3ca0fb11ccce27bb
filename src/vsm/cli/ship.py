"""``vsm ship``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse

from vsm.cli.arguments import add_json_argument, add_protocol_arguments
from vsm.cli.models import print_measurements
from vsm.cli.output import counting, print_json
from vsm.cli.processes import add_placement_arguments
from vsm.errors import SettingsError


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the run, the model's name, and how both are measured."""
    parser.add_argument(
        "run", type=Path, help="A run directory; or, with --rejection_only, a shipped model."
    )
    parser.add_argument("--name", type=str | None, help="By which the model is loaded.")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("models"),
        help="Folder that the model's own folder goes to; those in src/vsm/models ship.",
    )
    parser.add_argument(
        "--shots", type=str, default="", help="Support images, by comma; unset: the run's."
    )
    add_protocol_arguments(parser)
    parser.add_argument(
        "--storage",
        type=Literal["float16", "float32"],
        default="float16",
        help="Precision of stored kernels, matrices and memory contents.",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="Fit a temperature of the probabilities on validation classes, for each of the shots.",
    )
    parser.add_argument(
        "--data_license", type=str | None, help="Of the data; needed unless they are built in."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace the model of that name.")
    parser.add_argument(
        "--rejection_only",
        action="store_true",
        help="Only measure again when a shipped model answers 'none of these'; no weight changes.",
    )
    add_placement_arguments(parser)
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Store a run's model small, if that leaves it as good as it was."""
    parsed = parser.parse_args(arguments)
    shots = _numbers(parsed.shots)

    if (parsed.name is None) != parsed.rejection_only:
        raise SettingsError(
            "name: by which the model is to be loaded, give --name; only with --rejection-only it "
            "has one already"
        )

    from vsm.shipping import Shipment, add_rejection, ship
    from vsm.system.allocator import keep_allocations
    from vsm.system.devices import choose_placement

    keep_allocations()
    if parsed.rejection_only:
        card = add_rejection(parsed.run, choose_placement(parsed.device, parsed.precision))
        if parsed.json:
            print_json(card)
        else:
            print(f"{card['name']}: {_size(card)}")
        return
    chosen = parsed.as_dict()
    kept = ("name", "output", "way", "queries", "episodes", "seed", "storage", "calibrate")
    shipment = Shipment(
        shots=shots, **{key: chosen[key] for key in (*kept, "data_license", "overwrite")}
    )
    placement = choose_placement(parsed.device, parsed.precision)
    with counting(f"measure {parsed.run}", shipment.num_episodes(), quiet=parsed.json) as advance:
        card = ship(parsed.run, shipment, placement, advance)
    if parsed.json:
        print_json(card)
    else:
        print_measurements(card)
        for shot, temperature in (card["temperatures"] or {}).items():
            print(f"{shot}-shot temperature, fitted on validation classes: {temperature:.3f}")
        where = f"vsm.load_model({str(shipment.folder)!r})"
        print(f"{shipment.folder}: {_size(card)}; load it with {where}")


def _size(card: dict[str, Any]) -> str:
    return f"{card['bytes'] / 1000:,.0f} kB"


def _numbers(listed: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in listed.split(",") if word.strip())
    except ValueError:
        raise SettingsError(f"shots: expected numbers by comma, got {listed!r}") from None
