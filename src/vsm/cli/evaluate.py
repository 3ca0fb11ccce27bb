"""``vsm evaluate`` and ``vsm compare``."""

import importlib
import importlib.util
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from vsm.cli.arguments import (
    BackboneOption,
    BackbonesOption,
    JsonOption,
    PlacementOptions,
    ProtocolOptions,
)
from vsm.cli.output import ProgressBar, print_json, print_table
from vsm.errors import SettingsError
from vsm.runs.directory import Card, shipped_folder
from vsm.settings import BASELINE_NAMES, BaselineName, BaselineSettings, Inference

if TYPE_CHECKING:
    from vsm.baselines import BaselineKind
    from vsm.runs.trained_model import Comparison

LAB_BASELINES = "vsm_lab.transductive"
SCORE_COLUMNS = ["", "accuracy", "NLL", "ECE"]


class EpisodeOptions(ProtocolOptions):
    """Which episodes to measure on."""

    data: str | None = None
    """Other data than the run's: folder:PATH or a prepared dataset; images are prepared as the
    run's encoder wants them."""
    shot: int | None = None
    """Support images; unset: the run's."""
    split: Literal["train", "validation", "test", "all"] = "test"
    """Whose classes; a model has seen those of train of its own data."""
    batch_norm: Literal["inductive", "transductive"] = "inductive"
    """Running statistics, or each episode's own (queries then see each other)."""
    memory_slots: int | None = field(default=None, metadata={"aliases": ["--memory_classes"]})
    """Keep only the first n classes of the memory, 0 for none; unset: all."""
    transductive: bool = False
    """Classify the queries of an episode together, which help to find the prototypes."""
    proportions: float | Literal["balanced"] = "balanced"
    """How queries are dealt to the classes: equally many each, or α for shares from Dirichlet(α):
    2.0 is uneven, 0.5 very uneven."""
    outliers: float = 0.0
    """Share of images of other classes among the queries, which are not counted as answers."""

    def episodes_as_dict(self) -> dict[str, Any]:
        """Return these options, without those of derived classes."""
        return {name: getattr(self, name) for name in EpisodeOptions.fields()}


class MeasurementOptions(EpisodeOptions, PlacementOptions, JsonOption):
    """What ``evaluate`` and ``compare`` share."""

    baseline: BaselineSettings = field(default_factory=BaselineSettings)
    inference: Inference | None = None
    """As training did, or by the Gaussian memory that it left; unset: what validation classes
    preferred."""


class Evaluate(BackboneOption, MeasurementOptions):
    """Measure one run."""

    run: Path | None = field(kw_only=False, default=None)
    """A run directory, or the name of a shipped model."""
    model: str | None = None
    """A shipped model by name; `vsm models` lists them."""
    calibrated: bool = False
    """Calibrate probabilities by the temperature on the model's card."""
    checkpoint: Literal["best", "last"] = "best"
    """The best model by validation, or the last state."""
    classifier: BaselineName | None = None
    """Classify the run's features by this baseline; unset: by the run's own method."""

    def __call__(self) -> None:
        source = self._source()

        from vsm.runs.loading import load

        trained = load(
            source,
            checkpoint=self.checkpoint,
            backbone=self.backbone,
            placement=self.prepare_placement(),
            inference=self.inference,
        )
        with ProgressBar(self.json) as bar:
            measured = trained.evaluate(
                **self.episodes_as_dict(),
                classifier=self.classifier,
                baseline=self.baseline,
                calibrated=self.calibrated,
                progress=bar,
            )
        result = measured.as_dict()
        if self.json:
            print_json(result)
            return
        name = result["method"] if self.classifier is None else measured.describe()
        name += f", temperature {measured.temperature:.3g}" if self.calibrated else ""
        print_table(measured.protocol.describe(), SCORE_COLUMNS, [[name, *score_cells(result)]])

    def _source(self) -> str:
        """Return the run directory, or the name of the shipped model; check for conflicts."""
        if self.classifier is not None and self.memory_slots is not None:
            raise SettingsError(
                f"memory_slots: the classifier {self.classifier} has no memory, got "
                f"{self.memory_slots}; leave one of the two out"
            )
        if self.classifier is not None and self.transductive:
            raise SettingsError(
                f"transductive: the classifier {self.classifier} answers each query alone; leave "
                "one of the two out"
            )
        if self.classifier is not None and self.calibrated:
            raise SettingsError(
                f"calibrated: the card's temperature is the model's, not that of the classifier "
                f"{self.classifier}; leave one of the two out"
            )
        if (self.run is None) == (self.model is None):
            raise SettingsError("run: give a run directory, or a shipped model with --model NAME")
        return str(self.run) if self.model is None else shipped_folder(self.model).name


