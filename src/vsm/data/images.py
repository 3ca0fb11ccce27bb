"""Image files, and images in memory, as the pixels that a model takes; many at a time."""

import io
import math
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError
from torch import Tensor

from vsm.data.dataset import Dataset, ImageDataset, Pixels
from vsm.errors import ClassifierError, DataError, DocumentError
from vsm.system.files import read_file as read_regular_file
from vsm.system.progress import NULL_PROGRESS, Progress

ImageInput = str | Path | Image.Image | npt.NDArray[Any] | Tensor
"""A file, a Pillow image, an array ``[H, W]`` or ``[H, W, C]``, or a tensor ``[C, H, W]``.
Numbers are uint8, or floats from 0 to 1."""

SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
# Content decides, not the suffix; other formats of Pillow's run programs or are seldom audited.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
GRAY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "I;16B", "F"))
CHUNK = 256  # images decoded between two writes; bounds memory
PER_CALL = 16  # images that a thread decodes in one call; one at a time is slower
DARK = 127.5  # images with a smaller mean have light ink on dark paper
MAX_NAMED = 10  # bad images in one message
MAX_BYTES = 512 * 2**20  # of an image file
INK_DATASETS = ("glyphs", "omniglot")  # of characters, stored with high ink on paper of 0
LARGEST_SIDE = 4096
RESAMPLINGS = tuple(one.name.lower() for one in Image.Resampling)
Item = TypeVar("Item")

# What Pillow and its plugins raise for files that are truncated, damaged, or not images at all.
UNREADABLE = (
    *(OSError, EOFError, SyntaxError, ValueError, IndexError, TypeError),
    *(struct.error, zlib.error),
)

# Refuses images above Pillow's ``MAX_IMAGE_PIXELS``, where it would only warn. Warning filters
# belong to the process, so this is entered around threads, not in them.
refuse_bombs = partial(
    warnings.catch_warnings, action="error", category=Image.DecompressionBombWarning
)


@dataclass(frozen=True)
class ImageFormat:
    """What every image is turned into, upright and without transparency."""

    side: int  # height and width; other sizes are resized straight to it, without cropping
    channels: int  # 1 for gray, 3 for color
    ink: bool = False  # characters: ink is high and paper 0, whichever of the two is dark
    crop: float | None = None  # keep the middle square, this share of the shorter side
    resampling: str | None = None  # a name of Pillow's; unset: bicubic after a crop, else lanczos

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(height, width, channels)``."""
        return self.side, self.side, self.channels


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
        batches = [np.zeros((0, *self.shape), np.uint8)]
        for start in range(0, len(images), CHUNK):
            batches.append(_batch(images[start : start + CHUNK], start, self))
            progress.advance(len(batches[-1]))
        return torch.from_numpy(np.concatenate(batches)).permute(0, 3, 1, 2)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalize uint8 pixels ``[n, C, H, W]`` to the floats that the model expects."""
        constants = torch.tensor([self.mean, self.std], device=pixels.device) * 255  # [2, C]
        mean, std = constants.view(2, -1, 1, 1).unbind()
        return (pixels - mean) / std


def is_image_name(name: str) -> bool:
    """Whether ``name`` looks like an image; hidden files and those of macOS do not."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() in SUFFIXES and not hidden


def read_header(file: Path | io.BytesIO, name: str) -> tuple[bool, int, int]:
    """Return (is it gray, height, width) from the header of an image file; decode nothing."""
    with _report_errors(name), Image.open(file, formats=FORMATS) as image:
        return image.mode in GRAY_MODES, image.height, image.width


def thumbnail(data: bytes, name: str, side: int, kind: str = "PNG") -> bytes:
    """Return a small copy of an image file's contents, upright, without its metadata."""
    with _report_errors(name), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        opened.draft(None, (2 * side, 2 * side))
        image = ImageOps.exif_transpose(opened)
        image = _opaque(image, 1 if image.mode in GRAY_MODES else 3)
        image.thumbnail((side, side))
        content = io.BytesIO()
        image.save(content, kind, exif=b"", icc_profile=None)
        return content.getvalue()


