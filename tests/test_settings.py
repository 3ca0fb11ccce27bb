"""Settings: presets load, round trips keep everything, mistakes are named."""

import math
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from vsm.cli import main
from vsm.errors import SettingsError
from vsm.memory import Observations, SlotConsolidation
from vsm.memory.slots.addressing import Addressing, entropy
from vsm.runs.configuration import (
    PRESETS,
    check_settings,
    preset_paths,
    settings_from_files,
    settings_to_yaml,
)
from vsm.runs.directory import RunDirectory
from vsm.settings import (
    METHODS,
    NETWORK_SETTINGS,
    MemorySettings,
    Method,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    RunSettings,
)

SHIPPED = sorted(path.stem for path in PRESETS.glob("*.yaml"))
CELLS = [name for name in SHIPPED if name.startswith("paper-") and name != "paper-literal"]


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
    assert cells == set(CELLS)


@pytest.mark.parametrize(
    "where", [{"data": "features:birds"}, {"init": "runs/p", "freeze_backbone": True}]
)
def test_affine_maps_are_refused_where_there_are_no_images(where: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="augment_affine: has no effect where images are feat"):
        RunSettings(augment_affine=0.1, **where)
    with pytest.raises(SettingsError, match="augment_affine: has no effect with augment false"):
        RunSettings(augment_affine=0.1, augment=False)


@pytest.mark.parametrize("name", CELLS)
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


@pytest.mark.parametrize(("name", "is_inert"), [("paper", False), ("paper-literal", True)])
def test_the_literal_reading_of_the_paper_alone_has_an_inert_memory(
    name: str, is_inert: bool
) -> None:
    """Eight classes of post-ReLU features of length 7, kept by Eqs. 11-13 and addressed."""
    random = torch.Generator().manual_seed(0)
    settings = settings_from_files(*preset_paths(name)).memory
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
    cell = settings_from_files(*preset_paths("paper-cifar-fs-5way-5shot"))
    paths = [*preset_paths("paper-cifar-fs-5way-5shot"), *preset_paths("paper-literal")]
    literal = settings_from_files(*paths)
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
    given({**softmax, "memory.update": "mean"})
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
        memory=MemorySettings(top_k=3, capacity=9, addressing_scale=12.5, mask="own"),
        optimizer=OptimizerSettings(clip_norm=1.0, learning_rate=1e-5),
    )
    (tmp_path / "a.yaml").write_text(settings_to_yaml(settings))
    assert settings_from_files(tmp_path / "a.yaml") == settings
    assert "  train_memory: null\n" in (tmp_path / "a.yaml").read_text()


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


# Settings without effect.

GIVEN: dict[str, Any] = {
    "sampling.train_memory": 150,  # a default that is given is given, too
    "sampling.evaluation_memory": 20,
    "objective.beta_m": 0.0,
    "memory.recall": "soft",
    "memory.gumbel_temperature": 0.5,
}
NETWORK = {"model.inference": "network"}


def given(options: dict[str, Any]) -> RunSettings:
    """Read settings that are given by dotted names, as on a command line."""
    nested: dict[str, Any] = {}
    for name, value in options.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    return check_settings(RunSettings, nested, Path("given"))


@pytest.mark.parametrize("name", NETWORK_SETTINGS)
@pytest.mark.parametrize("method", [method for method in METHODS if method != "mann"])
def test_settings_without_effect_are_refused_by_name(name: str, method: str) -> None:
    message = (
        f"{name}: has no effect with model.inference conjugate, which integrates m out; "
        "leave it out (null), or use --model.inference network"
    )
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        given({"method": method, name: GIVEN[name]})
    gumbel = {"memory.recall": "gumbel"} if name == "memory.gumbel_temperature" else {}
    with_network = given({**NETWORK, **gumbel, name: GIVEN[name]})
    assert attrgetter(name)(with_network) == GIVEN[name]
    with pytest.raises(SettingsError, match=r"^[a-z_.]+: has no effect"):
        replace(with_network, model=ModelSettings())


