"""Random variation of training images, as batched tensor code."""

from dataclasses import dataclass

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601: how bright red, green and blue look


@dataclass(frozen=True)
class Augmentation:
    """A random crop, flip and change of colours, drawn for every image on its own.

    Attributes:
        crop_padding: black pixels added on all sides before a crop of the original size.
        flip_probability: how often an image is mirrored left to right.
        brightness: pixels are multiplied by a factor from ``[1 - brightness, 1 + brightness]``.
        contrast: likewise, distances from the image's mean grey value.
        saturation: likewise, distances from the pixel's grey value; 0 for grey images.
    """

    crop_padding: int = 0
    flip_probability: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __call__(self, pixels: Tensor, random: torch.Generator) -> Tensor:
        """Return varied copies of ``pixels``, uint8 or float ``[B, C, H, W]`` in 0…255.

        Shape, dtype and channels-last layout are kept.
        """
        if self.crop_padding or self.flip_probability:
            pixels = self._crop_and_flip(pixels, random)
        if self.brightness or self.contrast or self.saturation:
            pixels = self._change_colours(pixels, random)
        return pixels

    def _crop_and_flip(self, pixels: Tensor, random: torch.Generator) -> Tensor:
        """Look every output pixel up in the padded input: one gather for crop and flip."""
        batch, _, height, width = pixels.shape
        padding = self.crop_padding
        offsets = torch.randint(2 * padding + 1, (2, batch, 1), generator=random)
        flipped = torch.rand(batch, 1, generator=random) < self.flip_probability
        across = torch.arange(width)
        rows = torch.arange(height) + offsets[0]  # [B, H]
        columns = torch.where(flipped, across.flip(0), across) + offsets[1]  # [B, W]
        padded = torch.nn.functional.pad(pixels.permute(0, 2, 3, 1), (0, 0, *[padding] * 4))
        width += 2 * padding
        first = torch.arange(batch).view(-1, 1, 1) * (height + 2 * padding) * width
        where = first + rows.unsqueeze(2) * width + columns.unsqueeze(1)  # [B, H, W]
        gathered = padded.flatten(0, 2)[where.to(pixels.device)]  # [B, H, W, C]
        return gathered.permute(0, 3, 1, 2)

    def _change_colours(self, pixels: Tensor, random: torch.Generator) -> Tensor:
        """Apply saturation, contrast and brightness as one affine map of a pixel's channels.

        With grey value ``g = wᵀx``, its mean over the image ``m`` and factors ``s, c, b``:
        ``x ↦ b (c (s x + (1 - s) g) + (1 - c) m)``, clipped once to 0…255 at the end.
        """
        batch, channels, height, width = pixels.shape
        ranges = torch.tensor([self.brightness, self.contrast, self.saturation]).view(3, 1, 1)
        factors = 1 + ranges * (2 * torch.rand(3, batch, 1, generator=random) - 1)
        b, c, s = factors.to(pixels.device)  # each [B, 1]
        weights = torch.tensor(LUMA if channels == 3 else [1 / channels] * channels)
        weights = weights.to(pixels.device)
        values = pixels.permute(0, 2, 3, 1).flatten(1, 2).float()  # [B, HW, C]
        mean_grey = (values.mean(1) @ weights).unsqueeze(1)  # [B, 1]
        mixing = (1 - s).unsqueeze(2) * weights.unsqueeze(1)  # [B, C, 1], the same for all outputs
        identity = torch.eye(channels, device=pixels.device)
        matrix = (b * c).unsqueeze(2) * (s.unsqueeze(2) * identity + mixing)  # [B, C, C]
        offset = (b * (1 - c) * mean_grey).unsqueeze(2)  # [B, 1, 1]
        changed = torch.baddbmm(offset, values, matrix)
        changed.clamp_(0, 255)
        if not pixels.is_floating_point():
            changed.round_()
        changed = changed.to(pixels.dtype).view(batch, height, width, channels)
        return changed.permute(0, 3, 1, 2)


NO_AUGMENTATION = Augmentation()


def natural(crop_padding: int) -> Augmentation:
    """Return the usual preset for photographs: padded crop, mirror, and colours within 40%."""
    return Augmentation(crop_padding, 0.5, brightness=0.4, contrast=0.4, saturation=0.4)
