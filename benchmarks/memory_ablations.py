"""What each choice of a preset is worth on validation classes: change one, train, compare.

Every variant is a head on one frozen backbone, trained as long as the preset says and measured on
the same validation episodes as the preset itself. Test classes are never touched. Writes
memory_ablations.md; a variant that was trained before is only measured.

    python -m benchmarks.memory_ablations --init runs/cifar-fs/backbone
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import run
from vsm.data import EpisodeSampler, open_dataset
from vsm.evaluation.cached_features import cached_features
from vsm.evaluation.evaluator import Evaluation, evaluate
from vsm.evaluation.statistics import Estimate, estimate
from vsm.reproduction.budgets import with_changes
from vsm.runs.configuration import preset_paths, read_settings, settings_from_files
from vsm.runs.trained_model import load_run
from vsm.settings import PretrainSettings, RunSettings
from vsm.system.allocator import keep_allocations
from vsm.system.files import write_text
from vsm.training import train

FOLDER = Path(__file__).parent
SHOTS = (1, 5)
SEED = 0

NETWORK_INFERENCE: Mapping[str, Any] = {
    "model.inference": "network",
    "memory.strength": None,
    "sampling.train_memory": 20,
    "sampling.evaluation_memory": 50,
}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "as the preset has it": {},
    "without memory (κ = 0)": {"method": "vpn"},
    "network inference without memory": {"method": "vpn", **NETWORK_INFERENCE},
    "network inference with memory": NETWORK_INFERENCE,
    "prototypes are means": {"method": "protonet"},
    "κ learned": {"memory.strength": None},
    "κ = 0.25": {"memory.strength": 0.25},
    "κ = 1": {"memory.strength": 1.0},
    "κ = 1.5": {"memory.strength": 1.5},
    "addressing scale 10": {"memory.addressing_scale": 10.0},
    "addressing scale 40": {"memory.addressing_scale": 40.0},
    "addressing scale learned from 20": {"memory.learn_addressing_scale": True},
    "addressing relative to the mean slot": {"memory.center_addressing": True},
    "all slots alike": {"memory.control": "uniform"},
    "weights of other slots": {"memory.control": "permuted"},
    "nothing hidden in training": {"memory.mask": "none"},
    "own slot hidden in training": {"memory.mask": "own"},
    "no gradient into the attention vector": {"memory.delayed_gradient": False},
    "mean update": {"memory.update": "mean"},
    "α = 0": {"memory.retention": 0.0},
    "α = 0.95": {"memory.retention": 0.95},
    "σ = tanh": {"memory.update_activation": "tanh"},
    "memory refreshed by 50 steps": {"memory.refresh_steps": 50},
    "β_z = 0": {"objective.beta_z": 0.0},
    "β_z = 1e-2": {"objective.beta_z": 1e-2},
    "L = 50 in training": {"sampling.train_prototypes": 50},
    "trained with 5 shots": {"shot": 5},
    "learning rate 1e-3": {"optimizer.learning_rate": 1e-3},
    "features of one view": {"model.mirror": False},
    "no adapter": {"model.adapter": "none"},
}
NETWORK: dict[str, Mapping[str, Any]] = {
    "soft recall (as above)": {},
    "mixture recall": {"memory.recall": "mixture"},
    "Gumbel recall": {"memory.recall": "gumbel"},
    "J = 5 in training": {"sampling.train_memory": 5},
    "J = 100 in training": {"sampling.train_memory": 100},
    "β_m = 0": {"objective.beta_m": 0.0},
    "β_m = 1e-2": {"objective.beta_m": 1e-2},
    "nothing hidden in training": {"memory.mask": "none"},
    "no gradient into the attention vector": {"memory.delayed_gradient": False},
}
"""Choices that only the paper's inference network has; differences are from the network itself."""


class Wanted(NamedTuple):
    """What is asked for: which preset, where its variants are kept, how long each is measured."""

    preset: str
    output: Path
    episodes: int


def measured(settings: RunSettings, path: Path, episodes: int) -> dict[int, Evaluation]:
    """Train a variant if it is not there, and measure it on validation classes."""
    if not (path / "model.safetensors").is_file():
        train(settings, path, resume=True)
    images = open_dataset(settings.data)
    trained = load_run(path, images)
    features = cached_features(trained.model, images, Path(settings.init or path))
    return {
        shot: evaluate(
            trained.model,
            trained.memory,
            EpisodeSampler(features, "validation", settings.way, shot, 15),
            episodes,
            SEED,
        )
        for shot in SHOTS
    }


def cell(value: Estimate, sign: str = "") -> str:
    """Return points and their interval."""
    return f"{100 * value.mean:{sign}.2f} ± {100 * value.ci95:.2f}"


def row(name: str, found: dict[int, Evaluation], first: dict[int, Evaluation]) -> str:
    """Return a line of the table: accuracy, and the paired difference from the first line."""
    cells = [name]
    for shot in SHOTS:
        difference = found[shot].episode_accuracies - first[shot].episode_accuracies
        paired = "" if found is first else cell(estimate(difference), "+")
        cells += [cell(found[shot].accuracy), paired]
    return f"| {' | '.join(cells)} |"


def backbones(folders: list[str]) -> dict[str, Mapping[str, Any]]:
    """Name each pre-training by how long it was; the preset follows on all of them alike."""
    variants: dict[str, Mapping[str, Any]] = {}
    for folder in folders:
        path = Path(folder)
        chosen = read_settings(PretrainSettings, path / "config.yaml")
        colors = ", colors varied" if chosen.augment and chosen.augment_colors else ""
        variants[f"{chosen.epochs} epochs{colors}"] = {"init": folder}
    return variants


def table(base: RunSettings, variants: Mapping[str, Mapping[str, Any]], wanted: Wanted) -> str:
    """Train and measure all variants of ``base``; the others are compared with the first."""
    lines = [
        f"| | {' | '.join(f'{shot}-shot | minus the first' for shot in SHOTS)} |",
        f"|---|{'---:|---:|' * len(SHOTS)}",
    ]
    first: dict[int, Evaluation] | None = None
    for name, changes in variants.items():
        parts = [f"{key}={str(value).replace('/', ':')}" for key, value in changes.items()]
        path = wanted.output / wanted.preset / ("-".join(parts) or "preset")
        found = measured(with_changes(base, changes), path, wanted.episodes)
        first = first or found
        lines.append(row(name, found, first))
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Train, measure and write all variants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="cifar-fs")
    parser.add_argument("--init", required=True, help="directory of vsm pretrain")
    parser.add_argument("--other-init", nargs="*", default=[], help="other pre-trainings")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    wanted = Wanted(given.preset, given.output, given.episodes)
    keep_allocations()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    base = settings_from_files(*preset_paths(given.preset))
    base = replace(base, init=given.init, freeze_backbone=True)
    sections = [
        f"# What each choice of the preset {given.preset} is worth\n",
        "Written by `python -m benchmarks.memory_ablations`. Each line changes one setting; one",
        f"seed, {given.episodes:,} episodes of {base.way} **validation** classes, accuracy in",
        "percent, differences paired episode by episode.\n",
    ]
    network = {name: {**NETWORK_INFERENCE, **changed} for name, changed in NETWORK.items()}
    for title, variants in (
        ("The preset", VARIANTS),
        ("The paper's inference network in its place", network),
        ("The preset on other pre-trainings", backbones([given.init, *given.other_init])),
    ):
        sections += [f"## {title}\n", table(base, variants, wanted) + "\n"]
        write_text(FOLDER / "memory_ablations.md", "\n".join(sections))


if __name__ == "__main__":
    raise SystemExit(run(main))
