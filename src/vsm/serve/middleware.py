"""What every request passes: checks of host, token, origin, bytes, time, queue; counters; errors.

Errors are ``application/problem+json`` (RFC 9457), with the field at fault.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import http
import logging
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vsm import errors
from vsm.serve import Limits
from vsm.system.files import shortened

WITHOUT_TOKEN = ("/healthz",)
WITHOUT_QUEUE = ("/healthz", "/readyz", "/metrics")
READING = ("GET", "HEAD", "OPTIONS")
SMALL_BODY = 100_000  # bytes of a body without files
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
# Chromium reads one challenge per header, so each has its own. Basic makes a browser ask for a
# password; our page asks itself, so its requests have a header and get no such challenge.
PROGRAMS, BROWSERS = 'Bearer realm="vsm"', 'Basic realm="vsm", charset="UTF-8"'
PAGE_HEADER = "x-vsm-page"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
FIELD = re.compile(r"([A-Za-z_]\w*(?:\[\d+\])?): ")
STATUSES: dict[type[Exception], int] = {
    errors.NotStoredError: 404,
    errors.StoreFullError: 409,
    errors.StoreError: 422,
    errors.DataError: 422,
    errors.MemoryFileError: 409,
    errors.ClassifierError: 409,
}
PROBLEM_TYPE = "application/problem+json"
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


class Problem(HTTPException):
    """An error to send to the client; its detail begins with the field at fault, if any."""

    def __init__(
        self, status: int, field: str | None, reason: str, headers: Mapping[str, str] | None = None
    ) -> None:
        if status in (429, 503):
            headers = {"Retry-After": "1", **(headers or {})}
        super().__init__(status, f"{field}: {reason}" if field else reason, headers)
        self.field = field

    def response(self) -> JSONResponse:
        """Return the response to send."""
        title = http.HTTPStatus(self.status_code).phrase
        body = ProblemBody("about:blank", title, self.status_code, self.detail, self.field)
        return JSONResponse(asdict(body), self.status_code, self.headers, PROBLEM_TYPE)


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response for any error of the application; ours begin with the field at fault."""
    status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)
    if isinstance(error, Problem):
        problem = error
    elif isinstance(error, RequestValidationError):
        problem = _from_validation(request, error)
    elif isinstance(error, StarletteHTTPException):
        field = "body" if error.status_code == 400 else None
        problem = Problem(error.status_code, field, str(error.detail), error.headers)
    elif isinstance(error, errors.StoreUnavailableError):
        logger.warning("%s", error)  # name and reason are not for clients
        problem = Problem(503, "store", "cannot be used now; ask again in a moment")
    elif status is not None:
        found, text = FIELD.match(str(error)), str(error)
        problem = Problem(status, found and found[1], text[found.end() :] if found else text)
    else:
        logger.error("unexpected %s", type(error).__name__, exc_info=error)
        problem = Problem(500, None, "the server failed; its log says more")
    return problem.response()


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


@dataclass(frozen=True)
class Access:
    """Who may use the server."""

    token: str | None = None  # that every request must have; None: none is required
    # Allowed values of the header Host; None: any. They stop a page on another site whose name is
    # made to point at this machine.
    hosts: frozenset[str] | None = None

    def refusal(self, path: str, method: str, headers: Headers) -> Response | None:
        """Return the response to a request that is refused, else None."""
        if path in WITHOUT_TOKEN:
            return None
        host = headers.get("host", "")
        if self.hosts is not None and _hostname(host) not in self.hosts:
            return Problem(403, "host", f"this server is not called {host!r}").response()
        given = _given_token(headers)
        if self.token is not None and not _same(given, self.token):
            reason = "the token is wrong; " if given else ""
            reason += "expected Authorization: Bearer TOKEN"
            refusal = Problem(401, "token", reason, {"WWW-Authenticate": PROGRAMS}).response()
            if PAGE_HEADER not in headers:
                refusal.headers.append("WWW-Authenticate", BROWSERS)
            return refusal
        origin = headers.get("origin")
        if method not in READING and origin is not None and urlsplit(origin).netloc != host:
            return Problem(403, "origin", "pages of other sites may not use this server").response()
        return None


