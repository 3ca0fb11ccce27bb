"""Every setting has an effect on what training leaves, or is refused by name."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from safetensors.numpy import load_file

from run_helpers import rows
from vsm import training
from vsm.data import Dataset, ImageDataset, PixelNormalization
from vsm.data.dataset import FeatureDataset, natural
from vsm.errors import RunError, SettingsError
from vsm.runs.directory import RunDirectory
from vsm.settings import RunSettings, default_values, effective_settings
from vsm.system.devices import ON_CPU
from vsm.system.distributed import SINGLE_PROCESS
from vsm.system.progress import NULL_PROGRESS

COMBINATIONS = [
    ("protonet", "conjugate"),
    *((method, "conjugate") for method in ("vpn", "rote", "transformed", "vsm", "kanerva")),
    *((method, "network") for method in ("vpn", "rote", "transformed", "vsm", "kanerva")),
    ("vsm", "gaussian"),
    ("mann", "conjugate"),
]
SMALL: dict[str, Any] = {
    **{"data": "tiny", "way": 2, "queries": 2, "tasks": 1, "steps": 3, "seed": 9},
    **{"checkpoint_every": 9},
    **{"model.channels": 2, "model.hidden_units": 3, "mann.slots": 3, "mann.width": 3},
    **{"mann.reads": 2, "mann.controller_units": 3, "kanerva.slots": 3},
    **{"sampling.train_memory": 3, "sampling.train_prototypes": 3},
    **{"sampling.evaluation_memory": 2, "sampling.evaluation_prototypes": 3},
    **{"gaussian.normalization": "un", "gaussian.epsilon": 1.0, "gaussian.beta": 1.0},
    **{"gaussian.rho": 0.5, "gaussian.addressing_scale": 10.0, "gaussian.refresh_every": 2},
    **{"validation.every": 3, "validation.episodes": 2},
}
OTHER: dict[str, Any] = {
    **{"data": "other", "way": 3, "shot": 3, "method": "mann", "checkpoint_every": 1},
    **{"model.inference": "network", "augment_affine": 0.3, "model.backbone": "resnet12"},
    **{"model.keep_probability": 0.5},
    **{"model.initial_log_variance": -1.0, "model.temperature": 3.0},
    **{"memory.addressing_scale": 3.0, "memory.strength": 2.0},
    **{"memory.capacity": 1, "memory.attention_scale": 9.0, "memory.retention": 0.2},
    **{"memory.gumbel_temperature": 2.0, "memory.update_activation": "tanh"},
    **{
        "gaussian.normalization": "l2n",
        "mann.usage_decay": 0.1,
        "gaussian.rho": 0.9,
        "kanerva.retention": 0.5,
    },
    **{"objective.beta_z": 0.5, "objective.beta_m": 0.5},
    **{"optimizer.learning_rate": 0.01, "optimizer.halve_every": 1, "optimizer.clip_norm": 0.01},
    **{"optimizer.weight_decay": 0.5, "optimizer.warmup_steps": 2, "validation.every": 2},
}
CONTEXTS: list[tuple[str, str, dict[str, Any]]] = [
    ("memory.", "conjugate", {"memory.control": "uniform"}),
    ("memory.", "conjugate", {"memory.update": "mean"}),
    ("memory.", "conjugate", {"memory.strength": 0.5}),
    ("memory.", "conjugate", {"memory.capacity": 3}),
    ("memory.", "network", {"memory.recall": "mixture"}),
    ("memory.", "network", {"memory.recall": "gumbel"}),
    ("objective.", "conjugate", {"sampling.train_prototypes": 1}),
    ("optimizer.", "conjugate", {"optimizer.schedule": "step"}),
    ("gaussian.", "gaussian", {"gaussian.rho": 0.0}),
    ("augment", "conjugate", {"augment": False}),
    ("model.", "conjugate", {"data": "features:tiny"}),
    ("augment", "conjugate", {"data": "features:tiny"}),
    ("augment", "conjugate", {"init": "first", "freeze_backbone": True}),
    ("model.", "conjugate", {"init": "first", "freeze_backbone": True}),
    ("init", "conjugate", {"data": "features:tiny"}),
    ("freeze_backbone", "conjugate", {"init": "first"}),
    ("model.", "conjugate", {"model.backbone": "resnet12"}),
]
"""What is given of which settings together with others."""

NAMES = [name for name in default_values(RunSettings) if name != "freeze_backbone"]


def make_images(name: str) -> ImageDataset:
    random = np.random.default_rng(len(name))
    num_classes, per_class, shape = 11, 5, (16, 16, 3)
    patterns = random.integers(0, 200, (num_classes, 1, *shape))
    images = (patterns + random.integers(0, 55, (num_classes, per_class, *shape))).astype(np.uint8)
    return ImageDataset(
        **grouped(name, num_classes, per_class),
        images=images.reshape(-1, *shape),
        normalization=PixelNormalization((0.5,) * 3, (0.25,) * 3),
        augmentation=natural(2),
    )


def make_features(name: str) -> FeatureDataset:
    features = np.random.default_rng(0).normal(size=(55, 5)).astype(np.float32)
    return FeatureDataset(**grouped(name, 11, 5), features=features)


def grouped(name: str, num_classes: int, per_class: int) -> dict[str, Any]:
    splits = {"train": (0, 5), "validation": (5, 8), "test": (8, 11)}
    return {
        "name": name,
        "class_names": tuple(f"class{number}" for number in range(num_classes)),
        "class_starts": np.arange(0, num_classes * per_class + 1, per_class),
        "splits": {split: np.arange(*ends) for split, ends in splits.items()},
    }


@cache
def open_dataset(name: str) -> Dataset:
    return make_features(name) if name.startswith("features:") else make_images(name)


class Trainer:
    """Trains with settings by dotted names, each combination of them once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.calls = folder, 0, 0
        self.known: dict[str, Any] = {}

    def settings(self, values: dict[str, Any], given: list[str]) -> RunSettings:
        base = {**default_values(RunSettings), **SMALL, **values}
        is_gaussian = base["model.inference"] == "gaussian" and ":" not in base["data"]
        if is_gaussian and base["init"] is None:
            base["init"] = "first"
        if base["init"] is not None:
            base["init"] = str(self.folder / base["init"])
        return effective_settings(RunSettings, base, given)

    def left(self, settings: RunSettings, name: str | None = None) -> Any:
        """Return what a run logged, its tensors, and what else it did."""
        if repr(settings) not in self.known:
            self.count, self.calls = self.count + 1, 0
            run = self.folder / (name or str(self.count))
            parts = (RunDirectory(run), False, NULL_PROGRESS, SINGLE_PROCESS, ON_CPU)
            training._train(settings, *parts)  # what follows is the same for every run
            tensors = {
                (path.name, key): value.tobytes()
                for path in sorted(run.glob("*.safetensors"))
                for key, value in load_file(path).items()
            }
            self.known[repr(settings)] = (rows(run), tensors, self.calls)
        return self.known[repr(settings)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("runs"))

    def counted(function: Any) -> Any:
        def call(*values: Any) -> Any:
            trainer.calls += 1
            return function(*values)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "open_dataset", open_dataset)
        for name in ("save_resume", "synchronize_batch_norm"):  # how often is what they change
            patch.setattr(training, name, counted(getattr(training, name)))
        for name, seed in (("first", 1), ("second", 2)):
            values = {"method": "protonet", "seed": seed}
            trainer.left(trainer.settings(values, []), name)
        yield trainer


