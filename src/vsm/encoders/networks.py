"""The built-in networks, Conv4, ResNet-12 and Wide ResNet 28-10, and their building blocks.

All take the ``image_shape`` ``(channels, height, width)`` of their input; ``channels``, the width
of the first convolutions, where 64 is the published network and other values scale all widths; and
``keep_probability``, the chance that an activation survives dropout while training. They map
images ``[B, C, H, W]``, best channels-last, to features ``[B, num_features]``. ``random`` is the
source of what is dropped, and is needed in training if anything is.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.seeding import Randomness, bernoulli, uniform

RESNET_WIDTHS = (64, 160, 320, 640)
SLOPE = 0.1  # of ResNet-12's leaky ReLU for negative values
STEM_WIDTH = 16
STAGES = ((160, 1), (320, 2), (640, 2))  # of the wide ResNet: width, stride of the first block
BLOCKS_PER_STAGE = 4
SMALL_MAP = 16  # pixels of the largest map whose patches are unfolded


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
            nn.Sequential(nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels))
            for before in [in_channels, *[channels] * (num_blocks - 1)]
        )
        for _ in range(num_blocks):
            height, width = ((side + self.pool_rounds_up) // 2 for side in (height, width))
        if min(height, width) < 1:
            raise ValueError(f"image_shape: {image_shape} is too small for {num_blocks} poolings")
        self.num_features = channels * height * width
        make_channels_last(self)

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
                f"image_shape: resnet12 needs 16 pixels or more, got {image_shape}; use conv4 for "
                "smaller ones"
            )
        self.keep_probability = keep_probability
        self.block_size = 5 if size >= 64 else 2
        widths = [_scaled(width, channels) for width in RESNET_WIDTHS]
        self.blocks = nn.ModuleList(
            _ResidualBlock(before, after) for before, after in pairwise([in_channels, *widths])
        )
        self.num_features = widths[-1]
        _initialize_convolutions(self)
        make_channels_last(self)

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
        make_channels_last(self)

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


def make_channels_last(network: nn.Module) -> None:
    """Store the weights channels-last, in place."""
    # torch's stubs lack this form of Module.to.
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class SmallMapConv2d(nn.Conv2d):
    """A 3×3 convolution of stride 1 that multiplies unfolded patches where that is faster.

    It computes what ``nn.Conv2d`` does, from the same parameters. CPUs compute in bfloat16 by tiles
    of 16 rows: a row of a small map fills a fraction of a tile, the patches of all maps fill it
    (docs/design/speed.md). In single precision nothing is gained.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, O, H, W]``."""
        is_small = hidden.shape[2] * hidden.shape[3] <= SMALL_MAP
        is_rounded = hidden.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if not (is_small and is_rounded) or hidden.dtype == torch.float64:
            convolved: Tensor = super().forward(hidden)
            return convolved
        precision = torch.get_autocast_dtype("cpu")
        return unfolded_convolution(hidden.to(precision), self.weight.to(precision))


def unfolded_convolution(hidden: Tensor, weight: Tensor) -> Tensor:
    """Convolve ``hidden [B, C, H, W]`` with 3×3 kernels ``[O, C, 3, 3]``: ``[B, O, H, W]``."""
    convolved: Tensor = _UnfoldedConvolution.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return convolved


class _UnfoldedConvolution(torch.autograd.Function):
    """A 3×3 convolution of padding 1: patches ``[B·H·W, 9·C]`` times weights ``[9·C, O]``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        matrix = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)  # [O, 9·C]
        return _fold(_patches(hidden) @ matrix.T, hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        [gradient] = gradients
        hidden_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:  # convolve with the kernel rotated by 180°
            rotated = weight.permute(2, 3, 0, 1).flip(0, 1).reshape(-1, weight.shape[1])  # [9·O, C]
            hidden_gradient = _fold(_patches(gradient) @ rotated, hidden)
        if ctx.needs_input_grad[1]:
            pixels = gradient.permute(0, 2, 3, 1).reshape(-1, len(weight))
            product = pixels.T @ _patches(hidden)  # [O, 9·C]
            weight_gradient = product.view(len(weight), 3, 3, -1).permute(0, 3, 1, 2)
        return hidden_gradient, weight_gradient


def _patches(hidden: Tensor) -> Tensor:
    """Unfold maps ``[B, C, H, W]`` into the 3×3 patch of every pixel ``[B·H·W, 9·C]``."""
    padded = F.pad(hidden.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))  # [B, H + 2, W + 2, C]
    return padded.unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(0, 2)


