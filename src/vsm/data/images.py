"""Decoding image files to uint8 arrays of one size, many at a time."""

import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError

from vsm.data.dataset import Pixels
from vsm.errors import DataError, DocumentError
from vsm.system import documents

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


def is_image_name(name: str) -> bool:
    """Whether ``name`` looks like an image; hidden files and those of macOS do not."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() in SUFFIXES and not hidden


def read_header(file: Path | io.BytesIO, name: str) -> tuple[bool, int, int]:
    """Return (is it gray, height, width) from the header of an image file; decode nothing."""
    with _report_errors(name), Image.open(file, formats=FORMATS) as image:
        return image.mode in GRAY_MODES, image.height, image.width


def thumbnail(data: bytes, name: str, side: int) -> bytes:
    """Return a small PNG of an image file's contents, upright, without its metadata."""
    with _report_errors(name), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        opened.draft(None, (2 * side, 2 * side))
        image = ImageOps.exif_transpose(opened)
        image = _opaque(image, 1 if image.mode in GRAY_MODES else 3)
        image.thumbnail((side, side))
        content = io.BytesIO()
        image.save(content, "PNG", exif=b"", icc_profile=None)
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


def form_pixels(pixels: Pixels, form: ImageFormat) -> Pixels:
    """Convert images ``[n, side, side, channels]``, which have the right size already."""
    if not form.ink:
        return pixels
    return np.where(pixels.mean((1, 2, 3), keepdims=True) >= DARK, 255 - pixels, pixels)


def decode_all(
    items: Sequence[Item],
    read: Callable[[Item], bytes],
    form: ImageFormat,
    label: Callable[[Item], str],
) -> Iterator[Pixels]:
    """Yield batches ``[up to CHUNK, side, side, channels]`` of images, in the order of ``items``.

    ``read`` gives the contents of an item's image file, ``label`` its name in messages. Both are
    called in threads, as Pillow releases the interpreter lock.
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
        return documents.read_file(file, max_bytes)
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
