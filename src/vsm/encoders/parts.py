"""Building blocks of backbones: convolutions and dropout."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.seeding import Randomness, bernoulli, uniform

SMALL_MAP = 16  # pixels of the largest map whose patches are unfolded


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
    """A 3×3 convolution of padding 1: patches ``[B·H·W, 9·C]`` times weights ``[9·C, O]``.

    Weights and their gradient are best channels-last: then neither is copied.
    """

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
    """Turn every strided 1×1 convolution of a network into a :class:`SubsampledConv2d`, in place.

    A subclass of ``nn.Conv2d``, such as a parametrized one, keeps what it adds.
    """
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

    The scale is one over the expected share of survivors, where the authors count the survivors in
    the batch. So an image's features do not depend on the pattern of its neighbors, and a batch
    may be split among processes.

    ``hidden`` is ``[B, C, H, W]``, and its memory layout is kept. ``keep_probability`` is the share
    of activations to survive, not counting overlaps of squares. ``block_size`` is the side of a
    square; smaller maps are dropped entirely.
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
