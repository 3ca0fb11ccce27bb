"""The form of the address that is asked most, read without FastAPI's work for every field.

It is described and checked by one model, as FastAPI would: the same errors, in the same words.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request, UploadFile
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import FormData
from starlette.datastructures import UploadFile as ReadFile
from starlette.exceptions import HTTPException

from vsm.serve.problems import Problem


class QuestionForm(BaseModel):
    """Pictures, and what to tell about them."""

    files: list[UploadFile] = Field(description="Pictures.")
    reject: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Answer null where a picture is too far from all classes; this share of the "
        "pictures of these classes is answered.",
    )
    explain: bool = Field(False, description="Tell what answers rest on.")


QUESTION_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"multipart/form-data": {"schema": QuestionForm.model_json_schema()}},
    }
}


@asynccontextmanager
async def question_of(request: Request) -> AsyncIterator[QuestionForm]:
    """Read and check the form of a request; its files are closed at the end of the block."""
    try:
        form = await request.form()
    except HTTPException:
        raise
    except Exception as error:  # as FastAPI does: whatever cannot be read is the sender's fault
        raise Problem(400, "body", "There was an error parsing the body") from error
    try:
        yield _checked(form)
    finally:
        await form.close()


def _checked(form: FormData) -> QuestionForm:
    files = [one for one in form.getlist("files") if not _is_no_file(one)]
    values = {name: form[name] for name in ("reject", "explain") if form.get(name, "") != ""}
    try:
        return QuestionForm.model_validate(values | ({"files": files} if files else {}))
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(found) from error


def _is_no_file(value: Any) -> bool:
    """Tell whether a browser sent that no file was selected."""
    return isinstance(value, ReadFile) and value.filename == "" and not value.size
