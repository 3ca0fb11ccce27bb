"""Settings: presets load, round trips keep everything, mistakes are named."""

import re
from pathlib import Path

import pytest

from vsm.errors import SettingsError
from vsm.runs.configuration import (
    PRESETS,
    preset_paths,
    settings_from_files,
    settings_to_yaml,
)
from vsm.runs.directory import RunDirectory
from vsm.settings import (
    MemorySettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    RunSettings,
)

SHIPPED = sorted(path.stem for path in PRESETS.glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_preset_loads(name: str) -> None:
    assert isinstance(settings_from_files(*preset_paths(name)), RunSettings)


def test_every_cell_of_the_papers_shallow_tables_has_a_preset() -> None:
    cells = {
        f"paper-{data}-{way}way-{shot}shot"
        for data in ("omniglot", "mini-imagenet", "tiered-imagenet", "cifar-fs")
        for way in (5, 20)
        for shot in (1, 5)
        if (data, way) != ("cifar-fs", 20)
    }
    assert cells == {name for name in SHIPPED if name.startswith("paper-")}


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("paper-")])
def test_the_papers_presets_hold_the_papers_numbers(name: str) -> None:
    preset = settings_from_files(*preset_paths(name))
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


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"unknown preset 'papr'; known: .*demo, .*paper, paper-"
    ):
        preset_paths("papr")


def test_settings_survive_a_round_trip_through_yaml(tmp_path: Path) -> None:
    settings = RunSettings(
        method="rote",
        way=7,
        memory=MemorySettings(top_k=3, capacity=9, addressing_scale=12.5, mask="own"),
        optimizer=OptimizerSettings(clip_norm=1.0, learning_rate=1e-5),
    )
    (tmp_path / "a.yaml").write_text(settings_to_yaml(settings))
    assert settings_from_files(tmp_path / "a.yaml") == settings


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
    settings = settings_from_files(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert (settings.way, settings.memory.retention, settings.memory.mask) == (7, 0.9, "own")


@pytest.mark.parametrize(
    ("text", "named"),
    [("wya: 5\n", "wya"), ("memory: {recal: soft}\n", "recal"), ("method: maml\n", "method")],
)
def test_unknown_keys_and_values_in_a_file_are_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SettingsError, match=named):
        settings_from_files(tmp_path / "a.yaml")


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
