"""Images and feature vectors given by users, validated and converted to a model's inputs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from vsm.data.dataset import Dataset, ImageDataset, Pixels
from vsm.data.images import CHUNK, ImageFormat, decode_files, form_image, form_pixels
from vsm.errors import ClassifierError, ClassifierTypeError, DataError
from vsm.system.progress import NULL_PROGRESS, Progress

ImageInput = str | Path | Image.Image | npt.NDArray[Any] | Tensor
"""A file, a Pillow image, an array ``[H, W]`` or ``[H, W, C]``, or a tensor ``[C, H, W]``.
Numbers are uint8, or floats from 0 to 1."""

INK_DATASETS = ("glyphs", "omniglot")
"""Datasets of characters, stored with high ink on paper of 0."""
LARGEST_SIDE = 4096
RESAMPLINGS = tuple(one.name.lower() for one in Image.Resampling)


@dataclass(frozen=True)
class Preprocessing(ImageFormat):
    """The format and the normalization of the images that a model was trained on."""

    mean: tuple[float, ...] = field(kw_only=True)  # of each channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = field(kw_only=True)

    @staticmethod
    def of(dataset: Dataset) -> "Preprocessing | None":
        """Return how the images of ``dataset`` were prepared; None if it holds features."""
        if not isinstance(dataset, ImageDataset):
            return None
        channels, side, _ = dataset.image_shape
        is_ink = dataset.name.startswith(INK_DATASETS)
        return Preprocessing(side, channels, is_ink, **asdict(dataset.normalization))

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> "Preprocessing":
        """Build it from what :meth:`as_dict` returned; raise an error if that is invalid."""
        constants = {name: tuple(map(float, stored[name])) for name in ("mean", "std")}
        found = Preprocessing(**{**stored, **constants})
        numbers = {len(found.mean), len(found.std), found.channels}
        if found.channels not in (1, 3) or numbers != {found.channels}:
            raise ValueError(f"expected 1 or 3 channels, got {found.channels}, {constants}")
        if type(found.side) is not int or not 0 < found.side <= LARGEST_SIDE:
            raise ValueError(f"side: expected 1 to {LARGEST_SIDE} pixels, got {found.side!r}")
        if not all(map(math.isfinite, found.mean)) or not all(0 < s < math.inf for s in found.std):
            raise ValueError(f"expected finite means and standard deviations, got {constants}")
        if found.crop is not None and not 0 < found.crop <= 1:
            raise ValueError(f"crop: expected a share in (0, 1], got {found.crop}")
        if type(found.ink) is not bool or found.resampling not in (None, *RESAMPLINGS):
            raise ValueError(f"unknown ink {found.ink!r} or resampling {found.resampling!r}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are set, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""
        return self.channels, self.side, self.side

    def pixels(self, images: Sequence[ImageInput], progress: Progress = NULL_PROGRESS) -> Tensor:
        """Return ``images`` of any kinds as uint8 ``[n, C, H, W]``, channels-last in memory."""
        batches = []
        for start in range(0, len(images), CHUNK):
            batches.append(_batch(images[start : start + CHUNK], start, self))
            progress.advance(len(batches[-1]))
        return torch.from_numpy(np.concatenate(batches)).permute(0, 3, 1, 2)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalize uint8 pixels ``[n, C, H, W]`` to the floats that the model expects."""
        constants = torch.tensor([self.mean, self.std], device=pixels.device) * 255  # [2, C]
        mean, std = constants.view(2, -1, 1, 1).unbind()
        return (pixels - mean) / std


def as_list(images: Any) -> list[ImageInput]:
    """Return the images of a list, of an array ``[n, H, W(, C)]``, or of ``[n, C, H, W]``."""
    is_one = isinstance(images, np.ndarray) and images.ndim == 3 and images.shape[2] in (3, 4)
    if is_one or isinstance(images, str | Path | Image.Image):
        raise ClassifierError("images: expected several images, got one; use a list: [image]")
    if isinstance(images, np.ndarray | Tensor) and images.ndim not in (1, 3, 4):
        raise ClassifierError(
            "images: expected an array [n, H, W] or [n, H, W, C], or a tensor [n, C, H, W], got "
            f"{list(images.shape)}"
        )
    return list(images)


