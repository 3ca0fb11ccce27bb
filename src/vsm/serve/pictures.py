"""Uploaded files to pixels: checked by size, then by header, then decoded."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from fastapi import UploadFile

from vsm.data.images import ImageFormat, decode, size_of, thumbnail
from vsm.errors import DataError
from vsm.serve.limits import Limits
from vsm.serve.problems import Problem

THUMBNAIL_SIDE = 96
LONGEST_FILE_NAME = 200


class Upload(NamedTuple):
    """The contents of a file and the client's name for it, which is never used as a path."""

    field: str
    name: str
    content: bytes


class Pictures(NamedTuple):
    """Decoded files: ``pixels`` are uint8 ``[n, H, W, C]``; ``thumbnails`` are PNGs."""

    names: list[str]
    pixels: npt.NDArray[np.uint8]
    thumbnails: list[bytes]


async def read_uploads(files: Sequence[UploadFile], limits: Limits) -> list[Upload]:
    """Read the files of a request, or say which is too large."""
    if len(files) > limits.files:
        raise Problem(
            413, "files", f"files: expected at most {limits.files} per request, got {len(files)}"
        )
    uploads = []
    for number, file in enumerate(files):
        field, name = f"files[{number}]", shown_name(file.filename)
        if (file.size or 0) > limits.file_bytes:
            raise Problem(
                413,
                field,
                f"{field}: {name} has {file.size:,} bytes, expected at most {limits.file_bytes:,}; "
                "scale it down",
            )
        uploads.append(Upload(field, name, await file.read()))
    return uploads


def decode_uploads(
    uploads: Sequence[Upload], form: ImageFormat, limits: Limits, thumbnails: bool
) -> Pictures:
    """Decode files, all of whose headers are within the limits."""
    for upload in uploads:
        _check_header(upload, limits)
    pixels, small = [], []
    for upload in uploads:
        try:
            pixels.append(decode(upload.content, upload.name, form))
            if thumbnails:
                small.append(thumbnail(upload.content, upload.name, THUMBNAIL_SIDE))
        except Exception as error:  # whatever a decoder does not like is the file's fault
            raise _unreadable(upload, error) from error
    return Pictures([upload.name for upload in uploads], np.stack(pixels), small)


def shown_name(name: str | None) -> str:
    """Return the client's name of a file without folders and control characters."""
    last = (name or "").replace("\\", "/").rpartition("/")[2]
    kept = "".join(one for one in last if unicodedata.category(one) not in ("Cc", "Cs"))
    return kept.strip()[:LONGEST_FILE_NAME] or "picture"


def _check_header(upload: Upload, limits: Limits) -> None:
    if not upload.content:
        raise Problem(422, upload.field, f"{upload.field}: {upload.name} is empty")
    try:
        height, width = size_of(upload.content, upload.name)
    except Exception as error:  # as above
        raise _unreadable(upload, error) from error
    if height * width > limits.pixels:
        raise Problem(
            413,
            upload.field,
            f"{upload.field}: {upload.name} has {width:,} × {height:,} pixels, expected at most "
            f"{limits.pixels:,}; scale it down",
        )


def _unreadable(upload: Upload, error: Exception) -> Problem:
    reason = str(error) if isinstance(error, DataError) else f"{upload.name}: unreadable image"
    status = 413 if "decompression bomb" in reason else 422
    return Problem(status, upload.field, f"{upload.field}: {reason}")
