"""``vsm models``."""

from collections.abc import Sequence
from typing import Any

import jsonargparse

from vsm.cli import lab
from vsm.cli.arguments import CommandParser, add_json_argument
from vsm.cli.evaluate import SCORE_COLUMNS, score_cells
from vsm.cli.output import print_json, print_table
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
        elif name in lab.MODEL_ACTIONS and lab.is_installed():
            lab.lab_module("models").ADD_ARGUMENTS[name](action)
        add_json_argument(action)
        actions.add_subcommand(name, action, help=purpose)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """List models, show the card of one, make one, or calibrate one."""
    words, actions = list(arguments), {"list": _list, "show": _show}
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None and not {"-h", "--help"} & set(words):
        words = ["list", *words]
    elif first in lab.MODEL_ACTIONS:
        actions |= lab.lab_module("models").ACTIONS
    elif first is not None and first not in ACTIONS:
        words = ["show", *words]
    parsed = parser.parse_args(words)
    chosen = parsed[parsed.action]
    actions[parsed.action](chosen)


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
    print_measurements(card)


def print_measurements(card: Card) -> None:
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
