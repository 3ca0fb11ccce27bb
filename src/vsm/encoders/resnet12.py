"""ResNet-12, the residual network of few-shot learning, as MetaOptNet has it.

84×84×3 → 42 → 21 → 10 → 5, 32×32×3 → 16 → 8 → 4 → 2 and 28×28×1 → 14 → 7 → 3 → 1, then the average
of each map: 640 features.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.encoders.parts import (
    SmallMapConv2d,
    drop,
    drop_blocks,
    initialize_convolutions,
    scaled_width,
)
from vsm.seeding import Randomness

WIDTHS = (64, 160, 320, 640)
SLOPE = 0.1  # of the leaky ReLU for negative values


class ResNet12(nn.Module):
    """Four residual blocks of three 3×3 convolutions, each with 2×2 max pooling.

    After TADAM (Oreshkin et al. 2018) in the form of MetaOptNet (Lee et al. 2019). As there,
    activations are dropped after the pooling of every block: singly in the first two, in squares
    (DropBlock) in the last two, of side 5 for images of 64 pixels or more and of side 2 for
    smaller ones. Adapted:

    - The keep rate is ``keep_probability`` in all blocks from the first step on. MetaOptNet lets
      DropBlock's fall from 1 to 0.9 within 40,000 batches, counted inside the network; here a
      forward pass depends on its arguments only. Its published rate is ``keep_probability=0.9``.
    - DropBlock scales by the expected, not the counted share of kept activations.
    - Features are averaged over each map. MetaOptNet flattens the maps; its successors average.
    - ``channels`` scales all widths.

    Args:
        image_shape: ``(channels, height, width)`` of the input.
        channels: width of the first block; 64 is the published network.
        keep_probability: chance that an activation survives dropping while training.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], channels: int = 64, keep_probability: float = 1.0
    ) -> None:
        super().__init__()
        in_channels, height, width = image_shape
        size = min(height, width)
        if size < 2 ** len(WIDTHS):
            raise ValueError(
                f"image_shape: resnet12 halves images four times and needs 16 pixels or more, "
                f"got {image_shape}; use conv4 for smaller ones"
            )
        self.keep_probability = keep_probability
        self.block_size = 5 if size >= 64 else 2
        widths = [scaled_width(width, channels) for width in WIDTHS]
        self.blocks = nn.ModuleList(
            _Block(before, after) for before, after in pairwise([in_channels, *widths])
        )
        self.num_features = widths[-1]
        initialize_convolutions(self)
        # torch's stubs lack this form of Module.to.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Map images ``[B, C, H, W]``, best channels-last, to features ``[B, num_features]``.

        The leaky ReLU lets slightly negative ones through. ``random`` is the source of what is
        dropped; needed in training if anything is.
        """
        keep_probability = self.keep_probability if self.training else 1.0
        hidden = images.contiguous(memory_format=torch.channels_last)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index < 2:
                hidden = drop(hidden, keep_probability, random)
            else:
                hidden = drop_blocks(hidden, keep_probability, self.block_size, random)
        return hidden.mean((2, 3))


class _Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(
                SmallMapConv2d(in_channels if index == 0 else out_channels, out_channels),
                nn.BatchNorm2d(out_channels),
            )
            for index in range(3)
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
