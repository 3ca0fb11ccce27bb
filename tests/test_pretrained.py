"""Encoders that others publish: tiny ones, made and saved here, opened as anyone's are."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

import vsm
from vsm.cli import main
from vsm.data.images import Preprocessing
from vsm.encoders.backbones import custom_preprocessing
from vsm.encoders.encoder import open_data
from vsm.encoders.pretrained import (
    load_pretrained,
    parse_image_processor,
    pretrained_preprocessing,
)
from vsm.errors import BackboneError, RunError
from vsm.runs.loading import open_encoder

SIDE = 28
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
PROCESSOR = {
    "do_resize": True,
    "size": {"shortest_edge": 32},
    "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.25, 0.5],
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": SIDE,
    "patch_size": 14,
}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 20,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(kind: str) -> Any:
    """Return a tiny random model of ``transformers``."""
    torch.manual_seed(0)
    if kind == "dinov2":
        return transformers.Dinov2Model(transformers.Dinov2Config(**VISION, mlp_ratio=2))
    if kind.startswith("vit"):
        return transformers.ViTModel(
            transformers.ViTConfig(**VISION), add_pooling_layer=kind == "vit"
        )
    if kind == "resnet":
        shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
        return transformers.ResNetModel(transformers.ResNetConfig(**shape))
    both = {"text_config": TEXT, "vision_config": VISION}
    if kind == "clip":
        return transformers.CLIPModel(transformers.CLIPConfig(**both, projection_dim=12))
    return transformers.SiglipModel(transformers.SiglipConfig(**both))


def saved(kind: str, folder: Path, processor: dict[str, Any] | None = PROCESSOR) -> Any:
    model = made(kind)
    model.save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model.eval()


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dinov2")
    saved("dinov2", folder)
    return folder


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def image_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six classes of colored noise, and a cache of our own."""
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    folder, random = tmp_path / "images", np.random.default_rng(0)
    for number in range(6):
        (folder / f"class{number}").mkdir(parents=True)
        color = random.integers(60, 196, 3)
        for place in range(4):
            noise = random.integers(-60, 60, (48, 40 + place, 3))
            image = Image.fromarray((color + noise).clip(0, 255).astype(np.uint8))
            image.save(folder / f"class{number}" / f"{place}.png")
    return folder


@pytest.mark.parametrize(
    "kind", ["dinov2", "vit", "vit-without-pooler", "clip", "siglip", "resnet"]
)
def test_features_are_those_of_the_model_itself(kind: str, tmp_path: Path, images: Tensor) -> None:
    model = saved(kind, tmp_path)
    with torch.no_grad():
        features = load_pretrained(f"hf:{tmp_path}")(images)
        if kind in ("clip", "siglip"):
            vision = model.vision_model(pixel_values=images).pooler_output
            expected = vision if kind == "siglip" else model.visual_projection(vision)
        else:
            found = model(pixel_values=images)
            is_bare = kind == "vit-without-pooler"
            expected = found.last_hidden_state[:, 0] if is_bare else found.pooler_output.flatten(1)
    torch.testing.assert_close(features, expected)
    assert features.shape == (3, 12 if kind == "clip" else 16)


