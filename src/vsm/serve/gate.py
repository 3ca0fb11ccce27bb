"""What every request passes first: who asks, how much comes, how long it may take."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vsm.serve.limits import Limits
from vsm.serve.metrics import Metrics
from vsm.serve.problems import RETRY_SECONDS, Problem, problem_response

WITHOUT_TOKEN = ("/healthz",)
WITHOUT_QUEUE = ("/healthz", "/readyz", "/metrics")
READING = ("GET", "HEAD", "OPTIONS")
SMALL_BODY = 100_000  # bytes of a body without files
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SENT_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
# Chromium reads one challenge per header, so each has its own. Basic makes a browser ask; requests
# of our page, which asks itself, have a header of ours and are answered without it.
PROGRAMS, BROWSERS = 'Bearer realm="vsm"', 'Basic realm="vsm", charset="UTF-8"'
PAGE_HEADER = "x-vsm-page"


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        token: that every request must have; None: nobody is asked for one.
        hosts: by which names the server may be addressed; None: by any. A page elsewhere whose name
            is made to point at this machine has another.
    """

    token: str | None = None
    hosts: frozenset[str] | None = None

    def refusal(self, path: str, method: str, headers: Headers) -> Response | None:
        """Return why a request is refused; None if it is not."""
        if path in WITHOUT_TOKEN:
            return None
        host = headers.get("host", "")
        if self.hosts is not None and _hostname(host) not in self.hosts:
            return problem_response(403, "host", f"host: this server is not called {host!r}")
        given = _given_token(headers)
        if self.token is not None and not _same(given, self.token):
            right = "expected Authorization: Bearer TOKEN"
            told = f"token: the token is wrong; {right}" if given else f"token: {right}"
            refusal = problem_response(401, "token", told, {"WWW-Authenticate": PROGRAMS})
            if PAGE_HEADER not in headers:
                refusal.headers.append("WWW-Authenticate", BROWSERS)
            return refusal
        origin = headers.get("origin")
        if method not in READING and origin is not None and urlsplit(origin).netloc != host:
            return problem_response(403, "origin", "origin: pages of other sites may not ask this")
        return None


class Gate:
    """Lets requests through to ``app``, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, limits: Limits, access: Access, metrics: Metrics) -> None:
        self.app, self.limits, self.access, self.metrics = app, limits, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; everything but HTTP goes by."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, path = time.perf_counter(), scope["path"]
        answer = _Answer(send)
        counts = path not in WITHOUT_QUEUE
        self.metrics.under_way += counts
        try:
            refusal = self._refusal(scope, counts)
            if refusal is not None:
                await refusal(scope, receive, answer.send)
            else:
                await self._pass(scope, receive, answer)
        finally:
            self.metrics.under_way -= counts
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - begin
            self.metrics.answered(scope["method"], route, answer.status, seconds)

    def _refusal(self, scope: Scope, counts: bool) -> Response | None:
        headers = Headers(scope=scope)
        refusal = self.access.refusal(scope["path"], scope["method"], headers)
        if refusal is not None:
            return refusal
        if counts and self.metrics.under_way > self.limits.queue:
            told = f"queue: {self.limits.queue} requests are under way; ask again in a moment"
            return problem_response(429, "queue", told, {"Retry-After": str(RETRY_SECONDS)})
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced) > _most_bytes(headers, self.limits):
            return _too_large(_most_bytes(headers, self.limits))
        return None

    async def _pass(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        most = _most_bytes(Headers(scope=scope), self.limits)
        received = 0

        async def receiving() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise Problem(413, "body", _too_large_text(most))
            return message

        try:
            async with asyncio.timeout(self.limits.seconds) as answer.deadline:
                await self.app(scope, receiving, answer.send)
        except TimeoutError:
            if answer.status:
                raise
            told = f"seconds: no answer within {self.limits.seconds:g}; ask again, or for less"
            refusal = problem_response(503, "seconds", told, {"Retry-After": str(RETRY_SECONDS)})
            await refusal(scope, receive, answer.send)


class _Answer:
    """An answer on its way: its status, and the deadline that ends when it begins."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.deadline: asyncio.Timeout | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = {name for name, _ in message["headers"]}
            more = [pair for pair in SENT_HEADERS if pair[0] not in given]
            message["headers"] = [*message["headers"], *more]
            if self.deadline is not None and not self.deadline.expired():
                self.deadline.reschedule(None)
        await self._send(message)


def _most_bytes(headers: Headers, limits: Limits) -> int:
    is_form = headers.get("content-type", "").lower().startswith("multipart/form-data")
    return limits.request_bytes if is_form else min(SMALL_BODY, limits.request_bytes)


def _too_large(most: int) -> Response:
    return problem_response(413, "body", _too_large_text(most))


def _too_large_text(most: int) -> str:
    return f"body: expected at most {most:,} bytes; send fewer or smaller files per request"


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
    """Compare in a time that tells nothing, not even the length."""
    digests = [hashlib.sha256(one.encode("utf-8", "replace")).digest() for one in (given, expected)]
    return hmac.compare_digest(*digests)
