"""Wide ResNet 28-10 (Zagoruyko & Komodakis 2016).

84×84×3 → 84 → 42 → 21 and 32×32×3 → 32 → 16 → 8, then the average of each map: 640 features.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.encoders.parts import (
    SubsampledConv2d,
    convolution3x3,
    drop,
    initialize_convolutions,
    scaled_width,
)
from vsm.seeding import Randomness

STEM_WIDTH = 16
STAGES = ((160, 1), (320, 2), (640, 2))  # width and stride of the first block
BLOCKS_PER_STAGE = 4


class WideResNet(nn.Module):
    """Three stages of four pre-activation blocks, ten times as wide as the first ResNets.

    Adapted: the classifier is left out, ``channels`` scales all widths, and maps are averaged
    whatever their size, so that the strides 1, 2, 2 serve 84 pixel images as well, as they do in
    the few-shot literature (LEO, S2M2). The authors' dropout of 0.3 inside blocks is
    ``keep_probability=0.7``.

    Args:
        image_shape: ``(channels, height, width)`` of the input.
        channels: 64 is the published network; other values scale all its widths.
        keep_probability: chance that an activation between the two convolutions of a block
            survives dropout while training.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], channels: int = 64, keep_probability: float = 1.0
    ) -> None:
        super().__init__()
        if min(image_shape) < 1:
            raise ValueError(f"image_shape: expected positive sizes, got {image_shape}")
        self.keep_probability = keep_probability
        width = scaled_width(STEM_WIDTH, channels)
        self.stem = convolution3x3(image_shape[0], width)
        self.blocks = nn.ModuleList()
        for stage_width, stage_stride in STAGES:
            for index in range(BLOCKS_PER_STAGE):
                out_width = scaled_width(stage_width, channels)
                self.blocks.append(_Block(width, out_width, stage_stride if index == 0 else 1))
                width = out_width
        self.norm = nn.BatchNorm2d(width)
        self.num_features = width
        initialize_convolutions(self)
        # torch's stubs lack this form of Module.to.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Map images ``[B, C, H, W]``, best channels-last, to features ``[B, num_features]`` ≥ 0.

        ``random`` is the source of the dropout pattern; needed in training if anything is dropped.
        """
        keep_probability = self.keep_probability if self.training else 1.0
        hidden = self.stem(images.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            hidden = block(hidden, keep_probability, random)
        return F.relu(self.norm(hidden)).mean((2, 3))


class _Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(in_channels)
        self.first = convolution3x3(in_channels, out_channels, stride)
        self.second_norm = nn.BatchNorm2d(out_channels)
        self.second = convolution3x3(out_channels, out_channels)
        self.shortcut: SubsampledConv2d | None = None
        if in_channels != out_channels or stride != 1:
            self.shortcut = SubsampledConv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, hidden: Tensor, keep_probability: float, random: Randomness | None) -> Tensor:
        active = F.relu(self.first_norm(hidden))
        carried = hidden if self.shortcut is None else self.shortcut(active)
        active = F.relu(self.second_norm(self.first(active)))
        residual: Tensor = self.second(drop(active, keep_probability, random))
        return residual + carried  # the first has the layout; a shortcut of one channel has none
