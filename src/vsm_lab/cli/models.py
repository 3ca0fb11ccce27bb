"""``vsm models ship`` and ``vsm models calibrate``."""

from dataclasses import fields
from pathlib import Path
from typing import Literal

import jsonargparse

from vsm.cli.arguments import add_backbone_argument, add_protocol_arguments
from vsm.cli.models import print_measurements
from vsm.cli.output import ProgressBar, print_json, say
from vsm.cli.processes import add_placement_arguments, prepare_placement
from vsm.errors import SettingsError


def add_ship_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare what is shipped, under which name, and how it is measured."""
    parser.add_argument("run", type=Path, help="A run directory.")
    parser.add_argument("--name", type=str, required=True, help="By which the model is loaded.")
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
        "--measured",
        type=str,
        default="",
        help="Runs learned alike of part of the classes, by comma, if the run remembers all: the "
        "card has what is measured on the others.",
    )
    parser.add_argument(
        "--data_license", type=str | None, help="Of the data; needed unless they are built in."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace the model of that name.")
    add_placement_arguments(parser)


def add_calibrate_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the model and where to compute."""
    parser.add_argument("name", type=str, help="A shipped model, or a run directory.")
    add_backbone_argument(parser)
    add_placement_arguments(parser)


def _ship(chosen: jsonargparse.Namespace) -> None:
    try:
        chosen.shots = tuple(int(word) for word in chosen.shots.split(",") if word.strip())
    except ValueError:
        raise SettingsError(f"shots: expected numbers by comma, got {chosen.shots!r}") from None
    chosen.measured = tuple(Path(word) for word in chosen.measured.split(",") if word.strip())

    from vsm_lab.shipping import Shipment, ship

    placement = prepare_placement(chosen)
    shipment = Shipment(**{field.name: chosen[field.name] for field in fields(Shipment)})
    with ProgressBar(quiet=chosen.json) as bar:
        card = ship(chosen.run, shipment, placement, bar)
    if chosen.json:
        print_json(card)
        return
    print_measurements(card)
    for shot, temperature in (card["temperatures"] or {}).items():
        say(f"{shot}-shot temperature, fitted on validation classes: {temperature:.3f}")
    where = f"vsm.load({str(shipment.folder)!r})"
    say(f"{shipment.folder}: {card['bytes'] / 1000:,.0f} kB; load it with {where}")


def _calibrate(chosen: jsonargparse.Namespace) -> None:
    from vsm_lab.shipping import calibrate

    found = calibrate(chosen.name, prepare_placement(chosen), chosen.backbone)
    assert found.thresholds is not None
    shots = list(found.thresholds.by_shot)
    if chosen.json:
        print_json({"model": chosen.name, "shots": shots})
    else:
        say(f"{chosen.name}: rejection thresholds for {', '.join(map(str, shots))} shots")


ADD_ARGUMENTS = {"ship": add_ship_arguments, "calibrate": add_calibrate_arguments}
ACTIONS = {"ship": _ship, "calibrate": _calibrate}
