"""``vsm models``."""

from collections.abc import Sequence
from typing import Any

import jsonargparse

from vsm.cli.arguments import add_json_argument
from vsm.cli.evaluate import SCORE_COLUMNS, score_cells
from vsm.cli.output import print_json, print_table
from vsm.runs.shipped import Card, shipped_card, shipped_names


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare whose card is wanted."""
    parser.add_argument(
        "name", type=str | None, nargs="?", help="Show this model's card; unset: list all models."
    )
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """List the models that ship with the package, or show the card of one."""
    parsed = parser.parse_args(arguments)
    if parsed.name is None:
        _list([shipped_card(name) for name in shipped_names()], parsed.json)
        return
    card = shipped_card(parsed.name)
    if parsed.json:
        print_json(card)
        return
    facts = [[key, _words(card[key])] for key in card if key != "measurements"]
    print_table(card["name"], ["", ""], facts, words=True)
    print_measurements(card)


def print_measurements(card: Card) -> None:
    """Print what the run and the stored model reached, and by how much they differ."""
    rows = []
    for one in card["measurements"]:
        gap = one["difference"]
        change = f"{100 * gap['accuracy']:+.3f} ± {100 * gap['ci95']:.3f}"
        rows.append([f"{one['way']}-way {one['shot']}-shot, run", *score_cells(one["run"]), ""])
        rows.append(["  stored", *score_cells(one), change])
        if "calibrated" in one:
            rows.append(["  calibrated", *score_cells(one["calibrated"]), ""])
    first = card["measurements"][0]
    print_table(
        f"{card['data']}, {first['split']} classes, {first['queries']} queries a class, "
        f"{first['episodes']} episodes, seed {first['seed']}",
        [*SCORE_COLUMNS, "change, points"],
        rows,
    )


def _list(cards: Sequence[Card], as_json: bool) -> None:
    if as_json:
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
                "\n".join(_accuracy(one) for one in card["measurements"]),
                "–" if card["memory_slots"] is None else f"{card['memory_slots']:,}",
                f"{card['bytes'] / 1000:,.0f} kB",
            ]
            for card in cards
        ],
        words=True,
    )


def _accuracy(measurement: dict[str, Any]) -> str:
    return (
        f"{measurement['way']}-way {measurement['shot']}-shot {measurement['accuracy']:.2%} "
        f"± {measurement['ci95']:.2%}"
    )


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
