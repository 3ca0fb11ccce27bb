"""``vsm evaluate``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jsonargparse

from vsm.cli.arguments import add_backbone_argument, add_json_argument, add_protocol_arguments
from vsm.cli.output import ProgressBar, print_json, print_table, progress_bar
from vsm.cli.processes import add_placement_arguments, prepare_placement
from vsm.errors import SettingsError
from vsm.runs.shipped import shipped_folder
from vsm.settings import BaselineName, BaselineSettings, Inference

if TYPE_CHECKING:
    from vsm.evaluation.protocol import EpisodeProtocol
    from vsm.runs.trained_model import TrainedModel


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
        help="Other data than the run's: folder:PATH or a prepared dataset; pictures are prepared "
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

    from vsm.runs.comparison import measure, measure_baseline, on_data
    from vsm.runs.trained_model import load

    placement = prepare_placement(parsed)
    trained = load(
        source,
        checkpoint=parsed.checkpoint,
        backbone=parsed.backbone,
        placement=placement,
        inference=parsed.inference,
    )
    protocol = episode_protocol(trained, parsed)
    with ProgressBar(parsed.json) as bar:
        subject = on_data(trained, protocol, bar)
    temperature = trained.calibration.temperature(protocol.shot) if parsed.calibrated else 1.0
    if temperature is None:
        raise SettingsError(
            f"calibrated: {trained.name} has no fitted temperature; make a model that has one with "
            "vsm models ship --calibrate"
        )
    with progress_bar(f"evaluate {source}", parsed.episodes, quiet=parsed.json) as bar:
        if parsed.classifier is None:
            measured = measure(subject, protocol, bar, temperature)
        else:
            measured = measure_baseline(subject, parsed.classifier, protocol, settings, bar)
    result = measured.as_dict()
    if parsed.json:
        print_json(result)
        return
    name = result["method"] if parsed.classifier is None else measured.describe()
    name += f", temperature {temperature:.3g}" if parsed.calibrated else ""
    print_table(protocol.describe(), SCORE_COLUMNS, [[name, *score_cells(result)]])


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


def episode_protocol(trained: "TrainedModel", options: jsonargparse.Namespace) -> "EpisodeProtocol":
    """Take the episodes from the options; what is unset comes from the model.

    For a shipped model that is what its card measured first, not what it was trained on.
    """
    from vsm.evaluation.protocol import EpisodeProtocol

    stated = vars(trained.settings) if trained.card is None else trained.card
    return EpisodeProtocol(
        data=options.data or trained.settings.data,
        way=stated["way"] if options.way is None else options.way,
        shot=stated["shot"] if options.shot is None else options.shot,
        **{name: options[name] for name in ("split", "queries", "episodes", "seed")},
        batch_norm=options.batch_norm,
        memory_slots=options.memory_slots,
    )


SCORE_COLUMNS = ["", "accuracy", "NLL", "ECE"]


def score_cells(result: dict[str, object]) -> list[str]:
    """Format accuracy with its interval, NLL and calibration error."""
    return [
        f"{result['accuracy']:.2%} ± {result['ci95']:.2%}",
        f"{result['nll']:.3f}",
        f"{result['ece']:.2%}",
    ]
