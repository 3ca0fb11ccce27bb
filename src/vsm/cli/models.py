"""``vsm models`` and ``vsm export``."""

import importlib.util
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from jsonargparse import ArgumentParser

from vsm.cli.arguments import (
    Actions,
    BackboneOption,
    JsonOption,
)
from vsm.cli.evaluate import print_measurements
from vsm.cli.main import lab_module
from vsm.cli.output import in_words, print_json, print_table, say
from vsm.runs.directory import shipped_card, shipped_names


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
                    f"{one['way']}-way {one['shot']}-shot {one['accuracy']:.2%} ± {one['ci95']:.2%}"
                    for one in card["measurements"]
                ),
                in_words(card["memory_slots"]),
                f"{card['bytes'] / 1000:,.0f} kB",
            ]
            for card in cards
        ]
        print_table("models that ship with vsm", columns, rows, words=True)


class Show(JsonOption):
    """Show the card of one; `vsm models NAME` is the same."""

    name: str = field(kw_only=False)
    """A shipped model."""

    def __call__(self) -> None:
        card = shipped_card(self.name)
        if self.json:
            print_json(card)
            return
        lines = [[key, in_words(value)] for key, value in card.items() if key != "measurements"]
        print_table(card["name"], ["", ""], lines, words=True)
        print_measurements(card)


class Export(BackboneOption, JsonOption):
    """Convert, compare with PyTorch, write."""

    model: str = field(kw_only=False)
    """A run directory, or a name that vsm models lists."""
    onnx: Path
    """Folder that encoder.onnx and classifier.onnx go into."""
    memory: Path | None = None
    """A memory file in place of the model's own."""
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


class Models(Actions):
    """``vsm models``, where the name of an action may be left out."""

    def start(self, parser: ArgumentParser, words: Sequence[str]) -> None:
        """List models, show the card of one, or what else is asked for."""
        first = next((word for word in words if not word.startswith("-")), None)
        if first in LAB_ACTIONS:
            lab_module("models")  # or say how to install it
        elif first is None and not {"-h", "--help"} & set(words):
            words = ["list", *words]
        elif first is not None and first not in OWN_ACTIONS:
            words = ["show", *words]
        super().start(parser, words)


HAS_LAB = importlib.util.find_spec("vsm_lab") is not None
OWN_ACTIONS = {"list": List, "show": Show}
LAB_ACTIONS = ("ship", "calibrate")
COMMANDS = {
    "models": Models(OWN_ACTIONS | (lab_module("models").ACTIONS if HAS_LAB else {})),
    "export": Export,
}
