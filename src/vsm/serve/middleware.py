"""Checks of every request before the application: host, token, origin, bytes, time, queue."""

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
from vsm.serve.problems import Problem

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
# Chromium reads one challenge per header, so each has its own. Basic makes a browser ask for a
# password; our page asks itself, so its requests have a header and get no such challenge.
PROGRAMS, BROWSERS = 'Bearer realm="vsm"', 'Basic realm="vsm", charset="UTF-8"'
PAGE_HEADER = "x-vsm-page"


@dataclass(frozen=True)
class Access:
    """Who may use the server.

    Attributes:
        token: that every request must have; None: none is required.
        hosts: allowed values of the header ``Host``; None: any. They stop a page on another site
            whose name is made to point at this machine.
    """

    token: str | None = None
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

    def __init__(self, app: ASGIApp, limits: Limits, access: Access, metrics: Metrics) -> None:
        self.app, self.limits, self.access, self.metrics = app, limits, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; other events pass unchanged."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        response = _Sender(send)
        counts = scope["path"] not in WITHOUT_QUEUE
        self.metrics.under_way += counts
        try:
            refusal = self._refusal(scope, counts)
            if refusal is not None:
                await refusal(scope, receive, response.send)
            else:
                await self._pass(scope, receive, response)
        finally:
            self.metrics.under_way -= counts
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - start
            self.metrics.answered(scope["method"], route, response.status, seconds)

    def _refusal(self, scope: Scope, counts: bool) -> Response | None:
        headers = Headers(scope=scope)
        refusal = self.access.refusal(scope["path"], scope["method"], headers)
        if refusal is not None:
            return refusal
        if counts and self.metrics.under_way > self.limits.queue:
            reason = f"{self.limits.queue} requests are under way; ask again in a moment"
            return Problem(429, "queue", reason).response()
        announced, max_bytes = headers.get("content-length", "0"), self._max_bytes(headers)
        if not announced.isdecimal() or int(announced) > max_bytes:
            return _too_large(max_bytes).response()
        return None

    async def _pass(self, scope: Scope, receive: Receive, response: "_Sender") -> None:
        """Run the application; bytes are counted on arrival, since a client may announce none."""
        max_bytes, received = self._max_bytes(Headers(scope=scope)), 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise _too_large(max_bytes)
            return message

        try:
            async with asyncio.timeout(self.limits.seconds) as response.deadline:
                await self.app(scope, receive_limited, response.send)
        except TimeoutError:
            if response.status:
                raise
            reason = f"no answer within {self.limits.seconds:g}; ask again, or for less"
            await Problem(503, "seconds", reason).response()(scope, receive, response.send)

    def _max_bytes(self, headers: Headers) -> int:
        is_form = headers.get("content-type", "").lower().startswith("multipart/form-data")
        return self.limits.request_bytes if is_form else min(SMALL_BODY, self.limits.request_bytes)


class _Sender:
    """Sends a response and keeps its status; its start ends the deadline."""

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