def decode(data: bytes, name: str, form: ImageFormat) -> Pixels:
    """Decode one image file to uint8 ``[side, side, channels]``; ``name`` is for messages."""
    with _report_errors(name), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        opened.draft(None, (2 * form.side, 2 * form.side))  # JPEG: decode no finer than needed
        return form_image(opened, name, form)


def form_image(image: Image.Image, name: str, form: ImageFormat) -> Pixels:
    """Convert an image in memory as :func:`decode` converts a file."""
    with _report_errors(name):
        image = _opaque(ImageOps.exif_transpose(image), form.channels)
        if form.ink and np.asarray(image).mean() >= DARK:
            image = ImageChops.invert(image)  # as ImageOps.invert, but without a table per image
        size, box = (form.side, form.side), None
        if form.crop is not None:
            x, y, half = image.width / 2, image.height / 2, form.crop * min(image.size) / 2
            box = (x - half, y - half, x + half, y + half)
        if box or image.size != size:
            resampling = form.resampling or ("bicubic" if box else "lanczos")
            image = image.resize(size, Image.Resampling[resampling.upper()], box)
        return np.asarray(image).reshape(form.shape)


def _opaque(image: Image.Image, channels: int) -> Image.Image:
    """Return an 8-bit image in gray or color; transparent pixels become white."""
    if image.mode.startswith("I"):  # 16 bits become 8
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def decode_all(
    items: Sequence[Item],
    read: Callable[[Item], bytes],
    form: ImageFormat,
    label: Callable[[Item], str],
) -> Iterator[Pixels]:
    """Yield batches ``[up to CHUNK, side, side, channels]`` of images, in the order of ``items``.

    ``read`` gives the contents of an image file, ``label`` its name; threads call both.
    """

    def attempt(part: Sequence[Item]) -> list[Pixels | DataError]:
        results: list[Pixels | DataError] = []
        for item in part:
            try:
                results.append(decode(read(item), label(item), form))
            except DataError as error:
                results.append(error)
        return results

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), CHUNK):
            chunk = items[start : start + CHUNK]
            parts = [chunk[n : n + PER_CALL] for n in range(0, len(chunk), PER_CALL)]
            with refuse_bombs():
                decoded = [one for part in pool.map(attempt, parts) for one in part]
            errors = [one for one in decoded if isinstance(one, DataError)]
            if errors:  # all are named, so that all are fixed at once
                names = [str(error).split(": ", 1)[0] for error in errors[1 : 1 + MAX_NAMED]]
                also = f" (and {len(errors) - 1} more: {', '.join(names)})" if names else ""
                raise DataError(f"{errors[0]}{also}") from errors[0]
            yield np.stack([one for one in decoded if not isinstance(one, DataError)])


def decode_files(files: Sequence[Path], form: ImageFormat) -> Iterator[Pixels]:
    """Yield batches of the images in ``files``, as :func:`decode_all` does."""
    return decode_all(files, read_file, form, str)


def read_file(file: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the contents of a regular file of at most ``max_bytes``."""
    try:
        return read_regular_file(file, max_bytes)
    except DocumentError as error:
        raise DataError(f"{error}; replace or remove it") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); check the path") from error


@contextmanager
def _report_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        limit = f"over {Image.MAX_IMAGE_PIXELS} pixels; scale it down"
        raise DataError(f"{name}: refused as a decompression bomb, {limit}") from error
    except UNREADABLE as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else error
        problem = f"unreadable or truncated image ({reason}); replace or remove it"
        raise DataError(f"{name}: {problem}") from error


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
        pixels = np.stack(ready)
        if not form.ink:
            return pixels
        return np.where(pixels.mean((1, 2, 3), keepdims=True) >= DARK, 255 - pixels, pixels)
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
