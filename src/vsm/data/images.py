"""Turning image files into uint8 arrays of one size, many at a time."""

import io
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

import numpy as np
from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError

from vsm.data.dataset import Pixels
from vsm.errors import DataError

SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
# Content decides, not the suffix; other formats of Pillow's run programs or are seldom audited.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
GRAY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "I;16B", "F"))
CHUNK = 256  # images decoded between two writes; bounds memory
AT_ONCE = 16  # images decoded by a thread before it is given others
DARK = 127.5  # mean of an image whose paper is dark
MOST_NAMED = 10
MOST_BYTES = 512 * 2**20  # of an image file
MAGIC_BYTES = 12
MAGICS = (
    b"\x89PNG", b"\xff\xd8\xff", b"BM", b"GIF8", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+",
)  # fmt: skip
Item = TypeVar("Item")

# What Pillow and its plugins raise for files that are cut off, damaged, or not images at all.
UNREADABLE = (
    *(OSError, EOFError, SyntaxError, ValueError, IndexError, TypeError),
    *(struct.error, zlib.error),
)

# Refuses images above Pillow's ``MAX_IMAGE_PIXELS``, where it would only warn. Warning filters
# belong to the process, so this is entered around threads, not in them.
_bombs_refused = partial(
    warnings.catch_warnings, action="error", category=Image.DecompressionBombWarning
)


@dataclass(frozen=True)
class ImageFormat:
    """What every image is turned into."""

    side: int  # height and width; other sizes are resized straight to it, without cropping
    channels: int  # 1 for gray, 3 for color
    ink: bool = False  # invert dark ink on white paper: the signal is high and the paper 0
    upright: bool = False  # turn photographs the way their camera says they were held
    any_paper: bool = False  # with ink, leave light ink on dark paper as it is
    crop: float | None = None  # keep the middle square, this share of the shorter side
    resampling: str | None = None  # a name of Pillow's; unset: bicubic after a crop, else lanczos

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(height, width, channels)``."""
        return self.side, self.side, self.channels


def is_image_name(name: str) -> bool:
    """Tell whether ``name`` looks like an image; hidden files and macOS litter do not."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() in SUFFIXES and not hidden


def inspect(path: Path) -> tuple[bool, int, int]:
    """Return (is it gray, height, width) from the header of an image file alone."""
    with _bombs_refused(), _reporting(str(path)), Image.open(path, formats=FORMATS) as image:
        return image.mode in GRAY_MODES, image.height, image.width


def size_of(data: bytes, name: str) -> tuple[int, int]:
    """Return (height, width) from the header of an image file's contents; nothing is decoded."""
    with _reporting(name), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return image.height, image.width


def thumbnail(data: bytes, name: str, side: int) -> bytes:
    """Return a small PNG of an image file's contents, upright, without its metadata."""
    with _reporting(name), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        opened.draft(None, (2 * side, 2 * side))
        image = ImageOps.exif_transpose(opened)
        image = _opaque(image, 1 if image.mode in GRAY_MODES else 3)
        image.thumbnail((side, side))
        content = io.BytesIO()
        image.save(content, "PNG", exif=b"", icc_profile=None)
        return content.getvalue()


def decode(data: bytes, name: str, form: ImageFormat) -> Pixels:
    """Decode one image file to uint8 ``[side, side, channels]``; ``name`` is for messages."""
    with _reporting(name), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        opened.draft(None, (2 * form.side, 2 * form.side))  # JPEG: decode no finer than needed
        return form_image(opened, name, form)


def form_image(image: Image.Image, name: str, form: ImageFormat) -> Pixels:
    """Turn an image in memory into what :func:`decode` makes of a file of it."""
    with _reporting(name):
        if form.upright:
            image = ImageOps.exif_transpose(image)
        image = _opaque(image, form.channels)
        if form.ink and not (form.any_paper and np.asarray(image).mean() < DARK):
            image = ImageChops.invert(image)  # as ImageOps.invert, but without a table per image
        if form.crop is not None:
            image = _middle(image, form.crop, form.side, form.resampling or "bicubic")
        elif image.size != (form.side, form.side):
            scaling = Image.Resampling[(form.resampling or "lanczos").upper()]
            image = image.resize((form.side, form.side), scaling)
        return np.asarray(image).reshape(form.shape)


