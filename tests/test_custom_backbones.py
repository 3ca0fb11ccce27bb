"""Backbones of the user's own: found, wrapped, trained, and never imported without being named."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from run_helpers import AtStep, signal_at, train_run
from tiny import variant
from vsm.cli import main
from vsm.data import EpisodeSampler, ImageDataset
from vsm.encoders import Conv4, CustomBackbone, build_backbone
from vsm.errors import BackboneError, EpisodeError, RunError, SettingsError
from vsm.evaluation.evaluator import evaluate
from vsm.model import FewShotModel
from vsm.runs.loading import Checkpoint, load
from vsm.settings import METHODS, Method, ModelSettings, RunSettings
from vsm.system.interruption import Interrupted

SHAPE = (1, 28, 28)
SOURCE = '''
from pathlib import Path

import torch
from torch import nn

(Path(__file__).parent / "imported").touch()


def small(image_shape):
    channels, height, width = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 6), nn.ReLU())


def dropping(image_shape):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 6))


def normed(image_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.BatchNorm1d(6))


def lazy(image_shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(6))


class Viewing(nn.Module):
    """Reads pixels in the usual order, which `view` needs, and says what it gives."""

    num_features = 9

    def __init__(self, image_shape):
        super().__init__()

    def forward(self, images):
        return images.view(len(images), -1)[:, :9].half()


class Tied(nn.Module):
    def __init__(self, image_shape):
        super().__init__()
        self.first = nn.Linear(784, 6)
        self.second = nn.Linear(784, 6)
        self.second.weight = self.first.weight

    def forward(self, images):
        pixels = images.flatten(1)
        return self.first(pixels) + self.second(pixels)


class Holder:
    small = staticmethod(small)


# What cannot work.


class Boastful(Viewing):
    num_features = 512


class Stateful(Viewing):
    def get_extra_state(self):
        return {"a": "dictionary"}


ready = nn.Flatten()
number = 3


def words(image_shape):
    return "a network"


def raising(image_shape):
    raise ValueError("no such weights\\nsecond line")


def maps(image_shape):
    return nn.Conv2d(1, 4, 3)


def pairs(image_shape):
    class Pair(nn.Flatten):
        def forward(self, images):
            return images, images

    return Pair()


def wrong_input(image_shape):
    return nn.Linear(5, 5)


def counts(image_shape):
    class Counts(nn.Flatten):
        def forward(self, images):
            return images.flatten(1).long()

    return Counts()
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the user's encoders in it."""
    (tmp_path / "encoders.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    assert sys.path == path
    for name in ("encoders", "broken"):
        sys.modules.pop(name, None)


def was_imported(folder: Path) -> bool:
    return (folder / "imported").exists() or "encoders" in sys.modules


def build(attribute: str, shape: tuple[int, int, int] = SHAPE) -> CustomBackbone:
    backbone = build_backbone(ModelSettings(backbone=f"encoders:{attribute}"), shape)
    assert isinstance(backbone, CustomBackbone)
    return backbone


def with_backbone(settings: RunSettings, attribute: str) -> RunSettings:
    return variant(settings, model=replace(settings.model, backbone=f"encoders:{attribute}"))


# The wrapper.


def test_a_factory_is_called_with_the_image_shape_and_its_features_are_counted() -> None:
    backbone = build("small", (3, 5, 4))
    assert backbone.num_features == 6
    [linear] = [module for module in backbone.modules() if isinstance(module, nn.Linear)]
    assert linear.in_features == 3 * 5 * 4
    images = torch.rand(7, 3, 5, 4)
    assert torch.equal(backbone(images), backbone.network(images))


@pytest.mark.parametrize("name", ["lazy", "normed", "Holder.small", "Viewing", "Tied"])
def test_modules_of_many_kinds_are_backbones(name: str) -> None:
    backbone = build(name)
    features = backbone(torch.rand(4, *SHAPE), torch.Generator())
    assert features.shape == (4, backbone.num_features)
    assert features.dtype == torch.float32


def test_built_in_names_still_build_built_in_backbones() -> None:
    backbone = build_backbone(ModelSettings(channels=4, keep_probability=0.5), SHAPE)
    assert isinstance(backbone, Conv4)
    assert (backbone.num_features, backbone.keep_probability) == (16, 0.5)


def test_counting_features_neither_trains_the_module_nor_changes_its_mode() -> None:
    backbone = build("normed")
    assert backbone.network.training
    assert backbone.state_dict()["network.2.num_batches_tracked"] == 0


def test_channels_last_images_reach_the_module_in_the_usual_order() -> None:
    images = torch.rand(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        build("Viewing", (3, 6, 6))(images), images.flatten(1)[:, :9], atol=1e-3, rtol=0
    )


def test_dropout_in_the_module_comes_from_the_generator_alone() -> None:
    backbone = build("dropping")
    images = torch.rand(4, *SHAPE)
    before = torch.get_rng_state()
    one, two, three = (backbone(images, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    assert torch.equal(before, torch.get_rng_state())
    backbone.eval()
    assert torch.equal(backbone(images, torch.Generator()), backbone(images))


def test_weights_come_from_the_runs_seed(tiny_settings: RunSettings) -> None:
    settings = with_backbone(tiny_settings, "small")
    one, two = (FewShotModel(settings, SHAPE) for _ in range(2))
    other = FewShotModel(replace(settings, seed=1), SHAPE)
    assert torch.equal(next(one.parameters()), next(two.parameters()))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


# What cannot work is said in one line.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:small", "no module 'nowhere' for nowhere:small, neither in .* nor among inst"),
        ("encoders.deep:small", "no module 'encoders.deep'"),
        ("broken:small", "importing 'broken' .* ModuleNotFoundError: No module named 'a_package"),
        ("encoders:smal", "module 'encoders' has no 'smal'"),
        ("encoders:number", "encoders:number is an object of type int, expected a function or cl"),
        ("encoders:ready", "encoders:ready is an object of type Flatten, expected a function or"),
        ("encoders:words", "encoders:words returned an object of type str, expected a torch.nn.M"),
        ("encoders:raising", r"encoders:raising\(\(1, 28, 28\)\) failed with ValueError: no such"),
        ("encoders:maps", r"gave float32 \[2, 4, 26, 26\], expected floating-point .*\[2, D\]"),
        ("encoders:counts", r"gave int64 \[2, 784\], expected floating-point features"),
        ("encoders:pairs", "encoders:pairs gave an object of type tuple, expected floating-point"),
        ("encoders:wrong_input", r"failed on images \[2, 1, 28, 28\] with RuntimeError: mat1"),
        ("encoders:Boastful", r"says num_features = 512, but gave \[2, 9\] .* classifier out"),
        ("encoders:Stateful", "the state '_extra_state' of .* is an object of type dict, and only"),
    ],
)
def test_code_that_is_no_backbone_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(BackboneError, match=f"^backbone: .*{message}") as refused:
        build_backbone(ModelSettings(backbone=name), SHAPE)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["vgg", "", "encoders:", ":small", "encoders:small:large", "a b:c", "../x:y", "a:b()"]
)
def test_names_that_cannot_be_backbones_are_refused_by_the_settings(name: str) -> None:
    with pytest.raises(SettingsError, match=r"backbone: expected conv4, .* module:attribute, got"):
        ModelSettings(backbone=name)


