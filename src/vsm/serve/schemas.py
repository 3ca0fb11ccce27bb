"""Bodies of requests and responses, from which FastAPI makes the OpenAPI description.

Uploaded files are checked by size, then by header, then decoded.
"""

import io
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, NotRequired

import numpy as np
from fastapi import Form, Query, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from vsm.data.dataset import Pixels
from vsm.data.images import ImageFormat, decode, read_header, thumbnail
from vsm.errors import DataError
from vsm.serve import Limits
from vsm.serve.middleware import Problem
from vsm.stores.store import Task

THUMBNAIL_SIDE = 96
MAX_FILENAME_LENGTH = 200
MAX_LISTED = 10_000


class NewTask(BaseModel):
    """A task to create."""

    name: str = Field(description="For display; it need not be unique.")


class Upload(NamedTuple):
    """The contents of a file and the client's name for it, which is never used as a path."""

    field: str
    name: str
    content: bytes


class FilesForm(BaseModel):
    """A form with images; unknown fields are refused, since a misspelled one would do nothing."""

    model_config = ConfigDict(extra="forbid")

    files: list[UploadFile] = Field(description="Images.")

    @property
    def names(self) -> list[str]:
        """The client's names of the files, without folders and control characters."""
        return [_display_name(file.filename or "") for file in self.files]

    async def read(self, limits: Limits) -> list[Upload]:
        """Read the files, unless there are too many or one is too large."""
        if len(self.files) > limits.files:
            reason = f"expected at most {limits.files} per request, got {len(self.files)}"
            raise Problem(413, "files", reason)
        uploads = []
        for number, (file, name) in enumerate(zip(self.files, self.names, strict=True)):
            field = f"files[{number}]"
            if (file.size or 0) > limits.file_bytes:
                size = f"{file.size:,} bytes, expected at most {limits.file_bytes:,}"
                raise Problem(413, field, f"{name} has {size}; scale it down")
            uploads.append(Upload(field, name, await file.read()))
        return uploads


class ExamplesForm(FilesForm):
    """Images of a class."""

    label: str = Field(description="The class.")


class QuestionForm(FilesForm):
    """Images to classify, and how."""

    reject: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Answer null where an image is too far from all classes; this share of the "
        "images of these classes is answered.",
    )
    explain: bool = Field(False, description="Explain the answers.")
    transductive: bool = Field(
        False,
        description="Classify the images of this request together: they help to tell where the "
        "classes lie. Nothing of them is kept.",
    )


class MemoryQuery(BaseModel):
    """Which remembered classes to list."""

    search: str = Field("", max_length=200, description="A part of the name.")
    near: str | None = Field(None, description="Sort by distance to this class.")
    offset: int = Field(0, ge=0, le=2**31)
    limit: int = Field(1000, ge=1, le=MAX_LISTED)
    map: bool = Field(False, description="Add coordinates in the plane.")


Examples = Annotated[ExamplesForm, Form(media_type="multipart/form-data")]
Question = Annotated[QuestionForm, Form(media_type="multipart/form-data")]
Listing = Annotated[MemoryQuery, Query()]


class TaskId(TypedDict):
    """A task that was created."""

    id: str
    name: str


class TaskList(TypedDict):
    """All tasks, oldest first."""

    tasks: list[Task]


class AddedExamples(TypedDict):
    """The ids of examples that were added, in the order of the files."""

    label: str
    examples: list[str]


class Alternative(TypedDict):
    """A class and its probability."""

    label: str
    probability: float


class RecalledClass(TypedDict):
    """A remembered class and its weight in the prior of the answer's class."""

    name: str
    weight: float


class Answer(TypedDict):
    """The answer for one image; label and probability are null if it is none of the classes."""

    file: str
    label: str | None
    probability: float | None
    alternatives: list[Alternative]
    recalled: list[RecalledClass]
    explanation: NotRequired[dict[str, Any]]


class Answers(TypedDict):
    """The answers, in the order of the files."""

    answers: list[Answer]


class Remembered(TypedDict):
    """Names of classes that were added to the memory, updated, or dropped for lack of space."""

    added: tuple[str, ...]
    updated: tuple[str, ...]
    dropped: tuple[str, ...]
    classes: int


class Point(TypedDict):
    """A point of a map."""

    name: str
    x: float
    y: float


class TaskMap(TypedDict):
    """Prototypes, examples (by id) and recalled classes of a task in one plane."""

    prototypes: list[Point]
    examples: list[Point]
    recalled: list[Point]


class ListedClass(TypedDict):
    """A remembered class; x and y if the map was asked for."""

    name: str
    count: int
    last_update: int
    added: bool
    has_thumbnail: bool
    x: NotRequired[float]
    y: NotRequired[float]


class MemoryPage(TypedDict):
    """A part of the remembered classes; ``total`` match the search."""

    version: int
    total: int
    classes: list[ListedClass]


class Forgotten(TypedDict):
    """A class that was forgotten; ``exact`` if nothing of it is left, its scatter included."""

    name: str
    exact: bool
    classes: int


class ModelInfo(TypedDict):
    """The model, the format of its images, and the limits of this server."""

    name: str
    encoder: str
    method: str
    side: int
    channels: int
    ink: bool
    remembers: bool
    can_reject: bool
    can_use_together: bool
    limits: Limits


def decode_uploads(
    uploads: Sequence[Upload], form: ImageFormat, limits: Limits, thumbnails: bool
) -> tuple[Pixels, list[bytes]]:
    """Decode files to uint8 ``[n, H, W, C]`` and small PNGs, after all headers were checked."""
    for upload in uploads:
        if not upload.content:
            raise Problem(422, upload.field, f"{upload.name} is empty")
        with _report_unreadable(upload):
            _, height, width = read_header(io.BytesIO(upload.content), upload.name)
        if height * width > limits.pixels:
            size = f"{width:,} × {height:,} pixels, expected at most {limits.pixels:,}"
            raise Problem(413, upload.field, f"{upload.name} has {size}; scale it down")
    pixels, small = [], []
    for upload in uploads:
        with _report_unreadable(upload):
            pixels.append(decode(upload.content, upload.name, form))
            if thumbnails:
                small.append(thumbnail(upload.content, upload.name, THUMBNAIL_SIDE))
    return np.stack(pixels), small


@contextmanager
def _report_unreadable(upload: Upload) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a decoder raises is the file's fault
        reason = str(error) if isinstance(error, DataError) else f"{upload.name}: unreadable image"
        status = 413 if "decompression bomb" in reason else 422
        raise Problem(status, upload.field, reason) from error


def _display_name(name: str) -> str:
    last = name.replace("\\", "/").rpartition("/")[2]
    kept = "".join(one for one in last if unicodedata.category(one) not in ("Cc", "Cs"))
    return kept.strip()[:MAX_FILENAME_LENGTH] or "image"
