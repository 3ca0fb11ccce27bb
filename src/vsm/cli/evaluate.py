"""``vsm evaluate``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse

from vsm.cli.arguments import add_backbone_argument, add_json_argument, add_protocol_arguments
from vsm.cli.output import ProgressBar, print_json, print_table
from vsm.cli.processes import add_placement_arguments, prepare_placement
from vsm.errors import SettingsError
from vsm.runs.shipped import shipped_folder
from vsm.settings import BaselineName, BaselineSettings, Inference


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
    add_episode_arguments(parser)


def add_episode_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare what ``evaluate`` and ``compare`` share."""
    parser.add_class_arguments(BaselineSettings, "baseline")
    parser.add_argument(
        "--inference",
        type=Inference | None,
        help="As training did, or by the Gaussian memory that it left; unset: what validation "
        "classes preferred.",
    )
    add_protocol_arguments(parser)
    parser.add_argument(
        "--data",
        type=str | None,
        help="Other data than the run's: folder:PATH or a prepared dataset; images are prepared "
        "as the run's encoder wants them.",
    )
    parser.add_argument("--shot", type=int | None, help="Support images; unset: the run's.")
    parser.add_argument(
        "--split",
        type=Literal["train", "validation", "test", "all"],
        default="test",
        help="Whose classes; a model has seen those of train of its own data.",
    )
    parser.add_argument(
        "--batch_norm",
        type=Literal["inductive", "transductive"],
        default="inductive",
        help="Running statistics, or each episode's own (queries then see each other).",
    )
    parser.add_argument(
        "--memory_slots",
        "--memory_classes",
        type=int | None,
        help="Keep only the first n classes of the memory, 0 for none; unset: all.",
    )
    add_placement_arguments(parser)
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure one run."""
    parsed = parser.parse_args(arguments)
    settings = BaselineSettings(**parsed.baseline.as_dict())
    source = _source(parsed)

    from vsm.runs.loading import load

    placement = prepare_placement(parsed)
    trained = load(
        source,
        checkpoint=parsed.checkpoint,
        backbone=parsed.backbone,
        placement=placement,
        inference=parsed.inference,
    )
    with ProgressBar(parsed.json) as bar:
        measured = trained.evaluate(
            **episode_options(parsed),
            classifier=parsed.classifier,
            baseline=settings,
            calibrated=parsed.calibrated,
            progress=bar,
        )
    result = measured.as_dict()
    if parsed.json:
        print_json(result)
        return
    name = result["method"] if parsed.classifier is None else measured.describe()
    name += f", temperature {measured.temperature:.3g}" if parsed.calibrated else ""
    print_table(measured.protocol.describe(), SCORE_COLUMNS, [[name, *score_cells(result)]])


def _source(parsed: jsonargparse.Namespace) -> str:
    """Return the run directory, or the name of the shipped model; refuse options that conflict."""
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
    if (parsed.run is None) == (parsed.model is None):
        raise SettingsError("run: give a run directory, or a shipped model with --model NAME")
    return str(parsed.run) if parsed.model is None else shipped_folder(parsed.model).name


EPISODE_OPTIONS = (
    *("data", "split", "way", "shot", "queries", "episodes", "seed"),
    *("batch_norm", "memory_slots"),
)


def episode_options(parsed: jsonargparse.Namespace) -> dict[str, Any]:
    """Return the options that say which episodes to measure on."""
    return {name: parsed[name] for name in EPISODE_OPTIONS}


SCORE_COLUMNS = ["", "accuracy", "NLL", "ECE"]


def score_cells(result: dict[str, object]) -> list[str]:
    """Format accuracy with its interval, NLL and calibration error."""
    return [
        f"{result['accuracy']:.2%} ± {result['ci95']:.2%}",
        f"{result['nll']:.3f}",
        f"{result['ece']:.2%}",
    ]
