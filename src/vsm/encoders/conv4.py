"""The shallow convolutional networks of the paper's architecture table.

28×28×1 → 14 → 7 → 4 → 2 (pooling rounds up), 32×32×3 → 16 → 8 → 4 → 2, and
84×84×3 → 42 → 21 → 10 → 5 → 2 (pooling rounds down, five blocks). With 64 channels each ends in
2 · 2 · 64 = 256 features.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.encoders.parts import survivors
from vsm.seeding import Randomness


class Conv4(nn.Module):
    """Blocks of 3×3 convolution, batch norm, ReLU, dropout and 2×2 max pooling.

    Args:
        image_shape: ``(channels, height, width)`` of the input.
        channels: width of every convolution.
        keep_probability: chance that an activation survives dropout while training.
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
                nn.Conv2d(in_channels if block == 0 else channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
            )
            for block in range(num_blocks)
        )
        for _ in range(num_blocks):
            height, width = self._pooled(height), self._pooled(width)
        if min(height, width) < 1:
            raise ValueError(f"image_shape: {image_shape} is too small for {num_blocks} poolings")
        self.num_features = channels * height * width
        # torch's stubs lack this form of Module.to.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _pooled(self, size: int) -> int:
        return (size + 1) // 2 if self.pool_rounds_up else size // 2

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Map images ``[B, C, H, W]``, best channels-last, to features ``[B, num_features]`` ≥ 0.

        ``random`` is the source of the dropout pattern; needed in training if anything is dropped.
        """
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