def test_images_are_prepared_as_the_configuration_says() -> None:
    """Against Pillow: scaled until the shorter side is 32, and the middle 28×28 of it."""
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (64, 96, 3), np.uint8))
    prepared = Preprocessing.from_dict(
        {"channels": 3, "ink": False, **parse_image_processor(PROCESSOR, {})}
    )
    ours = prepared.normalize(prepared.pixels([image]))[0]
    scaled = np.asarray(image.resize((48, 32), Image.Resampling.BICUBIC), np.float64)
    middle = scaled[2:30, 10:38] / 255
    constants = [np.asarray(PROCESSOR[key]) for key in ("image_mean", "image_std")]
    expected = (middle - constants[0]) / constants[1]
    difference = np.abs(ours.permute(1, 2, 0).numpy() - expected)
    assert difference[1:-1, 1:-1].max() < 0.02  # bytes are rounded once in both
    assert difference.max() < 0.5  # what is beyond the cut does not count for its edge


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (
            {"size": {"height": 40, "width": 40}, "resample": 2},
            {"side": 40, "resampling": "bilinear"},
        ),
        ({"size": 40}, {"side": 40}),
        ({"size": 40, "do_center_crop": True, "crop_size": 30}, {"side": 30, "crop": 0.75}),
        ({"size": {"shortest_edge": 40}}, {"side": 40, "crop": 1.0}),
        ({"size": {"shortest_edge": 40}, "crop_pct": 0.875}, {"side": 40, "crop": 0.875}),
        ({"do_resize": False, "size": {"height": 9, "width": 9}}, {"side": 64}),
        ({}, {"side": 64}),
    ],
)
def test_known_forms_of_configurations(processor: Any, expected: dict[str, Any]) -> None:
    assert parse_image_processor(processor, {"image_size": 64}) == {**PLAIN, **expected}


