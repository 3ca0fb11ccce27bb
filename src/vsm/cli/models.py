"""``vsm models``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse

from vsm.cli.arguments import (
    CommandParser,
    add_backbone_argument,
    add_json_argument,
    add_protocol_arguments,
)
from vsm.cli.evaluate import SCORE_COLUMNS, score_cells
from vsm.cli.output import ProgressBar, print_json, print_table, say
from vsm.cli.processes import add_placement_arguments, prepare_placement
from vsm.errors import SettingsError
from vsm.runs.shipped import Card, shipped_card, shipped_names

ACTIONS = {
    "list": "List the models that ship with the package; `vsm models` is the same.",
    "show": "Show the card of one; `vsm models NAME` is the same.",
    "ship": "Store a run's model small, if that leaves it as good as it was, with a card.",
    "calibrate": "Measure again when a model answers 'none of these'; no weight changes.",
}


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare what can be done with models."""
    actions = parser.add_subcommands(dest="action", required=False)
    for name, purpose in ACTIONS.items():
        action = CommandParser(description=purpose)
        if name == "show":
            action.add_argument("name", type=str, help="A shipped model.")
        elif name == "ship":
            _add_ship(action)
        elif name == "calibrate":
            action.add_argument("name", type=str, help="A shipped model, or a run directory.")
            add_backbone_argument(action)
            add_placement_arguments(action)
        add_json_argument(action)
        actions.add_subcommand(name, action, help=purpose)


def _add_ship(parser: jsonargparse.ArgumentParser) -> None:
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


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """List models, show the card of one, make one, or calibrate one."""
    words = list(arguments)
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None and not {"-h", "--help"} & set(words):
        words = ["list", *words]
    elif first is not None and first not in ACTIONS:
        words = ["show", *words]
    parsed = parser.parse_args(words)
    chosen = parsed[parsed.action]
    {"list": _list, "show": _show, "ship": _ship, "calibrate": _calibrate}[parsed.action](chosen)


def _list(chosen: jsonargparse.Namespace) -> None:
    cards = [shipped_card(name) for name in shipped_names()]
    if chosen.json:
        print_json({"models": cards})
        return
    print_table(
        "models that ship with vsm",
        ["name", "data", "method", "accuracy on unseen classes", "slots", "size"],
        [
            [
                card["name"],
                card["data"],
                card["method"],
                "\n".join(
                    f"{_shape(one)} {one['accuracy']:.2%} ± {one['ci95']:.2%}"
                    for one in card["measurements"]
                ),
                "–" if card["memory_slots"] is None else f"{card['memory_slots']:,}",
                f"{card['bytes'] / 1000:,.0f} kB",
            ]
            for card in cards
        ],
        words=True,
    )


def _show(chosen: jsonargparse.Namespace) -> None:
    card = shipped_card(chosen.name)
    if chosen.json:
        print_json(card)
        return
    lines = [[key, _words(value)] for key, value in card.items() if key != "measurements"]
    print_table(card["name"], ["", ""], lines, words=True)
    _print_measurements(card)


def _ship(chosen: jsonargparse.Namespace) -> None:
    try:
        chosen.shots = tuple(int(word) for word in chosen.shots.split(",") if word.strip())
    except ValueError:
        raise SettingsError(f"shots: expected numbers by comma, got {chosen.shots!r}") from None
    chosen.measured = tuple(Path(word) for word in chosen.measured.split(",") if word.strip())

    from dataclasses import fields

    from vsm.experiments.shipping import Shipment, ship

    placement = prepare_placement(chosen)
    shipment = Shipment(**{field.name: chosen[field.name] for field in fields(Shipment)})
    with ProgressBar(quiet=chosen.json) as bar:
        card = ship(chosen.run, shipment, placement, bar)
    if chosen.json:
        print_json(card)
        return
    _print_measurements(card)
    for shot, temperature in (card["temperatures"] or {}).items():
        say(f"{shot}-shot temperature, fitted on validation classes: {temperature:.3f}")
    where = f"vsm.load({str(shipment.folder)!r})"
    say(f"{shipment.folder}: {card['bytes'] / 1000:,.0f} kB; load it with {where}")


def _calibrate(chosen: jsonargparse.Namespace) -> None:
    from vsm.experiments.shipping import calibrate

    found = calibrate(chosen.name, prepare_placement(chosen), chosen.backbone)
    assert found.thresholds is not None
    shots = list(found.thresholds.by_shot)
    if chosen.json:
        print_json({"model": chosen.name, "shots": shots})
    else:
        say(f"{chosen.name}: rejection thresholds for {', '.join(map(str, shots))} shots")


def _print_measurements(card: Card) -> None:
    """Print what the run and the stored model reached, and by how much they differ."""
    rows = []
    for one in card["measurements"]:
        gap = one["difference"]
        change = f"{100 * gap['accuracy']:+.3f} ± {100 * gap['ci95']:.3f}"
        rows.append([f"{_shape(one)}, run", *score_cells(one["run"]), ""])
        rows.append(["  stored", *score_cells(one), change])
        if "calibrated" in one:
            rows.append(["  calibrated", *score_cells(one["calibrated"]), ""])
    first = card["measurements"][0]
    print_table(
        f"{card['data']}, {first['split']} classes, {first['queries']} queries per class, "
        f"{first['episodes']} episodes, seed {first['seed']}",
        [*SCORE_COLUMNS, "change, points"],
        rows,
    )


def _shape(measurement: dict[str, Any]) -> str:
    return f"{measurement['way']}-way {measurement['shot']}-shot"


def _words(value: Any) -> str:
    """Format one entry of a card for people: a line for each item of a list."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        apart = "\n" if any(isinstance(item, str) for item in value) else ", "
        return apart.join(_words(item) for item in value)
    if isinstance(value, float):
        return f"{value:.5g}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
