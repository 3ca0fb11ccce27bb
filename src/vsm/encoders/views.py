"""Views of an image whose features are averaged when it is embedded."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


def views(images: Tensor, mirror: bool, shift: int) -> Iterator[Tensor]:
    """Yield ``images [B, C, H, W]``, then the other views of them, channels-last.

    Args:
        images: normalized.
        mirror: yield the mirror image of every view too.
        shift: pixels by which they are moved up, down, left and right; what comes in from outside
            repeats the border. 0 moves nothing.
    """
    for number, view in enumerate(_moved(images, shift)):
        yield view.contiguous(memory_format=torch.channels_last) if number else view
        if mirror:
            yield view.flip(-1).contiguous(memory_format=torch.channels_last)


def _moved(images: Tensor, shift: int) -> Iterator[Tensor]:
    yield images
    if shift:
        *_, height, width = images.shape
        padded = F.pad(images, [shift] * 4, mode="replicate")
        for top, left in ((0, shift), (2 * shift, shift), (shift, 0), (shift, 2 * shift)):
            yield padded[..., top : top + height, left : left + width]