class Compare(BackbonesOption, MeasurementOptions):
    """Measure several runs, and baselines on the first one's features, on identical episodes."""

    runs: list[Path] = field(kw_only=False)
    """Run directories or names of shipped models; two or more, or one with --baselines."""
    baselines: str = ""
    """Also measure these baselines, separated by commas, on the features of the first run; vsm
    evaluate --help lists them at --classifier. A clone of the repository has transductive ones
    too: soft-kmeans, tim, alpha-tim, laplacian-shot, pt-map, stat-a, label-propagation."""

    def __call__(self) -> None:
        words = [word.strip() for word in self.baselines.split(",")]
        names = list(dict.fromkeys(word for word in words if word))  # each once
        kinds = [_find_baseline(name) for name in names]
        if len(self.runs) < 2 and not names and not self.transductive:
            raise SettingsError(
                "runs: two or more are compared, or one with --baselines, got one; vsm evaluate "
                "measures one"
            )

        from vsm.runs.loading import load

        placement = self.prepare_placement()
        # All are loaded first: a run that is missing is named before anything is measured.
        models = [
            load(path, backbone=self.backbone, placement=placement, inference=self.inference)
            for path in self.runs
        ]
        with ProgressBar(self.json) as bar:
            comparison = models[0].compare(
                *models[1:],
                **self.episodes_as_dict(),
                baselines=kinds,
                baseline=self.baseline,
                progress=bar,
            )
        if self.json:
            print_json(comparison.as_dict())
        else:
            print_comparison(comparison)


COMMANDS = {"evaluate": Evaluate, "compare": Compare}


def _find_baseline(name: str) -> "BaselineName | BaselineKind":
    known: list[str] = [*BASELINE_NAMES]
    if name in known:
        return cast(BaselineName, name)
    if importlib.util.find_spec("vsm_lab") is not None:
        found: dict[str, BaselineKind] = importlib.import_module(LAB_BASELINES).TRANSDUCTIVE
        if name in found:
            return found[name]
        known += found
    raise SettingsError(f"baselines: unknown baseline {name!r}; known: {', '.join(known)}")


def print_comparison(comparison: "Comparison") -> None:
    """Print the scores, and the paired differences below them."""
    measured = comparison.measured
    print_table(
        measured[0].protocol.describe(),
        SCORE_COLUMNS,
        [[one.describe(), *score_cells(one.as_dict())] for one in measured],
    )
    rows = [
        [f"{one.a} − {one.b}", f"{100 * one.estimate.mean:+.2f} ± {100 * one.estimate.ci95:.2f}"]
        for one in comparison.differences
    ]
    if rows:
        title = "paired differences in accuracy, in points with 95% intervals"
        print_table(title, ["", "difference"], rows)


def score_cells(result: dict[str, object]) -> list[str]:
    """Format accuracy with its interval, NLL and calibration error."""
    return [
        f"{result['accuracy']:.2%} ± {result['ci95']:.2%}",
        f"{result['nll']:.3f}",
        f"{result['ece']:.2%}",
    ]


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
        f"{card['data']}, {first['split']} classes, {first['queries']} queries per class, "
        f"{first['episodes']} episodes, seed {first['seed']}",
        [*SCORE_COLUMNS, "change, points"],
        rows,
    )