def test_pixels_of_another_scale_are_scaled() -> None:
    """(x·f − mean) / std for bytes x must be what (x/255 − mean′) / std′ is."""
    processor = {
        "size": 8,
        "rescale_factor": 1 / 127.5,
        "image_mean": [1, 1, 1],
        "image_std": [2, 2, 2],
    }
    wanted = parse_image_processor(processor, {})
    byte = 200
    ours = (byte / 255 - wanted["mean"][0]) / wanted["std"][0]
    assert ours == pytest.approx((byte / 127.5 - 1) / 2)
    plain = parse_image_processor({**processor, "do_rescale": False, "do_normalize": False}, {})
    assert (byte / 255 - plain["mean"][0]) / plain["std"][0] == pytest.approx(byte)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"size": {"height": 4, "width": 5}}, "only squares"),
        (
            {"size": {"height": 10**6, "width": 10**6}},
            "expected 1 to 4096 pixels, got 1000000",
        ),
        ({"size": -3}, "expected 1 to 4096 pixels, got -3"),
        ({"size": 8, "image_mean": [0.5], "image_std": [0.5]}, "expected 1 or 3 channels"),
        ({"size": 8, "image_mean": [0, 0, 0], "image_std": [1, 0, 1]}, "standard dev"),
        ({"size": "large"}, "hf:"),
        ([3], "expected a JSON object"),
        (None, "no preprocessor_config.json"),
    ],
)
def test_impossible_configurations_are_refused(
    processor: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(BackboneError, match=message) as told:
        pretrained_preprocessing(f"hf:{tmp_path}", nn.Identity())
    assert "\n" not in str(told.value)


def test_a_memory_of_its_features_from_images_to_answers(
    dinov2: Path, image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    learn = ["memory", "learn", "--encoder", f"hf:{dinov2}", "--data", f"folder:{image_folder}"]
    assert main([*learn, "--split", "all", "--output", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_features"] == 16
    assert not any(tmp_path.joinpath("run").rglob("*backbone*"))
    trained = vsm.load(run)
    assert trained.preprocessing is not None
    assert trained.preprocessing.input_shape == (3, SIDE, SIDE)
    assert sum(weight.numel() for weight in trained.model.parameters()) == 1  # the temperature
    files = sorted(image_folder.rglob("*.png"))
    features = trained.embed(files)
    network = load_pretrained(f"hf:{dinov2}")
    pixels = trained.preprocessing.normalize(trained.preprocessing.pixels(files))
    with torch.no_grad():
        torch.testing.assert_close(features, network(pixels))
    classify = ["classify", "--model", str(run), "--support", str(image_folder)]
    assert main([*classify, "--query", str(image_folder / "class0"), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert len(answers) == 4


def test_mirrored_views_are_averaged(dinov2: Path, images: Tensor) -> None:
    models = [open_encoder(f"hf:{dinov2}", "features:x", mirror=mirror) for mirror in (False, True)]
    with torch.no_grad():
        plain = (models[0].embed(images) + models[0].embed(images.flip(-1))) / 2
        torch.testing.assert_close(models[1].embed(images), plain)


def test_other_weights_under_the_same_name_are_refused(image_folder: Path, tmp_path: Path) -> None:
    encoder, run = tmp_path / "encoder", tmp_path / "run"
    saved("dinov2", encoder)
    learn = ["memory", "learn", "--encoder", f"hf:{encoder}", "--data", f"folder:{image_folder}"]
    assert main([*learn, "--split", "all", "--output", str(run), "--json"]) == 0
    moved = tmp_path / "moved"
    encoder.rename(moved)
    with pytest.raises(BackboneError, match="hf:"):
        vsm.load(run)
    assert vsm.load(run, backbone=f"hf:{moved}").memory is not None  # the place does not matter
    model = made("dinov2")
    with torch.no_grad():
        model.layernorm.bias += 1e-3
    model.save_pretrained(moved)
    with pytest.raises(BackboneError, match="other weights than those"):
        vsm.load(run, backbone=f"hf:{moved}")


def test_weights_that_are_not_what_the_configuration_says(tmp_path: Path, dinov2: Path) -> None:
    saved("vit", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((dinov2 / "model.safetensors").read_bytes())
    with pytest.raises(BackboneError, match="lacks the weights "):
        load_pretrained(f"hf:{tmp_path}")


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    saved("dinov2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BackboneError, match="hf:") as told:
        load_pretrained(f"hf:{tmp_path}")
    assert "\n" not in str(told.value)


def test_an_encoder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (f"hf:{tmp_path / 'nothing'}", f"onnx:{tmp_path / 'nothing.onnx'}"):
        with pytest.raises(BackboneError, match="encoder: ") as told:
            open_encoder(name, "features:x")
        assert "\n" not in str(told.value)


def test_a_path_in_a_name_is_right_in_any_folder(
    dinov2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dinov2.parent)
    assert open_encoder(f"hf:{dinov2.name}", "features:x").source == f"hf:{dinov2}"
    assert open_encoder("efficientnet-lite0", "features:x").source == "efficientnet-lite0"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("transformers", "transformers.utils", "timm", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.onnx").write_bytes(b"")
    for name, wanted in (
        ("hf:any", r"needs transformers.*\[encoders\]"),
        ("timm:any", "needs timm.*cannot be imported.*torchvision"),
        (f"onnx:{tmp_path / 'a.onnx'}", r"needs onnxruntime.*\[export\]"),
    ):
        with pytest.raises(BackboneError, match=wanted):
            load_pretrained(name)


def graph(path: Path, batch: int | str = "batch", metadata: dict[str, str] | None = None) -> Any:
    """Write a graph from images to features: the mean of every channel, times a matrix."""
    weights = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("GlobalAveragePool", ["pixel_values"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["image_embeds"]),
    ]
    made_graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("pixel_values", floats, [batch, 3, 8, 8])],
        [
            helper.make_tensor_value_info("flat", floats, [batch, 3]),
            helper.make_tensor_value_info("image_embeds", floats, [batch, 5]),
        ],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(made_graph, opset_imports=opsets, ir_version=8)
    helper.set_model_props(model, metadata or {})
    path.write_bytes(model.SerializeToString())
    return weights


@pytest.mark.parametrize("batch", ["batch", 1, 2])
def test_a_graph_of_onnx(batch: int | str, tmp_path: Path) -> None:
    path = tmp_path / "encoder.onnx"
    weights = graph(path, batch)
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    features = load_pretrained(f"onnx:{path}")(images)
    expected = images.numpy().mean((2, 3)) @ weights
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_onnx_takes_the_configuration_beside_it(image_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "encoder.onnx"
    graph(path)
    with pytest.raises(BackboneError, match="does not describe its preprocessing"):
        open_encoder(f"onnx:{path}", "features:x")
    stated = {"size": 10, "do_center_crop": True, "crop_size": 8, "image_mean": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**stated, "image_std": [2] * 3}))
    encoder = open_encoder(f"onnx:{path}", "features:x")
    assert encoder.preprocessing == Preprocessing(8, 3, crop=0.8, mean=(0.5,) * 3, std=(2.0,) * 3)
    dataset = open_data(encoder, f"folder:{image_folder}", merge_splits=True)
    assert dataset.input_shape == (5,)


def test_an_encoder_that_vsm_exported_says_so_itself(tmp_path: Path) -> None:
    stated = {"kind": "vsm encoder", "input_shape": "[3, 8, 8]", "input_ink": "as it is"}
    graph(tmp_path / "a.onnx", metadata={**stated, "input_crop": "0.5"})
    name = f"onnx:{tmp_path / 'a.onnx'}"
    wanted = pretrained_preprocessing(name, load_pretrained(name))
    assert wanted == Preprocessing(8, 3, crop=0.5, mean=PLAIN["mean"], std=PLAIN["std"])


def test_what_is_no_encoder_of_onnx(tmp_path: Path) -> None:
    (tmp_path / "damaged.onnx").write_bytes(b"no graph")
    with pytest.raises(BackboneError, match=r"damaged\.onnx"):
        load_pretrained(f"onnx:{tmp_path / 'damaged.onnx'}")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    shapes = [helper.make_tensor_value_info(name, floats, [1, 4]) for name in ("a", "b", "c")]
    added = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["c"])], "two", shapes[:2], shapes[2:]
    )
    model = helper.make_model(added, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "two.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BackboneError, match="has the inputs a, b"):
        load_pretrained(f"onnx:{tmp_path / 'two.onnx'}")


class TinyTimm(nn.Module):
    """What stands for a model of timm: channel means."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3))


def test_timm_is_asked_for_features_and_its_own_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library itself needs torchvision, so here is what we use of it."""
    asked = []

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.append((name, options))
        return TinyTimm()

    config = {"input_size": (3, 16, 16), "mean": (0.1,) * 3, "std": (0.2,) * 3, "crop_pct": 0.9}
    data = SimpleNamespace(
        resolve_model_data_config=lambda _: {**config, "interpolation": "bicubic"}
    )
    parts: dict[str, Any] = {"timm": ModuleType("timm"), "timm.data": data}
    parts["timm"].__dict__.update(create_model=create_model, data=data)
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    encoder = open_encoder("timm:tiny", "features:x")
    wanted = Preprocessing(16, 3, False, 0.9, "bicubic", mean=(0.1,) * 3, std=(0.2,) * 3)
    assert encoder.preprocessing == wanted
    assert encoder.num_features == 3
    [options] = asked  # the network is built once
    assert options == ("tiny", {"pretrained": True, "num_classes": 0})


OWN = """
import torch
from torch import nn


class Means(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, images):
        return images.mean((2, 3)) * self.weight


def means(image_shape):
    return Means()


means.preprocessing = {"side": 12, "mean": (0.5, 0.5, 0.5), "std": (0.1, 0.1, 0.1)}


def wrong(image_shape):
    return Means()


wrong.preprocessing = {"height": 3}


def plain(image_shape):
    return Means()
"""


def test_the_users_own_network_without_training(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_encoder_module.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    name = "own_encoder_module:means"
    learn = ["memory", "learn", "--encoder", name, "--data", f"folder:{image_folder}"]
    assert main([*learn, "--split", "all", "--output", "run", "--json"]) == 0
    with pytest.raises(RunError, match="code that is not part of vsm"):
        vsm.load("run")
    trained = vsm.load("run", backbone=name)
    assert trained.preprocessing == Preprocessing(12, 3, mean=(0.5,) * 3, std=(0.1,) * 3)
    files = sorted(image_folder.rglob("*.png"))[:2]
    pixels = trained.preprocessing.normalize(trained.preprocessing.pixels(files))
    expected = pixels.mean((2, 3)) * torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(trained.embed(files), expected)
    with pytest.raises(BackboneError, match=r"has an invalid preprocessing: .* it needs side"):
        custom_preprocessing("own_encoder_module:wrong")
    encoder = open_encoder("own_encoder_module:plain", f"folder:{image_folder}")
    assert encoder.preprocessing is None  # as the data have them
