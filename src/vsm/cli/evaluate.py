"""``vsm evaluate``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jsonargparse

from vsm.cli.arguments import add_backbone_argument, add_json_argument, add_protocol_arguments
from vsm.cli.output import counting, print_json, print_table
from vsm.cli.processes import add_placement_arguments
from vsm.errors import SettingsError
from vsm.runs.shipped import Card, shipped_folder, temperature_for
from vsm.settings import BaselineName, BaselineSettings


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the run and the episodes."""
    parser.add_argument(
        "run", type=Path | None, nargs="?", help="A run directory, or the name of a shipped model."
    )
    parser.add_argument(
        "--model", type=str | None, help="A shipped model by name; `vsm models` lists them."
    )
    parser.add_argument(
        "--calibrated",
        action="store_true",
        help="Calibrate probabilities by the temperature on the model's card.",
    )
    parser.add_argument(
        "--checkpoint",
        type=Literal["best", "last"],
        default="best",
        help="The best model by validation, or the last state.",
    )
    add_backbone_argument(parser)
    parser.add_argument(
        "--classifier",
        type=BaselineName | None,
        help="Classify the run's features by this baseline; unset: by the run's own method.",
    )
    add_baseline_arguments(parser)
    add_episode_arguments(parser)


def add_baseline_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the hyper-parameters of baselines."""
    parser.add_class_arguments(BaselineSettings, "baseline")


def baseline_settings(parsed: jsonargparse.Namespace) -> BaselineSettings:
    """Return the hyper-parameters of baselines, checked."""
    return BaselineSettings(**parsed.baseline.as_dict())


def add_episode_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare what ``evaluate`` and ``compare`` share."""
    add_protocol_arguments(parser)
    parser.add_argument("--shot", type=int | None, help="Support images; unset: the run's.")
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
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure one run."""
    parsed = parser.parse_args(arguments)
    settings = baseline_settings(parsed)
    if parsed.classifier is not None and parsed.memory_slots is not None:
        raise SettingsError(
            f"memory_slots: the classifier {parsed.classifier} has no memory, got "
            f"{parsed.memory_slots}; leave one of the two out"
        )
    if parsed.classifier is not None and parsed.calibrated:
        raise SettingsError(
            f"calibrated: the card's temperature is the model's, not that of the classifier "
            f"{parsed.classifier}; leave one of the two out"
        )
    source = _source(parsed)

    from vsm.evaluation.comparison import EpisodeProtocol, load_for, measure, measure_baseline
    from vsm.system.allocator import keep_allocations
    from vsm.system.devices import choose_placement

    keep_allocations()
    placement = choose_placement(parsed.device, parsed.precision)
    protocol = EpisodeProtocol.of(source, parsed)
    loaded = load_for(source, protocol, parsed.checkpoint, parsed.backbone, placement)
    temperature = 1.0
    if parsed.calibrated:
        temperature = _temperature(source, loaded.trained.card, protocol.shot)
    with counting(
        f"evaluate {parsed.model or source}", parsed.episodes, quiet=parsed.json
    ) as advance:
        if parsed.classifier is None:
            measured = measure(loaded, protocol, advance, temperature)
        else:
            measured = measure_baseline(loaded, parsed.classifier, protocol, settings, advance)
    result = measured.as_dict()
    if parsed.json:
        print_json(result)
        return
    name = result["method"] if parsed.classifier is None else measured.describe()
    name += f", temperature {temperature:.3g}" if parsed.calibrated else ""
    print_table(protocol.describe(), SCORE_COLUMNS, [[name, *score_cells(result)]])


def _source(parsed: jsonargparse.Namespace) -> Path:
    """Return the run directory, or the folder of the shipped model."""
    if (parsed.run is None) == (parsed.model is None):
        raise SettingsError("run: give a run directory, or a shipped model with --model NAME")
    return parsed.run if parsed.model is None else shipped_folder(parsed.model)


def _temperature(source: Path, card: Card | None, shot: int) -> float:
    temperature = None if card is None else temperature_for(card, shot)
    if temperature is None:
        raise SettingsError(
            f"calibrated: {source.name} has no fitted temperature; make a model that has one with "
            "vsm ship --calibrate"
        )
    return temperature


SCORE_COLUMNS = ["", "accuracy", "NLL", "ECE"]


def score_cells(result: dict[str, object]) -> list[str]:
    """Format accuracy with its interval, NLL and calibration error."""
    return [
        f"{result['accuracy']:.2%} ± {result['ci95']:.2%}",
        f"{result['nll']:.3f}",
        f"{result['ece']:.2%}",
    ]
