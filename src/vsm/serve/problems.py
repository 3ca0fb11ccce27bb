"""Errors as ``application/problem+json`` (RFC 9457), with the field at fault."""

import http
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import HTTPException, Request
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
from vsm.system.documents import shortened

FIELD = re.compile(r"([A-Za-z_]\w*(?:\[\d+\])?): ")
STATUSES: dict[type[Exception], int] = {
    NotStoredError: 404,
    StoreFullError: 409,
    StoreError: 422,
    DataError: 422,
    MemoryFileError: 409,
    ClassifierError: 409,
}
MAX_FIELD_LENGTH = 64
logger = logging.getLogger("vsm.serve")


@dataclass(frozen=True)
class ProblemBody:
    """An error in the format of RFC 9457, and the field at fault."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None


class ProblemResponse(JSONResponse):
    """A response whose body is a :class:`ProblemBody`."""

    media_type = "application/problem+json"


class Problem(HTTPException):
    """An error to send to the client; its detail begins with the field at fault, if any."""

    def __init__(
        self, status: int, field: str | None, reason: str, headers: Mapping[str, str] | None = None
    ) -> None:
        if status in (429, 503):
            headers = {"Retry-After": "1", **(headers or {})}
        super().__init__(status, f"{field}: {reason}" if field else reason, headers)
        self.field = field

    def response(self) -> ProblemResponse:
        """Return the response to send."""
        title = http.HTTPStatus(self.status_code).phrase
        body = ProblemBody("about:blank", title, self.status_code, self.detail, self.field)
        return ProblemResponse(asdict(body), self.status_code, self.headers)


async def handle_error(request: Request, error: Exception) -> ProblemResponse:
    """Return the response for any error of the application; ours begin with the field at fault."""
    status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)
    if isinstance(error, Problem):
        problem = error
    elif isinstance(error, RequestValidationError):
        problem = _from_validation(request, error)
    elif isinstance(error, StarletteHTTPException):
        field = "body" if error.status_code == 400 else None
        problem = Problem(error.status_code, field, str(error.detail), error.headers)
    elif isinstance(error, StoreUnavailableError):  # whose name and reason are not for clients
        logger.warning("%s", error)
        problem = Problem(503, "store", "cannot be used now; ask again in a moment")
    elif status is not None:
        found, text = FIELD.match(str(error)), str(error)
        problem = Problem(status, found and found[1], text[found.end() :] if found else text)
    else:
        logger.error("unexpected %s", type(error).__name__, exc_info=error)
        problem = Problem(500, None, "the server failed; its log says more")
    return problem.response()


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Any]] = dict.fromkeys(
    (RequestValidationError, StarletteHTTPException, VsmError, Exception), handle_error
)


def _from_validation(request: Request, error: RequestValidationError) -> Problem:
    first, *others = error.errors()
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    field = "body" if first["type"] == "json_invalid" else ".".join(where) or "body"
    field, message = shortened(field, MAX_FIELD_LENGTH), first["msg"]
    if first["type"] == "extra_forbidden":
        message = "is not a field of this form; /openapi.json lists them"
    if others:
        message += f" (and {len(others)} more)"
    is_json = "json" in request.headers.get("content-type", "").lower()
    if first["type"] == "model_attributes_type" and not is_json:
        message += "; send JSON with the header content-type: application/json"
    return Problem(422, field, message)