def _fold(pixels: Tensor, like: Tensor) -> Tensor:
    """Arrange pixels ``[B·H·W, C]`` as channels-last maps ``[B, C, H, W]``."""
    batch, _, height, width = like.shape
    return pixels.view(batch, height, width, pixels.shape[-1]).permute(0, 3, 1, 2)


class SubsampledConv2d(nn.Conv2d):
    """A 1×1 convolution that takes every s-th pixel first and then convolves with stride 1.

    It computes what ``nn.Conv2d`` does with stride s, from the same parameters. oneDNN's weight
    gradient of a strided 1×1 convolution of channels-last images writes past its buffer if there
    are fewer input channels than a vector holds (docs/design/speed.md); stride 1 avoids that code.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self._reversed_padding_repeated_twice
        if any(padding):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = F.pad(input, padding, mode)
        rows, columns = self.stride
        return F.conv2d(input[..., ::rows, ::columns], weight, bias, groups=self.groups)


def subsample_strided_1x1(network: nn.Module) -> None:
    """Turn every strided 1×1 convolution into a :class:`SubsampledConv2d`; subclasses remain."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and max(module.kernel_size) == 1 < max(module.stride):
            kind = type(module)
            if kind is nn.Conv2d:
                module.__class__ = SubsampledConv2d
            elif not isinstance(module, SubsampledConv2d):
                module.__class__ = type(kind.__name__, (SubsampledConv2d, kind), {})


def drop(hidden: Tensor, keep_probability: float, random: Randomness | None) -> Tensor:
    """Apply dropout from ``random``, which is needed unless ``keep_probability`` is 1."""
    if keep_probability == 1:
        return hidden
    return hidden * survivors(hidden, keep_probability, random) / keep_probability


def survivors(hidden: Tensor, keep_probability: float, random: Randomness | None) -> Tensor:
    """Return ones where an activation survives and zeros elsewhere, in the layout of ``hidden``."""
    source, shape = _required(random), hidden.shape
    if hidden.dim() == 4 and hidden.is_contiguous(memory_format=torch.channels_last):
        kept = bernoulli(source, keep_probability, shape[0], *shape[2:], shape[1])
        return kept.movedim(-1, 1).to(hidden)
    return bernoulli(source, keep_probability, *shape).to(hidden)


def drop_blocks(
    hidden: Tensor, keep_probability: float, block_size: int, random: Randomness | None
) -> Tensor:
    """DropBlock (Ghiasi et al. 2018): set squares of each channel's map to zero, scale the rest.

    The scale is one over the expected share of survivors, where the authors count those of the
    batch: so an image's features do not depend on its neighbors. ``hidden`` is ``[B, C, H, W]``.
    ``keep_probability`` does not count overlaps of squares, whose side is ``block_size``; smaller
    maps are dropped entirely.
    """
    if keep_probability == 1:
        return hidden
    batch, channels, height, width = hidden.shape
    side = min(block_size, height, width)
    corners = (height - side + 1, width - side + 1)  # a square lies inside its map
    rate = (1 - keep_probability) * height * width / (side**2 * corners[0] * corners[1])
    seeds = (uniform(_required(random), batch, channels, *corners) < rate).to(hidden)
    dropped = F.max_pool2d(F.pad(seeds, [side - 1] * 4), side, stride=1)  # [B, C, H, W]

    def coverings(size: int) -> list[int]:  # how many squares can cover each position of one axis
        return [min(i, size - side) - max(0, i - side + 1) + 1 for i in range(size)]

    shares = [(1 - rate) ** (i * j) for i in coverings(height) for j in coverings(width)]
    return hidden * (1 - dropped) / (sum(shares) / len(shares))


def _required(random: Randomness | None) -> Randomness:
    if random is None:
        raise ValueError("random: dropout needs a generator while training")
    return random
