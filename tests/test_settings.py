"""Settings: presets load, round trips keep everything, mistakes are named."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vsm.errors import SettingsError
from vsm.memory import Observations, SlotConsolidation
from vsm.memory.slots.recall import Addressing, entropy
from vsm.runs.configuration import (
    PRESETS,
    check_settings,
    preset_paths,
    read_settings,
    settings_to_yaml,
)
from vsm.runs.directory import RunDirectory
from vsm.settings import (
    METHODS,
    MemorySettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    RunSettings,
    default_values,
    effective_settings,
)
from vsm_lab.jobs import with_changes

SHIPPED = sorted(path.stem for path in PRESETS.glob("*.yaml"))
CELLS = [name for name in SHIPPED if name.startswith("paper-") and name != "paper-literal"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_preset_loads(name: str) -> None:
    assert isinstance(read_settings(RunSettings, *preset_paths(name)), RunSettings)


def test_every_cell_of_the_papers_shallow_tables_has_a_preset() -> None:
    cells = {
        f"paper-{data}-{way}way-{shot}shot"
        for data in ("omniglot", "mini-imagenet", "tiered-imagenet", "cifar-fs")
        for way in (5, 20)
        for shot in (1, 5)
        if (data, way) != ("cifar-fs", 20)
    }
    assert cells == set(CELLS)


@pytest.mark.parametrize(
    ("where", "cause"),
    [
        ({"data": "features:birds"}, "on stored features; leave it out$"),
        (
            {"init": "runs/p", "freeze_backbone": True},
            "with freeze_backbone true; leave it out, or use --freeze_backbone false$",
        ),
    ],
)
def test_affine_maps_are_refused_where_there_are_no_images(
    where: dict[str, Any], cause: str
) -> None:
    with pytest.raises(SettingsError, match=f"^augment_affine: has no effect {cause}"):
        RunSettings(augment_affine=0.1, **where)
    with pytest.raises(SettingsError, match="augment_affine: has no effect with augment false"):
        RunSettings(augment_affine=0.1, augment=False)


@pytest.mark.parametrize("name", CELLS)
def test_the_papers_presets_hold_the_papers_numbers(name: str) -> None:
    preset = read_settings(RunSettings, *preset_paths(name))
    data, way, shot = re.fullmatch(r"paper-(.+)-(\d+)way-(\d)shot", name).groups()  # type: ignore[union-attr]
    assert (preset.data, preset.way, preset.shot) == (data, int(way), int(shot))
    assert (preset.steps, preset.optimizer.learning_rate, preset.memory.retention) == (
        (150_000, 2.5e-4, 0.7) if shot == "1" else (100_000, 1e-4, 0.8)
    )
    assert preset.model.keep_probability == (0.9 if data == "omniglot" else 0.5)
    assert preset.tasks == 8
    assert preset.sampling.train_memory == 150
    assert preset.sampling.train_prototypes == 100
    assert preset.optimizer.schedule == "constant"
    assert not preset.model.residual


@pytest.mark.parametrize(("name", "is_inert"), [("paper", False), ("paper-literal", True)])
def test_the_literal_reading_of_the_paper_alone_has_an_inert_memory(
    name: str, is_inert: bool
) -> None:
    """Eight classes of post-ReLU features of length 7, kept by Eqs. 11-13 and addressed."""
    random = torch.Generator().manual_seed(0)
    settings = read_settings(RunSettings, *preset_paths(name)).memory
    patterns = torch.randn(8, 256, generator=random).relu()
    patterns = 7 * torch.nn.functional.normalize(patterns, dim=1)
    seen = patterns.repeat(5, 1) + 0.1 * torch.randn(40, 256, generator=random).relu()
    classes = torch.arange(8).repeat(5)
    consolidation = SlotConsolidation(256, settings)
    memory = consolidation.empty()
    for step in range(60):
        memory = consolidation(memory, Observations(seen, classes), step)
    weights = Addressing(settings)(patterns[None], memory.content.detach(), None)
    from_uniform = math.log(8) - entropy(weights).mean().item()
    assert from_uniform < 0.05 if is_inert else from_uniform > 1.0


def test_the_literal_reading_is_added_to_a_cell(tmp_path: Path) -> None:
    cell = read_settings(RunSettings, *preset_paths("paper-cifar-fs-5way-5shot"))
    paths = [*preset_paths("paper-cifar-fs-5way-5shot"), *preset_paths("paper-literal")]
    literal = read_settings(RunSettings, *paths)
    changed = {"addressing": "dot", "center_addressing": False, "update_activation": "softmax"}
    memory = replace(cell.memory, learn_addressing_scale=False, **changed)  # type: ignore[arg-type]
    assert literal == replace(cell, memory=memory)


def test_slots_that_sum_to_one_are_refused_where_they_are_averaged_with_features() -> None:
    softmax = {"memory.update_activation": "softmax"}
    with pytest.raises(
        SettingsError, match=r"^memory\.update_activation: softmax makes slots .* use"
    ):
        given(softmax)
    given({**softmax, "model.inference": "network"})
    given({"memory.update_activation": "tanh"})


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"unknown preset 'papr'; known: .*demo, .*paper, paper-"
    ):
        preset_paths("papr")


def test_settings_survive_a_round_trip_through_yaml(tmp_path: Path) -> None:
    settings = RunSettings(
        method="rote",
        way=7,
        memory=MemorySettings(capacity=9, addressing_scale=12.5, mask="own"),
        optimizer=OptimizerSettings(clip_norm=1.0, learning_rate=1e-5),
    )
    (tmp_path / "a.yaml").write_text(settings_to_yaml(settings))
    assert read_settings(RunSettings, tmp_path / "a.yaml") == settings
    text = (tmp_path / "a.yaml").read_text()
    assert "  mask: own\n" in text
    assert "train_memory" not in text  # it has no effect


def test_a_run_directory_with_other_settings_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    settings = RunSettings(model=ModelSettings(inference="network", residual=False))
    run.create(settings)
    assert run.settings() == settings
    run.config.write_text("steps: many\n")
    with pytest.raises(SettingsError, match=r"config\.yaml: .*steps"):
        run.settings()
    run.config.write_text("- a list\n")
    with pytest.raises(SettingsError, match=r"config\.yaml"):
        run.settings()


def test_later_files_override_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("way: 7\nmemory: {retention: 0.3, mask: own}\n")
    (tmp_path / "b.yaml").write_text("memory: {retention: 0.9}\n")
    settings = read_settings(RunSettings, tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert (settings.way, settings.memory.retention, settings.memory.mask) == (7, 0.9, "own")


@pytest.mark.parametrize(
    ("text", "named"),
    [("wya: 5\n", "wya"), ("memory: {recal: soft}\n", "recal"), ("method: maml\n", "method")],
)
def test_unknown_keys_and_values_in_a_file_are_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SettingsError, match=named):
        read_settings(RunSettings, tmp_path / "a.yaml")


def test_impossible_values_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"retention: must lie in \[0.0, 1.0\], got 1.5"):
        MemorySettings(retention=1.5)
    with pytest.raises(SettingsError, match=r"keep_probability: must lie in \(0.0, 1.0\], got 0"):
        ModelSettings(keep_probability=0.0)
    with pytest.raises(SettingsError, match="beta_z: must not be negative, got -1"):
        ObjectiveSettings(beta_z=-1)
    with pytest.raises(SettingsError, match="steps: must be greater than 0, got 0"):
        RunSettings(steps=0)
    with pytest.raises(SettingsError, match="method: expected one of protonet, vpn"):
        RunSettings(method="maml")  # type: ignore[arg-type]


def given(options: dict[str, Any]) -> RunSettings:
    """Build settings that a user gives by dotted names, all of which must have an effect."""
    return effective_settings(RunSettings, default_values(RunSettings) | options, options)


# What ships is valid, and every value that has an effect is the one it was.


@pytest.mark.parametrize("name", SHIPPED)
def test_presets_serve_several_methods(name: str) -> None:
    preset = read_settings(RunSettings, *preset_paths(name))
    for method in METHODS:
        is_served = method in ("protonet", "mann", "vsm") or preset.inference != "gaussian"
        if is_served:
            served = with_changes(preset, {"method": method})
            assert (served.method, served.steps) == (method, preset.steps)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": {"channels": 10**9}}, r"channels: must lie in \(0, 65,536\]"),
        ({"kanerva": {"slots": 10**6}}, r"slots: must lie in \(0, 65,536\]"),
        ({"steps": 10**400}, "steps: must be at most 2,147,483,647, got more"),
        ({"model": {"temperature": float("nan")}}, "temperature: must be greater than 0, got nan"),
        ({"optimizer": {"weight_decay": float("nan")}}, "weight_decay: must not be negative"),
        ({"memory": {"retention": float("nan")}}, "retention: must lie in"),
    ],
)
def test_absurd_numbers_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        check_settings(RunSettings, values, Path("a.yaml"))