def test_a_strength_is_refused_where_the_network_infers() -> None:
    with pytest.raises(SettingsError) as refused:
        given({**NETWORK, "memory.strength": 0.0})
    assert str(refused.value) == (
        "memory.strength: has no effect with model.inference network; leave it out (null), or use "
        "--model.inference conjugate"
    )
    with pytest.raises(SettingsError) as refused:
        given({"method": "mann", "memory.strength": 0.5})
    assert str(refused.value) == (
        "memory.strength: has no effect with method mann, which always uses the network; leave it "
        "out (null), or use another method"
    )


def test_mann_uses_the_network_whatever_the_inference() -> None:
    settings = given({"method": "mann", "sampling.train_memory": 7})
    assert settings.model.inference == "conjugate"
    assert settings.inference == "network"
    assert settings.sampling.num_memories(training=True) == 7


@pytest.mark.parametrize("recall", [None, "soft", "mixture"])
def test_a_gumbel_temperature_needs_gumbel_recall(recall: str | None) -> None:
    with pytest.raises(SettingsError) as refused:
        given({**NETWORK, "memory.recall": recall, "memory.gumbel_temperature": 2.0})
    assert str(refused.value) == (
        f"memory.gumbel_temperature: has no effect with memory.recall {recall or 'soft'}; leave it "
        "out (null), or use --memory.recall gumbel"
    )


def test_what_is_left_out_has_its_default() -> None:
    settings = RunSettings(model=ModelSettings(inference="network"))
    assert all(attrgetter(name)(settings) is None for name in NETWORK_SETTINGS)
    assert settings.sampling.num_memories(training=True) == 150
    assert settings.sampling.num_memories(training=False) == 150
    assert settings.objective.kl_m_weight == 1e-3
    assert ObjectiveSettings(beta_m=0.0).kl_m_weight == 0.0
    assert settings.memory.recall_kind == "soft"
    assert settings.memory.gumbel_softmax_temperature == 0.5


def test_unknown_values_of_what_may_be_left_out_are_refused() -> None:
    with pytest.raises(
        SettingsError, match="recall: expected one of soft, mixture, gumbel, got 's"
    ):
        MemorySettings(recall="sharp")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="beta_m: must not be negative, got -1"):
        ObjectiveSettings(beta_m=-1)


def test_the_command_line_names_what_has_no_effect_and_takes_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--preset", "cifar-fs", "--model.inference", "network"]
    output = ["--output", str(tmp_path / "run"), "--data", "nowhere"]
    assert main([*arguments, *output]) == 2
    assert "memory.strength: has no effect with model.inference network" in capsys.readouterr().err
    assert main([*arguments, "--memory.strength", "null", *output]) == 2
    assert "nowhere" in capsys.readouterr().err  # the settings are all right, the data is not


# What ships is valid, and every value that has an effect is the one it was.


@pytest.mark.parametrize("name", SHIPPED)
def test_presets_serve_several_methods(name: str) -> None:
    preset = settings_from_files(*preset_paths(name))
    if preset.inference == "gaussian":
        return  # the method vsm alone
    methods: list[Method] = ["protonet", "vpn", "rote", "transformed", "vsm", "kanerva"]
    for method in methods:
        assert replace(preset, method=method).inference == preset.inference


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": {"channels": 10**9}}, "channels: must be at most 65,536"),
        ({"kanerva": {"slots": 10**6}}, "slots: must be at most 65,536"),
        ({"steps": 10**400}, "steps: must be at most 2,147,483,647, got more"),
        ({"model": {"temperature": float("nan")}}, "temperature: must be greater than 0, got nan"),
        ({"optimizer": {"weight_decay": float("nan")}}, "weight_decay: must not be negative"),
        ({"memory": {"retention": float("nan")}}, "retention: must lie in"),
    ],
)
def test_absurd_numbers_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        check_settings(RunSettings, values, Path("a.yaml"))
