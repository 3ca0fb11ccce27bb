"""``vsm models ship`` and ``vsm models calibrate``."""

from dataclasses import field, fields
from pathlib import Path
from typing import Any, Literal

from vsm.cli.arguments import (
    BackboneOption,
    JsonOption,
    PlacementOptions,
    ProtocolOptions,
)
from vsm.cli.evaluate import print_measurements
from vsm.cli.output import ProgressBar, print_json, say
from vsm.errors import SettingsError


class Ship(ProtocolOptions, PlacementOptions, JsonOption):
    """Store a run's model small, if that leaves it as good as it was, with a card."""

    run: Path = field(kw_only=False)
    """A run directory."""
    name: str
    """By which the model is loaded."""
    output: Path = Path("models")
    """Folder that the model's own folder goes to; those in src/vsm/models ship."""
    shots: str = ""
    """Support images, by comma; unset: the run's."""
    storage: Literal["float16", "float32"] = "float16"
    """Precision of stored kernels, matrices and memory contents."""
    calibrate: bool = False
    """Fit a temperature of the probabilities on validation classes, for each of the shots."""
    measured: str = ""
    """Runs learned alike of part of the classes, by comma, if the run remembers all: the card has
    what is measured on the others."""
    data_license: str | None = None
    """Of the data; needed unless they are built in."""
    overwrite: bool = False
    """Replace the model of that name."""

    def __call__(self) -> None:
        lists: dict[str, Any] = {}
        try:
            lists["shots"] = tuple(int(word) for word in self.shots.split(",") if word.strip())
        except ValueError:
            raise SettingsError(f"shots: expected numbers by comma, got {self.shots!r}") from None
        lists["measured"] = tuple(Path(word) for word in self.measured.split(",") if word.strip())

        from vsm_lab.shipping import Shipment, ship

        placement = self.prepare_placement()
        shipment = Shipment(
            **{one.name: getattr(self, one.name) for one in fields(Shipment)} | lists
        )
        with ProgressBar(quiet=self.json) as bar:
            card = ship(self.run, shipment, placement, bar)
        if self.json:
            print_json(card)
            return
        print_measurements(card)
        for shot, temperature in (card["temperatures"] or {}).items():
            say(f"{shot}-shot temperature, fitted on validation classes: {temperature:.3f}")
        where = f"vsm.load({str(shipment.folder)!r})"
        say(f"{shipment.folder}: {card['bytes'] / 1000:,.0f} kB; load it with {where}")


class Calibrate(BackboneOption, PlacementOptions, JsonOption):
    """Measure again when a model answers 'none of these'; no weight changes."""

    name: str = field(kw_only=False)
    """A shipped model, or a run directory."""

    def __call__(self) -> None:
        from vsm_lab.shipping import calibrate

        found = calibrate(self.name, self.prepare_placement(), self.backbone)
        assert found.thresholds is not None
        shots = list(found.thresholds.by_shot)
        if self.json:
            print_json({"model": self.name, "shots": shots})
        else:
            say(f"{self.name}: rejection thresholds for {', '.join(map(str, shots))} shots")


ACTIONS = {"ship": Ship, "calibrate": Calibrate}