def _batch(images: Sequence[ImageInput], start: int, form: ImageFormat) -> Pixels:
    """Convert images to uint8 ``[n, side, side, channels]``; the first has number ``start``."""
    files = [Path(image) for image in images if isinstance(image, str | Path)]
    if len(files) == len(images):
        return np.concatenate(list(decode_files(files, form)))
    shapes = (form.shape, form.shape[:2]) if form.channels == 1 else (form.shape,)
    ready = [
        image.reshape(form.shape)
        for image in images
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape in shapes
    ]
    if len(ready) == len(images) and form.crop is None:  # nothing to convert or resize
        return form_pixels(np.stack(ready), form)
    return np.stack([_convert(image, place, form) for place, image in enumerate(images, start)])


def _convert(image: ImageInput, place: int, form: ImageFormat) -> Pixels:
    """Convert one image to uint8 ``[side, side, channels]``."""
    if isinstance(image, str | Path):
        [[pixels]] = decode_files([Path(image)], form)
        return np.asarray(pixels)
    name = f"image {place}"
    if isinstance(image, Tensor):
        values = image.detach().cpu()
        image = (values.permute(1, 2, 0) if values.ndim == 3 else values).numpy()
    if isinstance(image, np.ndarray):
        image = Image.fromarray(_as_uint8(image, name))
    if not isinstance(image, Image.Image):
        raise DataError(
            f"{name}: expected a path, an image, an array or a tensor, got {type(image).__name__}"
        )
    return form_image(image, name, form)


def _as_uint8(values: npt.NDArray[Any], name: str) -> Pixels:
    """Return an array that Pillow takes, uint8 ``[H, W]``, ``[H, W, 3]`` or ``[H, W, 4]``."""
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if 0 in values.shape or (values.ndim != 2 and values.shape[2:] not in ((3,), (4,))):
        raise DataError(
            f"{name}: expected an array [H, W] or [H, W, C] with 1, 3 or 4 channels (a tensor "
            f"[C, H, W]), got {list(values.shape)}"
        )
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if values.dtype.kind != "f":
        raise DataError(f"{name}: expected uint8, or floats from 0 to 1, got {values.dtype}")
    if not (values >= 0).all() or not (values <= 1).all():
        found = f"{values.min():g} to {values.max():g}"
        raise DataError(f"{name}: expected floats from 0 to 1, got {found}; do not normalize them")
    return np.asarray(np.rint(values * 255), np.uint8)


def as_features(rows: Any, width: int | None = None) -> Tensor:
    """Check features ``[n, D]`` of any array type, and return them as float32."""
    if hasattr(rows, "tocsr"):
        raise ClassifierError("features: sparse input is not supported; use its toarray()")
    given = rows.detach().cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    expected = "expected numbers [n, D]; this classifier takes features, not images"
    if given.dtype.kind == "c":
        raise ClassifierError(f"features: Complex data not supported, got {given.dtype}")
    if given.dtype.kind not in "fiuO":
        raise ClassifierError(f"features: got {given.dtype} {list(given.shape)}, {expected}")
    if given.ndim != 2:
        raise ClassifierError(
            f"features: expected rows [n, D], got {list(given.shape)}. Reshape your data; one row "
            "is features[None]"
        )
    if not given.shape[1]:
        raise ClassifierError(
            f"features: 0 feature(s) (shape=({len(given)}, 0)) while a minimum of 1 is required."
        )
    if width is not None and given.shape[1] != width:
        raise ClassifierError(
            f"features: X has {given.shape[1]} features, but FewShotClassifier is expecting "
            f"{width} features as input"
        )
    try:
        with np.errstate(over="ignore"):  # named below
            features = torch.from_numpy(given.astype(np.float32))
    except (TypeError, ValueError) as error:
        raise ClassifierTypeError(f"features: {expected} ({error})") from error
    finite = features.isfinite().all(1)
    if not finite.all():
        row, problem = int((~finite).int().argmax()), "a number too large for float32"
        raise ClassifierError(f"features: row {row} holds NaN, infinity or {problem}; fix it")
    return features