def test_transductive_batch_norm_needs_batch_norm(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    protonet = variant(tiny_settings, method="protonet")
    for name in ("small", "normed"):
        model = FewShotModel(with_backbone(protonet, name), SHAPE)
        if name == "small":
            with pytest.raises(EpisodeError, match="batch_norm: transductive needs a backbone"):
                evaluate(model, None, sampler, 2, 0, "transductive")
        else:
            inductive = evaluate(model, None, sampler, 2, 0)
            transductive = evaluate(model, None, sampler, 2, 0, "transductive")
            assert not torch.equal(inductive.log_likelihood, transductive.log_likelihood)


# Runs.


@pytest.fixture
def _tiny_data(monkeypatch: pytest.MonkeyPatch, tiny_dataset: ImageDataset) -> None:
    monkeypatch.setattr("vsm.training.open_dataset", lambda name: tiny_dataset)
    monkeypatch.setattr("vsm.encoders.encoder.open_dataset", lambda name: tiny_dataset)


@pytest.mark.usefixtures("_tiny_data")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_a_backbone_of_ones_own(
    method: Method, tiny_settings: RunSettings, folder: Path
) -> None:
    settings = with_backbone(variant(tiny_settings, method=method), "small")
    train_run(settings, folder / "run")
    trained = load(folder / "run", backbone="encoders:small")
    assert trained.model.num_features == 6
    start = FewShotModel(settings, SHAPE)
    assert not torch.equal(next(start.parameters()), next(trained.model.parameters()))


@pytest.mark.usefixtures("_tiny_data")
def test_dropout_of_ones_own_resumes_bit_for_bit(tiny_settings: RunSettings, folder: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    settings = with_backbone(tiny_settings, "dropping")
    train_run(settings, folder / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_run(settings, folder / "parts", progress=AtStep(3, interrupt))
    torch.rand(1)  # the global generator is somewhere else when the run goes on
    train_run(settings, folder / "parts", resume=True)
    for name in ("model.safetensors", "memory.safetensors", "resume.safetensors"):
        assert (folder / "whole" / name).read_bytes() == (folder / "parts" / name).read_bytes()


@pytest.mark.usefixtures("_tiny_data")
def test_weights_that_share_memory_are_saved_and_loaded(
    tiny_settings: RunSettings, folder: Path
) -> None:
    train_run(with_backbone(tiny_settings, "Tied"), folder / "run")
    loaded = load(folder / "run", checkpoint="last", backbone="encoders:Tied").model
    weights = loaded.state_dict()
    assert torch.equal(
        weights["backbone.network.first.weight"], weights["backbone.network.second.weight"]
    )


@pytest.mark.usefixtures("_tiny_data")
@pytest.mark.parametrize("checkpoint", ["best", "last"])
def test_a_run_is_not_loaded_until_its_code_is_named_again(
    checkpoint: Checkpoint, tiny_settings: RunSettings, folder: Path
) -> None:
    train_run(with_backbone(tiny_settings, "small"), folder / "run")
    (folder / "imported").unlink()
    del sys.modules["encoders"]
    for named, message in (
        (None, r"if you trust it, add --backbone encoders:small \(in Python, backbone='encoders:"),
        ("encoders:normed", "backbone: .*run was trained with encoders:small, got encoders:normed"),
        ("conv4", "was trained with encoders:small, got conv4"),
    ):
        with pytest.raises(RunError, match=message):
            load(folder / "run", checkpoint=checkpoint, backbone=named)
        assert not was_imported(folder)
    load(folder / "run", checkpoint=checkpoint, backbone="encoders:small")
    assert was_imported(folder)


@pytest.mark.usefixtures("_tiny_data")
def test_an_interrupted_run_says_the_whole_command_to_go_on(
    tiny_settings: RunSettings, folder: Path
) -> None:
    with pytest.raises(Interrupted, match="--resume --backbone encoders:small"):
        train_run(with_backbone(tiny_settings, "small"), folder / "run", progress=signal_at(1))


# The command line.

TINY = [
    *("--way", "3", "--queries", "2", "--tasks", "1", "--checkpoint-every", "2", "--steps", "4"),
    *("--model.hidden-units", "8"),
    *("--sampling.train-prototypes", "4", "--sampling.evaluation-prototypes", "4"),
    *("--validation.every", "4", "--validation.episodes", "4", "--learn-memory", "false"),
]
OWN = ["--backbone", "encoders:small"]


def forget(folder: Path) -> None:
    (folder / "imported").unlink(missing_ok=True)
    sys.modules.pop("encoders", None)


@pytest.mark.usefixtures("_tiny_data")
def test_the_command_line_trains_evaluates_compares_and_resumes_only_what_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--output", "own", *TINY, *OWN]) == 0
    assert "vsm evaluate own --backbone encoders:small" in capsys.readouterr().out
    assert main(["train", "--output", "plain", *TINY, "--json"]) == 0
    episodes = ["--episodes", "3", "--queries", "2", "--json"]
    for command in (
        ["evaluate", "own", *episodes],
        ["compare", "own", "plain", *episodes],
        ["train", "--output", "own", "--resume"],
    ):
        forget(folder)
        assert main(command) == 2
        errors = capsys.readouterr().err
        assert "if you trust it, add --backbone encoders:small" in errors
        assert "Traceback" not in errors
        assert not was_imported(folder)
        assert main([*command, *OWN]) == 0
        assert was_imported(folder)
    assert main(["evaluate", "plain", *episodes, *OWN]) == 2
    assert "backbone: plain was trained with conv4, got encoders:small" in capsys.readouterr().err


@pytest.mark.usefixtures("_tiny_data")
def test_a_settings_file_alone_imports_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.yaml").write_text("model: {backbone: 'encoders:small'}\n")
    arguments = ["train", "--config", "own.yaml", "--output", "run", *TINY]
    assert main(arguments) == 2
    assert "a settings file names code that is not part of vsm" in capsys.readouterr().err
    assert not was_imported(folder)
    assert not (folder / "run").exists()
    assert main([*arguments, "--model.backbone=encoders:small"]) == 0
    (folder / "own.yaml").write_text("backbone: 'encoders:small'\n")
    assert main([*arguments, "--overwrite"]) == 2
    assert "in a settings file it belongs to model, as model.backbone" in capsys.readouterr().err


@pytest.mark.usefixtures("_tiny_data")
@pytest.mark.parametrize("form", [["--backbone", "resnet12"], ["--backbone=resnet12"]])
def test_backbone_stands_for_model_backbone(form: list[str], folder: Path) -> None:
    assert main(["train", "--output", "run", *TINY, *form, "--json"]) == 0
    assert "  backbone: resnet12\n" in (folder / "run" / "config.yaml").read_text()


def test_the_short_and_the_long_name_together_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--backbone", "conv4", "--model.backbone=resnet12"]
    assert main(["train", "--output", "run", *both]) == 2
    assert "--backbone and --model.backbone are one setting" in capsys.readouterr().err
    assert main(["train", "--output", "run", "--backbone", "vgg"]) == 2
    assert "backbone: expected conv4, resnet12, wrn28_10, or your own" in capsys.readouterr().err