class LimitsMiddleware:
    """Refuses requests beyond the limits, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, limits: Limits, access: Access, metrics: "Metrics") -> None:
        self.app, self.limits, self.access, self.metrics = app, limits, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; other events pass unchanged."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        deadline = asyncio.timeout(self.limits.seconds)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message["headers"]}
                more = [header for header in SECURITY_HEADERS if header[0] not in given]
                message["headers"] = [*message["headers"], *more]
                if not deadline.expired():
                    deadline.reschedule(None)  # the deadline is for the beginning of the answer
            await send(message)

        headers, is_queued = Headers(scope=scope), scope["path"] not in WITHOUT_QUEUE
        is_form = headers.get("content-type", "").lower().startswith("multipart/form-data")
        max_bytes = self.limits.request_bytes
        if not is_form:
            max_bytes = min(max_bytes, SMALL_BODY)
        self.metrics.under_way += is_queued
        try:
            async with deadline:
                app = self._refusal(scope, headers, is_queued, max_bytes) or self.app
                await app(scope, _limited(receive, max_bytes), send_with_headers)
        except TimeoutError:
            if status:
                raise
            reason = f"no answer within {self.limits.seconds:g}; ask again, or for less"
            await Problem(503, "seconds", reason).response()(scope, receive, send_with_headers)
        finally:
            self.metrics.under_way -= is_queued
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - start
            self.metrics.answered(scope["method"], route, status, seconds)

    def _refusal(
        self, scope: Scope, headers: Headers, is_queued: bool, max_bytes: int
    ) -> Response | None:
        refusal = self.access.refusal(scope["path"], scope["method"], headers)
        if refusal is not None:
            return refusal
        if is_queued and self.metrics.under_way > self.limits.queue:
            reason = f"{self.limits.queue} requests are under way; ask again in a moment"
            return Problem(429, "queue", reason).response()
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced) > max_bytes:
            return _too_large(max_bytes).response()
        return None


class Metrics:
    """Counters in the text format of Prometheus; used by the event loop alone."""

    def __init__(self) -> None:
        self.under_way = 0
        self._answers: Counter[tuple[str, str, int]] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer; ``route`` is the pattern of its address, of which there are few."""
        self._answers[method, route, status] += 1
        self._buckets[route][bisect_left(BUCKETS, seconds)] += 1
        self._seconds[route] += seconds

    def text(self, others: Mapping[str, tuple[str, str, float]]) -> str:
        """Return all as text; ``others`` are more values by name: kind, purpose, value."""
        lines = [
            "# HELP vsm_requests_total Requests answered.",
            "# TYPE vsm_requests_total counter",
        ]
        for (method, route, status), count in sorted(self._answers.items()):
            labels = f'method="{method}",route="{route}",status="{status}"'
            lines.append(f"vsm_requests_total{{{labels}}} {count}")
        lines.append("# HELP vsm_request_seconds Time from the first byte to the answer.")
        lines.append("# TYPE vsm_request_seconds histogram")
        for route, counts in sorted(self._buckets.items()):
            for place, bound in enumerate((*BUCKETS, "+Inf")):
                total = sum(counts[: place + 1])
                lines.append(f'vsm_request_seconds_bucket{{route="{route}",le="{bound}"}} {total}')
            lines.append(f'vsm_request_seconds_sum{{route="{route}"}} {self._seconds[route]:.6f}')
            lines.append(f'vsm_request_seconds_count{{route="{route}"}} {sum(counts)}')
        under_way = ("gauge", "Requests under way.", float(self.under_way))
        for name, (kind, purpose, value) in {"vsm_requests": under_way, **others}.items():
            lines += [f"# HELP {name} {purpose}", f"# TYPE {name} {kind}", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Count bytes on arrival, since a client need not announce how many it sends."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise _too_large(max_bytes)
        return message

    return receive_limited


def _too_large(max_bytes: int) -> Problem:
    reason = f"expected at most {max_bytes:,} bytes; send fewer or smaller files per request"
    return Problem(413, "body", reason)


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _given_token(headers: Headers) -> str:
    """Return the token of a program (Bearer), or what a person typed as the password (Basic)."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode("latin-1").partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _same(given: str, expected: str) -> bool:
    """Compare in constant time, whatever the length."""
    digests = [hashlib.sha256(one.encode("utf-8", "replace")).digest() for one in (given, expected)]
    return hmac.compare_digest(*digests)
