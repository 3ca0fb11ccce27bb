"""Uploaded files to pixels: checked by size, then by header, then decoded. Drawings of glyphs."""

import io
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from fastapi import UploadFile
from PIL import Image

from vsm.data.dataset import Pixels
from vsm.data.glyphs import NUM_ALPHABETS, SEED, draw_alphabet
from vsm.data.images import ImageFormat, decode, read_header, thumbnail
from vsm.errors import DataError
from vsm.serve import Limits
from vsm.serve.middleware import Problem

THUMBNAIL_SIDE = 96
MAX_FILENAME_LENGTH = 200
GLYPH_NAME = re.compile(r"alphabet(\d\d)/character(\d\d)")
GLYPH_SIDE = 84  # pixels of an image, three for each of a drawing


class Upload(NamedTuple):
    """The contents of a file and the client's name for it, which is never used as a path."""

    field: str
    name: str
    content: bytes


async def read_uploads(files: Sequence[UploadFile], limits: Limits) -> list[Upload]:
    """Read the files of a request, unless there are too many or one is too large."""
    if len(files) > limits.files:
        raise Problem(
            413, "files", f"expected at most {limits.files} per request, got {len(files)}"
        )
    uploads = []
    for number, file in enumerate(files):
        field, name = f"files[{number}]", _display_name(file.filename)
        if (file.size or 0) > limits.file_bytes:
            size = f"{file.size:,} bytes, expected at most {limits.file_bytes:,}"
            raise Problem(413, field, f"{name} has {size}; scale it down")
        uploads.append(Upload(field, name, await file.read()))
    return uploads


def decode_uploads(
    uploads: Sequence[Upload], form: ImageFormat, limits: Limits, thumbnails: bool
) -> tuple[Pixels, list[bytes]]:
    """Decode files to uint8 ``[n, H, W, C]`` and small PNGs, after all headers were checked."""
    for upload in uploads:
        _check_header(upload, limits)
    pixels, small = [], []
    for upload in uploads:
        try:
            pixels.append(decode(upload.content, upload.name, form))
            if thumbnails:
                small.append(thumbnail(upload.content, upload.name, THUMBNAIL_SIDE))
        except Exception as error:  # whatever a decoder raises is the file's fault
            raise _unreadable(upload, error) from error
    return np.stack(pixels), small


def is_glyph(name: str) -> bool:
    """Whether a class of the dataset ``glyphs`` may have this name."""
    found = GLYPH_NAME.fullmatch(name)
    return found is not None and int(found[1]) < sum(NUM_ALPHABETS.values())


def draw_glyph(name: str) -> bytes | None:
    """Return a PNG of a character of the dataset ``glyphs``; None if there is no such character."""
    found = GLYPH_NAME.fullmatch(name)
    characters = _alphabet(int(found[1])) if found and is_glyph(name) else ()
    if found is None or int(found[2]) >= len(characters):
        return None
    image = Image.fromarray(255 - characters[int(found[2])])  # dark ink on white paper
    content = io.BytesIO()
    image.resize((GLYPH_SIDE, GLYPH_SIDE), Image.Resampling.BICUBIC).save(content, "PNG")
    return content.getvalue()


@cache
def _alphabet(number: int) -> Pixels:
    """Return the first drawing of every character, ``[n, H, W]``."""
    return np.ascontiguousarray(draw_alphabet(SEED, number)[:, 0, ..., 0])


def _display_name(name: str | None) -> str:
    """Return the client's name of a file without folders and control characters."""
    last = (name or "").replace("\\", "/").rpartition("/")[2]
    kept = "".join(one for one in last if unicodedata.category(one) not in ("Cc", "Cs"))
    return kept.strip()[:MAX_FILENAME_LENGTH] or "image"


def _check_header(upload: Upload, limits: Limits) -> None:
    if not upload.content:
        raise Problem(422, upload.field, f"{upload.name} is empty")
    try:
        _, height, width = read_header(io.BytesIO(upload.content), upload.name)
    except Exception as error:  # as above
        raise _unreadable(upload, error) from error
    if height * width > limits.pixels:
        size = f"{width:,} × {height:,} pixels, expected at most {limits.pixels:,}"
        raise Problem(413, upload.field, f"{upload.name} has {size}; scale it down")


def _unreadable(upload: Upload, error: Exception) -> Problem:
    reason = str(error) if isinstance(error, DataError) else f"{upload.name}: unreadable image"
    return Problem(413 if "decompression bomb" in reason else 422, upload.field, reason)