def other_value(name: str, value: Any) -> Any:
    """Return another value of a setting than the one of a run."""
    if name == "init":
        return "first" if value is None else "second"
    if OTHER.get(name, value) != value:
        return OTHER[name]
    section, _, field = name.rpartition(".")
    kind = get_type_hints(RunSettings)[section] if section else RunSettings
    hint = get_type_hints(kind)[field]
    if get_origin(hint) is None and hint is bool:
        return not value
    choices = [one for one in get_args(hint) if one != value]
    return choices[0] if choices and isinstance(choices[0], str) else value + 1


def require_effect(trainer: Trainer, name: str, context: dict[str, Any]) -> bool:
    """Whether ``name`` is not refused in ``context``; then it must change what a run leaves."""
    before = trainer.settings(context, [])
    value = {**default_values(RunSettings), **SMALL, **context}[name]
    if name == "init" and before.init is not None:
        value = "first"
    changed = {**context, name: other_value(name, value)}
    expected = trainer.left(before)
    try:
        found = trainer.left(trainer.settings(changed, [name]))
    except (RunError, SettingsError) as refusal:
        if name not in str(refusal):
            raise
        return False
    assert found != expected, f"{name} has no effect with {context}"
    return True


@pytest.mark.parametrize(("method", "inference"), COMBINATIONS)
def test_every_setting_has_an_effect_or_is_refused(
    method: str, inference: str, trainer: Trainer
) -> None:
    context: dict[str, Any] = {"method": method, "model.inference": inference}
    context |= {"shot": 2} if method == "mann" else {}  # usage decays from the third image on
    effective = [name for name in NAMES if require_effect(trainer, name, context)]
    assert {"way", "steps", "validation.every"} <= set(effective)
    assert ("memory.retention" in effective) == (
        method in ("rote", "transformed", "vsm") and inference != "gaussian"
    )


@pytest.mark.parametrize(("names", "inference", "given"), CONTEXTS)
def test_settings_that_depend_on_others_have_an_effect_or_are_refused(
    names: str, inference: str, given: dict[str, Any], trainer: Trainer
) -> None:
    context = {"method": "vsm", "model.inference": inference, **given}
    for name in default_values(RunSettings):
        if name.startswith(names) and name not in given:
            require_effect(trainer, name, context)