def _opaque(image: Image.Image, channels: int) -> Image.Image:
    """Return a picture of 8 bits in gray or color; what is transparent becomes white."""
    if image.mode.startswith("I"):  # 16 bits become 8
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:  # on white
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def _middle(image: Image.Image, share: float, side: int, resampling: str) -> Image.Image:
    """Cut out the middle square, a share of the shorter side, and scale it."""
    half = share * min(image.size) / 2
    x, y = image.width / 2, image.height / 2
    box = (x - half, y - half, x + half, y + half)
    return image.resize((side, side), Image.Resampling[resampling.upper()], box)


def form_pixels(pixels: Pixels, form: ImageFormat) -> Pixels:
    """Do the same with many that have the right size and channels already, ``[n, …]``."""
    formed = pixels.reshape(-1, *form.shape)
    if not form.ink:
        return formed
    if not form.any_paper:
        return 255 - formed
    is_light = formed.mean((1, 2, 3), keepdims=True) >= DARK
    return np.where(is_light, 255 - formed, formed)


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

    def attempt(item: Item) -> Pixels | DataError:
        try:
            return decode(read(item), label(item), form)
        except DataError as error:
            return error

    def attempt_all(part: Sequence[Item]) -> list[Pixels | DataError]:
        return [attempt(item) for item in part]

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), CHUNK):
            chunk = items[start : start + CHUNK]
            parts = [chunk[n : n + AT_ONCE] for n in range(0, len(chunk), AT_ONCE)]
            with _bombs_refused():
                decoded = [one for part in pool.map(attempt_all, parts) for one in part]
            errors = [one for one in decoded if isinstance(one, DataError)]
            if errors:  # all are named, so that all are fixed at once
                names = [str(error).split(": ", 1)[0] for error in errors[1 : 1 + MOST_NAMED]]
                also = f" (and {len(errors) - 1} more: {', '.join(names)})" if names else ""
                raise DataError(f"{errors[0]}{also}") from errors[0]
            yield np.stack([one for one in decoded if not isinstance(one, DataError)])


def decode_files(files: Sequence[Path], form: ImageFormat) -> Iterator[Pixels]:
    """Yield batches of the images in ``files``, as :func:`decode_all` does."""
    return decode_all(files, read_file, form, str)


def read_file(file: Path) -> bytes:
    """Return the contents of an image file, or say that it cannot be read.

    Its first bytes are looked at before the others, since a file may have any size.
    """
    try:
        is_regular = stat.S_ISREG(file.stat().st_mode)
        if is_regular:
            with file.open("rb") as opened:
                begin = opened.read(MAGIC_BYTES)
                if _is_image(begin):
                    return begin + _rest(opened, file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); check the path") from error
    reason = "no image" if is_regular else "no regular file"
    raise DataError(f"{file}: unreadable or truncated image ({reason}); replace or remove it")


def _is_image(begin: bytes) -> bool:
    """Tell by its first bytes whether a file may be of one of ``FORMATS``."""
    is_webp = begin[:4] == b"RIFF" and begin[8:12] == b"WEBP"
    is_netpbm = begin[:1] == b"P" and begin[1:2] in (b"1", b"2", b"3", b"4", b"5", b"6", b"f", b"y")
    return is_webp or is_netpbm or begin.startswith(MAGICS)


def _rest(opened: BinaryIO, file: Path) -> bytes:
    size = os.fstat(opened.fileno()).st_size
    if size > MOST_BYTES:
        raise DataError(
            f"{file}: has {size:,} bytes, but a picture at most {MOST_BYTES:,}; replace it"
        )
    return opened.read(MOST_BYTES)


@contextmanager
def _reporting(name: str) -> Iterator[None]:
    try:
        yield
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(
            f"{name}: refused as a decompression bomb, over {Image.MAX_IMAGE_PIXELS} pixels; "
            "remove it or scale it down"
        ) from error
    except UNREADABLE as error:
        reason = "no image" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            f"{name}: unreadable or truncated image ({reason}); replace or remove it"
        ) from error
