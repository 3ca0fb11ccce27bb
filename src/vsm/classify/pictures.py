"""Pictures of any kind, made into what a model was trained on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from vsm.data.images import CHUNK, ImageFormat, decode_all, form_image, form_pixels
from vsm.errors import ClassifierError, DataError

Picture = str | Path | Image.Image | npt.NDArray[Any] | Tensor
"""A file, an image of Pillow's, an array ``[H, W]`` or ``[H, W, C]``, or a tensor ``[C, H, W]``.
Numbers are uint8, or floats from 0 to 1."""

INK_DATA = ("glyphs", "omniglot")
"""Datasets of ink on paper, in which ink is high and paper 0 whatever it was before."""


@dataclass(frozen=True)
class PictureFormat:
    """How the pictures of a model's training data were prepared.

    Attributes:
        side: height and width.
        channels: 1 for gray, 3 for color.
        ink: characters: ink is made high and paper 0, whichever of the two is dark.
        mean: of each channel, of pixels scaled to [0, 1].
        std: likewise.
    """

    side: int
    channels: int
    ink: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> "PictureFormat | None":
        """Return how the data of a model was prepared, by its facts; nothing if it has features."""
        constants = facts["normalization"]
        if constants is None:
            return None
        channels, side, _ = facts["input_shape"]
        return PictureFormat(
            side,
            channels,
            facts["data"].startswith(INK_DATA),
            tuple(constants["mean"]),
            tuple(constants["std"]),
        )

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""
        return self.channels, self.side, self.side

    def pixels(
        self, pictures: Sequence[Picture], advance: Callable[[int], object] = bool
    ) -> Tensor:
        """Return ``pictures`` as uint8 ``[n, C, H, W]``, channels-last in memory.

        Args:
            pictures: in any mixture of kinds.
            advance: told of every batch that is done.

        Raises:
            DataError: naming the picture that is none.
        """
        form = ImageFormat(self.side, self.channels, self.ink, upright=True, any_paper=True)
        batches = []
        if all(isinstance(picture, str | Path) for picture in pictures):
            files = [Path(str(picture)) for picture in pictures]
            for batch in decode_all(files, _contents, form, str):
                batches.append(batch)
                advance(len(batch))
        else:
            for start in range(0, len(pictures), CHUNK):
                batches.append(_all_formed(pictures[start : start + CHUNK], start, form))
                advance(len(batches[-1]))
        return torch.from_numpy(np.concatenate(batches)).permute(0, 3, 1, 2)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Turn uint8 pixels ``[n, C, H, W]`` into the floats that the model expects."""
        mean, deviation = (
            torch.tensor(values, device=pixels.device).view(-1, 1, 1) * 255
            for values in (self.mean, self.std)
        )
        return (pixels - mean) / deviation


def as_list(pictures: Any) -> list[Picture]:
    """Return the pictures of a list, of an array ``[n, H, W(, C)]``, or of ``[n, C, H, W]``."""
    is_one = isinstance(pictures, np.ndarray) and pictures.ndim == 3 and pictures.shape[2] in (3, 4)
    if is_one or isinstance(pictures, str | Path | Image.Image):
        raise ClassifierError(
            "images: expected several pictures, got one; put it into a list: [picture]"
        )
    if isinstance(pictures, np.ndarray | Tensor) and pictures.ndim not in (1, 3, 4):
        raise ClassifierError(
            "images: expected an array [n, H, W] or [n, H, W, C], or a tensor [n, C, H, W], got "
            f"{list(pictures.shape)}"
        )
    return list(pictures)


def _contents(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); check the path") from error


def _all_formed(
    pictures: Sequence[Picture], start: int, form: ImageFormat
) -> npt.NDArray[np.uint8]:
    """Turn pictures into uint8 ``[n, side, side, channels]``; the first has number ``start``."""
    shapes = (form.shape, form.shape[:2]) if form.channels == 1 else (form.shape,)
    arrays = [picture for picture in pictures if isinstance(picture, np.ndarray)]
    ready = [one for one in arrays if one.dtype == np.uint8 and one.shape in shapes]
    if len(ready) == len(pictures):  # nothing to convert or resize
        return form_pixels(np.stack([one.reshape(form.shape) for one in ready]), form)
    return np.stack([_formed(one, place, form) for place, one in enumerate(pictures, start)])


def _formed(picture: Picture, place: int, form: ImageFormat) -> npt.NDArray[np.uint8]:
    """Turn one picture into uint8 ``[side, side, channels]``."""
    if isinstance(picture, str | Path):
        [[pixels]] = decode_all([Path(picture)], _contents, form, str)
        return np.asarray(pixels)
    name = f"picture {place}"
    if isinstance(picture, Image.Image):
        return form_image(picture, name, form)
    if isinstance(picture, Tensor):
        values = picture.detach().cpu()
        picture = (values.permute(1, 2, 0) if values.ndim == 3 else values).numpy()
    if not isinstance(picture, np.ndarray):
        raise DataError(
            f"{name}: expected a path, an image, an array or a tensor, got {type(picture).__name__}"
        )
    return form_image(Image.fromarray(_bytes(picture, name)), name, form)


def _bytes(values: npt.NDArray[Any], name: str) -> npt.NDArray[np.uint8]:
    """Return an array that Pillow takes, uint8 ``[H, W]``, ``[H, W, 3]`` or ``[H, W, 4]``."""
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    shape = list(values.shape)
    if 0 in shape or values.ndim not in (2, 3) or (values.ndim == 3 and shape[-1] not in (3, 4)):
        raise DataError(
            f"{name}: expected an array [H, W] or [H, W, C] with 1, 3 or 4 channels (a tensor "
            f"[C, H, W]), got {shape}"
        )
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if values.dtype.kind != "f":
        raise DataError(f"{name}: expected uint8, or floats from 0 to 1, got {values.dtype}")
    if not (values >= 0).all() or not (values <= 1).all():
        raise DataError(
            f"{name}: expected floats from 0 to 1, got {values.min():g} to {values.max():g}; give "
            "pixels before any normalization"
        )
    pixels: npt.NDArray[np.uint8] = np.rint(values * 255).astype(np.uint8)
    return pixels
