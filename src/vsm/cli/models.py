"""``vsm models`` and ``vsm export``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from vsm.cli.arguments import (
    CommandEntry,
    JsonOption,
    MemoryOption,
    argument,
    declare,
    declare_actions,
)
from vsm.cli.evaluate import SCORE_COLUMNS, score_cells
from vsm.cli.main import has_lab, lab_module
from vsm.cli.output import print_json, print_table, say
from vsm.runs.directory import Card, shipped_card, shipped_names

LAB_ACTIONS = ("ship", "calibrate")


@dataclass(kw_only=True)
class List(JsonOption):
    """List the models that ship with the package; `vsm models` is the same."""

    def __call__(self) -> None:
        cards = [shipped_card(name) for name in shipped_names()]
        if self.json:
            print_json({"models": cards})
            return
        columns = ["name", "data", "method", "accuracy on unseen classes", "slots", "size"]
        rows = [
            [
                card["name"],
                card["data"],
                card["method"],
                "\n".join(
                    f"{_shape(one)} {one['accuracy']:.2%} ± {one['ci95']:.2%}"
                    for one in card["measurements"]
                ),
                _words(card["memory_slots"]),
                f"{card['bytes'] / 1000:,.0f} kB",
            ]
            for card in cards
        ]
        print_table("models that ship with vsm", columns, rows, words=True)


@dataclass(kw_only=True)
class Show(JsonOption):
    """Show the card of one; `vsm models NAME` is the same."""

    name: str = argument(positional=True)
    """A shipped model."""

    def __call__(self) -> None:
        card = shipped_card(self.name)
        if self.json:
            print_json(card)
            return
        lines = [[key, _words(value)] for key, value in card.items() if key != "measurements"]
        print_table(card["name"], ["", ""], lines, words=True)
        print_measurements(card)


@dataclass(kw_only=True)
class Export(MemoryOption, JsonOption):
    """Convert, compare with PyTorch, write."""

    model: str = argument(positional=True)
    """A run directory, or a name that vsm models lists."""
    onnx: Path
    """Folder that encoder.onnx and classifier.onnx go into."""
    overwrite: bool = False
    """Replace files that are there."""

    def __call__(self) -> None:
        from vsm.export import export_onnx

        exported = export_onnx(
            self.model,
            self.onnx,
            memory=self.memory,
            backbone=self.backbone,
            overwrite=self.overwrite,
        )
        files = [exported.encoder, exported.classifier]
        if self.json:
            print_json({"files": list(map(str, files)), "differences": exported.differences})
            return
        for file in files:
            say(f"{file}: {file.stat().st_size / 1000:,.0f} kB")
        listed = ", ".join(f"{name} {value:.1e}" for name, value in exported.differences.items())
        say(f"largest differences from PyTorch: {listed.replace('_', ' ')}")


def _models() -> CommandEntry:
    """Return ``vsm models``, with the actions of the lab where it is installed."""
    return declare_actions(ACTIONS | (lab_module("models").ACTIONS if has_lab() else {}))


def _add_arguments(parser: ArgumentParser) -> None:
    _models().add_arguments(parser)


def _run(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    words = list(arguments)
    first = next((word for word in words if not word.startswith("-")), None)
    if first is None and not {"-h", "--help"} & set(words):
        words = ["list", *words]
    elif first in LAB_ACTIONS:
        lab_module("models")  # or say how to install it
    elif first is not None and first not in ACTIONS:
        words = ["show", *words]
    _models().run(parser, words)


ACTIONS = {"list": List, "show": Show}
COMMANDS = {"models": CommandEntry(_add_arguments, _run), "export": declare(Export)}


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
