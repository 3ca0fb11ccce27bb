"""Run the application: checks of address and token, the socket, signals.

Nothing here imports torch before the application runs, so that mistakes are reported at once.
"""

import errno
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from vsm.errors import SettingsError
from vsm.serve.middleware import Access

if TYPE_CHECKING:
    from vsm.serve.app import Service

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY_ADDRESS = ("0.0.0.0", "::")
MIN_TOKEN_LENGTH = 16


def read_token(path: Path) -> str:
    """Return the token in a file, or say what is wrong with it."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise SettingsError(f"token_file: {path} is not plain ASCII text") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"token_file: {path}") from error
    if len(token) < MIN_TOKEN_LENGTH or not token.isprintable() or " " in token:
        raise SettingsError(
            f"token_file: {path} must hold at least {MIN_TOKEN_LENGTH} characters without spaces, "
            "as `openssl rand -hex 32` makes them"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(host, None)]
    except OSError as error:
        raise SettingsError(f"host: {host} is unknown ({error.strerror})") from error
    return all(ipaddress.ip_address(str(one).partition("%")[0]).is_loopback for one in found)


def checked_access(host: str, token: str | None, insecure: bool) -> Access:
    """Return who may ask; an open server without a token is refused."""
    local = is_loopback(host)
    if not local and token is None and not insecure:
        raise SettingsError(
            f"host: everyone who reaches {host} could use and change this server; give "
            "--token-file, or --insecure if that is meant"
        )
    names = frozenset((*LOOPBACK_NAMES, host)) if local and token is None else None
    return Access(token, names)


def open_socket(host: str, port: int) -> socket.socket:
    """Listen, or say that the address is taken; port 0 takes a free one."""
    if not 0 <= port < 65536:
        raise SettingsError(f"port: expected 0 to 65535, got {port}")
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # its own text names the address once more
        if error.errno == errno.EADDRINUSE:
            reason += "; give another --port, or --port 0 for a free one"
        raise OSError(error.errno, reason, f"{host}:{port}") from error
    # Connections inherit it. An answer is written in two parts, and without it the second waits
    # until the client has acknowledged the first, which clients put off for 40 milliseconds.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def run(service: "Service", access: Access, listening: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C; what is under way is finished."""
    from vsm.serve.app import create_app  # noqa: PLC0415 - imports torch

    config = uvicorn.Config(
        create_app(service, access),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=int(service.limits.seconds) + 5,
    )
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    here = "localhost" if host in ANY_ADDRESS else shown
    print(
        f"vsm serve: http://{shown}:{port}, {service.store!r}\n"
        f"vsm serve: open http://{here}:{port} in a browser; Ctrl-C stops it",
        file=sys.stderr,
        flush=True,
    )
    # uvicorn stops on SIGTERM and then raises it once more, for the previous handler.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        uvicorn.Server(config).run([listening])
    finally:
        signal.signal(signal.SIGTERM, before)
