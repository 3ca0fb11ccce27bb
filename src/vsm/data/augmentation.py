"""Random variation of training images, as batched tensor code."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vsm.seeding import Randomness, integers, uniform

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601: how bright red, green and blue look


@dataclass(frozen=True)
class Augmentation:
    """A random affine map, crop, flip and change of colors, drawn for every image on its own.

    A factor for brightness b is drawn from [1 - b, 1 + b], and likewise the others.
    """

    crop_padding: int = 0  # black pixels added on all sides before a crop of the original size
    flip_probability: float = 0.0  # how often an image is mirrored left to right
    brightness: float = 0.0  # multiplies pixels
    contrast: float = 0.0  # multiplies distances from the image's mean gray value
    saturation: float = 0.0  # multiplies distances from the pixel's gray value; 0 for gray images
    affine: float = 0.0  # how far a map of the plane, -1 to 1 each way, is from the identity

    def __call__(self, pixels: Tensor, random: Randomness) -> Tensor:
        """Vary ``pixels``, uint8 or float channels-last ``[B, C, H, W]`` in 0…255, as copies."""
        if self.affine:
            pixels = self._map(pixels, random)
        if self.crop_padding or self.flip_probability:
            pixels = self._crop_and_flip(pixels, random)
        if self.brightness or self.contrast or self.saturation:
            pixels = self._change_colors(pixels, random)
        return pixels

    def _map(self, pixels: Tensor, random: Randomness) -> Tensor:
        """Show at x in [-1, 1]² what was at (I + M)x + t, or black; M and t are in [-a, a]."""
        drawn = self.affine * (2 * uniform(random, len(pixels), 6) - 1)
        maps = torch.cat([torch.eye(2).flatten() + drawn[:, :4], drawn[:, 4:]], 1)
        maps = maps.view(-1, 3, 2).mT.to(pixels.device)  # the columns of I + M, then t
        places = F.affine_grid(maps, list(pixels.shape), align_corners=False)
        found = F.grid_sample(pixels.float(), places, align_corners=False)
        if not pixels.is_floating_point():
            found = found.round_()
        return found.to(pixels.dtype).contiguous(memory_format=torch.channels_last)

    def _crop_and_flip(self, pixels: Tensor, random: Randomness) -> Tensor:
        """Choose, for every image, one window of its padded original or mirror image."""
        batch, _, height, width = pixels.shape
        padding = self.crop_padding
        top, left = integers(random, 2 * padding + 1, batch, 2).to(pixels.device).unbind(1)
        mirrored = uniform(random, batch) < self.flip_probability
        padded = F.pad(pixels.permute(0, 2, 3, 1), (0, 0, *[padding] * 4))
        both = torch.stack([padded, padded.flip(2)])  # [2, B, H + 2P, W + 2P, C]
        windows = both.unfold(2, height, 1).unfold(3, width, 1)  # [2, B, 2P+1, 2P+1, C, H, W]
        images = torch.arange(batch, device=pixels.device)
        chosen: Tensor = windows[mirrored.long().to(pixels.device), images, top, left]
        return chosen.contiguous(memory_format=torch.channels_last)

    def _change_colors(self, pixels: Tensor, random: Randomness) -> Tensor:
        """Change saturation, then contrast, then brightness, and clip once at the end.

        With gray value ``g = wᵀx``, its mean ``m`` over the image and factors ``s, c, b``, a pixel
        ``x`` becomes ``b (c (s x + (1 - s) g) + (1 - c) m)``.
        """
        batch, channels, height, width = pixels.shape
        ranges = torch.tensor([self.brightness, self.contrast, self.saturation])
        factors = 1 + ranges * (2 * uniform(random, batch, 3) - 1)
        b, c, s = factors.to(pixels.device).split(1, 1)  # each [B, 1]
        weights = torch.tensor(LUMA if channels == 3 else [1 / channels] * channels)
        values = pixels.permute(0, 2, 3, 1).flatten(1, 2).float()  # [B, HW, C]
        gray = values @ weights.to(pixels.device)  # [B, HW]
        constant = b * (1 - c) * gray.mean(1, keepdim=True)  # [B, 1]
        if not pixels.is_floating_point():
            constant += 0.5  # conversion to integers cuts off; so it rounds
        shared = torch.addcmul(constant, gray, b * c * (1 - s))  # [B, HW], for all channels
        changed = torch.addcmul(shared.unsqueeze(2), values, (b * c * s).unsqueeze(2))
        changed = changed.clamp_(0, 255).to(pixels.dtype)
        return changed.view(batch, height, width, channels).permute(0, 3, 1, 2)


NO_AUGMENTATION = Augmentation()


def natural(crop_padding: int) -> Augmentation:
    """Return the usual preset for photographs: padded crop, mirror, and colors within 40%."""
    return Augmentation(crop_padding, 0.5, brightness=0.4, contrast=0.4, saturation=0.4)
