"""The built-in networks: Conv4, ResNet-12 and Wide ResNet 28-10.

All take the ``image_shape`` ``(channels, height, width)`` of their input; ``channels``, the width
of the first convolutions, where 64 is the published network and other values scale all widths; and
``keep_probability``, the chance that an activation survives dropout while training. They map
images ``[B, C, H, W]``, best channels-last, to features ``[B, num_features]``. ``random`` is the
source of what is dropped, and is needed in training if anything is.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.encoders.parts import SmallMapConv2d, SubsampledConv2d, drop, drop_blocks, survivors
from vsm.seeding import Randomness

RESNET_WIDTHS = (64, 160, 320, 640)
SLOPE = 0.1  # of ResNet-12's leaky ReLU for negative values
STEM_WIDTH = 16
STAGES = ((160, 1), (320, 2), (640, 2))  # of the wide ResNet: width, stride of the first block
BLOCKS_PER_STAGE = 4


class Conv4(nn.Module):
    """Blocks of 3×3 convolution, batch norm, ReLU, dropout and 2×2 max pooling.

    The shallow networks of the paper's architecture table: 28×28×1 → 14 → 7 → 4 → 2 (pooling rounds
    up), 32×32×3 → 16 → 8 → 4 → 2, and 84×84×3 → 42 → 21 → 10 → 5 → 2 (pooling rounds down, five
    blocks). With 64 channels each ends in 2 · 2 · 64 = 256 features, all at least 0.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], channels: int = 64, keep_probability: float = 1.0
    ) -> None:
        super().__init__()
        in_channels, height, width = image_shape
        size = min(height, width)
        num_blocks = 5 if size >= 64 else 4
        self.pool_rounds_up = size < 32
        self.keep_probability = keep_probability
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
            )
            for before in [in_channels, *[channels] * (num_blocks - 1)]
        )
        for _ in range(num_blocks):
            height, width = ((side + self.pool_rounds_up) // 2 for side in (height, width))
        if min(height, width) < 1:
            raise ValueError(f"image_shape: {image_shape} is too small for {num_blocks} poolings")
        self.num_features = channels * height * width
        _make_channels_last(self)

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Return features ``[B, num_features]``."""
        hidden = images.contiguous(memory_format=torch.channels_last)
        drops = self.training and self.keep_probability < 1
        for block in self.blocks:
            hidden = block(hidden)
            if drops:
                hidden = hidden * survivors(hidden, self.keep_probability, random)
            # Rectifying and scaling after pooling give the same and touch a quarter of the values.
            hidden = F.relu(F.max_pool2d(hidden, 2, ceil_mode=self.pool_rounds_up))
            if drops:
                hidden = hidden / self.keep_probability
        return hidden.flatten(1)


class ResNet12(nn.Module):
    """Four residual blocks of three 3×3 convolutions, each with 2×2 max pooling.

    84×84×3 → 42 → 21 → 10 → 5, 32×32×3 → 16 → 8 → 4 → 2 and 28×28×1 → 14 → 7 → 3 → 1, then the
    average of each map: 640 features, of which the leaky ReLU leaves some slightly negative.

    After TADAM (Oreshkin et al. 2018) in the form of MetaOptNet (Lee et al. 2019). As there,
    activations are dropped after the pooling of every block: singly in the first two, in squares
    (DropBlock) in the last two, of side 5 for images of 64 pixels or more and of side 2 for
    smaller ones. Adapted:

    - The keep rate is ``keep_probability`` in all blocks from the first step on. MetaOptNet lets
      DropBlock's fall from 1 to 0.9 within 40,000 batches, counted inside the network; here a
      forward pass depends on its arguments only. Its published rate is ``keep_probability=0.9``.
    - DropBlock scales by the expected, not the counted share of kept activations.
    - Features are averaged over each map. MetaOptNet flattens the maps; its successors average.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], channels: int = 64, keep_probability: float = 1.0
    ) -> None:
        super().__init__()
        in_channels, height, width = image_shape
        size = min(height, width)
        if size < 2 ** len(RESNET_WIDTHS):
            raise ValueError(
                f"image_shape: resnet12 halves images four times and needs 16 pixels or more, "
                f"got {image_shape}; use conv4 for smaller ones"
            )
        self.keep_probability = keep_probability
        self.block_size = 5 if size >= 64 else 2
        widths = [_scaled(width, channels) for width in RESNET_WIDTHS]
        self.blocks = nn.ModuleList(
            _ResidualBlock(before, after) for before, after in pairwise([in_channels, *widths])
        )
        self.num_features = widths[-1]
        _initialize_convolutions(self)
        _make_channels_last(self)

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Return features ``[B, num_features]``."""
        keep_probability = self.keep_probability if self.training else 1.0
        hidden = images.contiguous(memory_format=torch.channels_last)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index < 2:
                hidden = drop(hidden, keep_probability, random)
            else:
                hidden = drop_blocks(hidden, keep_probability, self.block_size, random)
        return hidden.mean((2, 3))


class _ResidualBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(SmallMapConv2d(before, out_channels), nn.BatchNorm2d(out_channels))
            for before in (in_channels, out_channels, out_channels)
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        first, second, third = self.convolutions
        residual = F.leaky_relu(first(hidden), SLOPE)
        residual = third(F.leaky_relu(second(residual), SLOPE))
        # Rectifying after pooling gives the same and touches a quarter of the values.
        return F.leaky_relu(F.max_pool2d(residual + self.shortcut(hidden), 2), SLOPE)


class WideResNet(nn.Module):
    """Three stages of four pre-activation blocks, ten times as wide as the first ResNets.

    84×84×3 → 84 → 42 → 21 and 32×32×3 → 32 → 16 → 8, then the average of each map: 640 features,
    all at least 0. After Zagoruyko & Komodakis (2016). Adapted: the classifier is left out, and
    maps are averaged whatever their size, so that the strides 1, 2, 2 serve 84 pixel images as
    well, as they do in the few-shot literature (LEO, S2M2). Dropout is between the two convolutions
    of a block; the authors' rate of 0.3 is ``keep_probability=0.7``.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], channels: int = 64, keep_probability: float = 1.0
    ) -> None:
        super().__init__()
        if min(image_shape) < 1:
            raise ValueError(f"image_shape: expected positive sizes, got {image_shape}")
        self.keep_probability = keep_probability
        width = _scaled(STEM_WIDTH, channels)
        self.stem = _convolution3x3(image_shape[0], width)
        self.blocks = nn.ModuleList()
        for stage_width, stage_stride in STAGES:
            for index in range(BLOCKS_PER_STAGE):
                out_width = _scaled(stage_width, channels)
                self.blocks.append(_WideBlock(width, out_width, stage_stride if index == 0 else 1))
                width = out_width
        self.norm = nn.BatchNorm2d(width)
        self.num_features = width
        _initialize_convolutions(self)
        _make_channels_last(self)

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Return features ``[B, num_features]``."""
        keep_probability = self.keep_probability if self.training else 1.0
        hidden = self.stem(images.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            hidden = block(hidden, keep_probability, random)
        return F.relu(self.norm(hidden)).mean((2, 3))


class _WideBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(in_channels)
        self.first = _convolution3x3(in_channels, out_channels, stride)
        self.second_norm = nn.BatchNorm2d(out_channels)
        self.second = _convolution3x3(out_channels, out_channels)
        self.shortcut: SubsampledConv2d | None = None
        if in_channels != out_channels or stride != 1:
            self.shortcut = SubsampledConv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, hidden: Tensor, keep_probability: float, random: Randomness | None) -> Tensor:
        active = F.relu(self.first_norm(hidden))
        carried = hidden if self.shortcut is None else self.shortcut(active)
        active = F.relu(self.second_norm(self.first(active)))
        residual: Tensor = self.second(drop(active, keep_probability, random))
        return residual + carried  # the first has the layout; a shortcut of one channel has none


def _convolution3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)


def _scaled(width: int, channels: int) -> int:
    return max(1, round(width * channels / 64))


def _initialize_convolutions(network: nn.Module) -> None:
    """Draw every convolution's weights from N(0, 2 / fan-out)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _make_channels_last(network: nn.Module) -> None:
    # torch's stubs lack this form of Module.to.
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
