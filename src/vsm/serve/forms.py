"""Forms with files, read without FastAPI's work for every field.

Each is described and checked by one model, as FastAPI would: the same errors, in the same words.
Fields that it does not have are refused, since one that is misspelled would do nothing.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request, UploadFile
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData
from starlette.datastructures import UploadFile as ReadFile
from starlette.exceptions import HTTPException

from vsm.serve.problems import Problem

LONGEST_NAME = 64  # of an unknown field, as it is told


class FilesForm(BaseModel):
    """A form that has pictures."""

    model_config = ConfigDict(extra="forbid")

    files: list[UploadFile] = Field(description="Pictures.")


class ExamplesForm(FilesForm):
    """Pictures of a class."""

    label: str = Field(description="The class.")


class QuestionForm(FilesForm):
    """Pictures, and what to tell about them."""

    reject: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Answer null where a picture is too far from all classes; this share of the "
        "pictures of these classes is answered.",
    )
    explain: bool = Field(False, description="Tell what answers rest on.")


Form = TypeVar("Form", bound=FilesForm)


def described(model: type[FilesForm]) -> dict[str, Any]:
    """Return what the OpenAPI description says of a form."""
    content = {"multipart/form-data": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


@asynccontextmanager
async def form_of(request: Request, model: type[Form]) -> AsyncIterator[Form]:
    """Read and check the form of a request; its files are closed at the end of the block."""
    try:
        form = await request.form()
    except HTTPException:
        raise
    except Exception as error:  # as FastAPI does: whatever cannot be read is the sender's fault
        raise Problem(400, "body", "There was an error parsing the body") from error
    try:
        yield _checked(form, model)
    finally:
        await form.close()


def _checked(form: FormData, model: type[Form]) -> Form:
    known = list(model.model_fields)
    for name in form:
        if name not in known:
            told = f"{name[:LONGEST_NAME]!r} is no field of this form; known: {', '.join(known)}"
            raise Problem(422, name[:LONGEST_NAME], told)
    files = [one for one in form.getlist("files") if not _is_no_file(one)]
    values = {name: form[name] for name in known if name != "files" and form.get(name, "") != ""}
    try:
        return model.model_validate(values | ({"files": files} if files else {}))
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(found) from error


def _is_no_file(value: Any) -> bool:
    """Tell whether a browser sent that no file was selected."""
    return isinstance(value, ReadFile) and value.filename == "" and not value.size
