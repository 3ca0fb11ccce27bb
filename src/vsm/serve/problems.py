"""Errors as ``application/problem+json`` (RFC 9457), with the field that is at fault."""

import http
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from vsm.errors import (
    ClassifierError,
    DataError,
    MemoryFileError,
    NotStoredError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    VsmError,
)

FIELD = re.compile(r"([A-Za-z_]\w*(?:\[\d+\])?): ")
STATUSES: tuple[tuple[type[VsmError], int], ...] = (
    (NotStoredError, 404),
    (StoreFullError, 409),
    (StoreUnavailableError, 503),
    (StoreError, 422),
    (DataError, 422),
    (MemoryFileError, 409),
    (ClassifierError, 409),
)
RETRY_SECONDS = 1
logger = logging.getLogger("vsm.serve")


class Problem(HTTPException):
    """An answer that says what is wrong, and with which field."""

    def __init__(self, status: int, field: str | None, detail: str) -> None:
        headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
        super().__init__(status, detail, headers)
        self.field = field


class ProblemDetails(JSONResponse):
    """The body of a problem."""

    media_type = "application/problem+json"


def problem_response(
    status: int, field: str | None, detail: str, headers: Mapping[str, str] | None = None
) -> ProblemDetails:
    """Return the answer for a problem."""
    content: dict[str, Any] = {
        "type": "about:blank",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "field": field,
    }
    return ProblemDetails(content, status, headers)


def as_problem(error: VsmError) -> Problem:
    """Return what a client is told of one of our own errors, which name the field first."""
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
    if status == 500:
        logger.error("unexpected %s", error, exc_info=error)
        return Problem(500, None, "the server failed; its log says more")
    if isinstance(error, StoreUnavailableError):  # whose name and reason are not for clients
        logger.warning("%s", error)
        return Problem(503, "store", "store: cannot be used now; ask again in a moment")
    text = str(error)
    field = FIELD.match(text)
    return Problem(status, field[1] if field else None, text)


def _says_json(request: Request) -> bool:
    return "json" in request.headers.get("content-type", "").lower()


def add_problem_handlers(app: FastAPI) -> None:
    """Let every error of ``app`` become a problem."""

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> ProblemDetails:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
        field = "body" if first["type"] == "json_invalid" else ".".join(where) or "body"
        others = len(error.errors()) - 1
        also = f" (and {others} more)" if others else ""
        if first["type"] == "model_attributes_type" and not _says_json(request):
            also += "; send JSON with the header content-type: application/json"
        return problem_response(422, field, f"{field}: {first['msg']}{also}")

    @app.exception_handler(StarletteHTTPException)
    async def of_http(_: Request, error: StarletteHTTPException) -> ProblemDetails:
        field = getattr(error, "field", "body" if error.status_code == 400 else None)
        return problem_response(error.status_code, field, str(error.detail), error.headers)

    @app.exception_handler(VsmError)
    async def of_vsm(_: Request, error: VsmError) -> ProblemDetails:
        found = as_problem(error)
        return problem_response(found.status_code, found.field, found.detail, found.headers)

    @app.exception_handler(Exception)
    async def of_anything(_: Request, error: Exception) -> ProblemDetails:
        logger.error("unexpected %s", type(error).__name__, exc_info=error)
        return problem_response(500, None, "the server failed; its log says more")
