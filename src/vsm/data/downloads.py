"""Fetching public files: with progress, resumed after a break, verified, and in bounded tries."""

import hashlib
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from vsm.errors import DataError
from vsm.system.progress import Progress

BLOCK = 1 << 18  # bytes
TIMEOUT_SECONDS = 30.0
TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
DROPPED = (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
OTHERWISE = "fetch it by other means and pass it with --from"


@dataclass(frozen=True)
class PublicFile:
    """A file that can be downloaded."""

    url: str
    md5: str  # as its publisher says
    size_limit: int = 256 << 20  # bytes; no server fills a disk

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]


class _TransientError(Exception):
    """The transfer broke off in a way that may pass."""


def fetch(
    file: PublicFile, folder: Path, progress: Progress, *, tries: int = 6, wait_seconds: float = 1.0
) -> Path:
    """Download ``file`` into ``folder``, unless it is there already, and return its path.

    What has arrived is kept in ``<name>.part`` between tries and between calls, and only the rest
    is requested. Only a file with the right checksum gets its name. The wait doubles with each try.
    """
    target, partial = folder / file.name, folder / f"{file.name}.part"
    if target.is_file() and _md5(target) == file.md5:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    reason = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(wait_seconds * 2 ** (attempt - 1))
        try:
            _receive(file, partial, progress)
        except _TransientError as error:
            reason = str(error)
            continue
        found = _md5(partial)
        if found == file.md5:
            partial.replace(target)
            return target
        partial.unlink()  # the wrong bytes may be anywhere: begin anew
        reason = f"its MD5 is {found}, expected {file.md5}"
    raise DataError(
        f"download: {file.url} failed {tries} times ({reason}); try again later, or {OTHERWISE}"
    )


def _receive(file: PublicFile, partial: Path, progress: Progress) -> None:
    """Append what is missing to ``partial``."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            _append(file, response, partial, have, progress)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to send; the checksum decides
        if error.code in TRANSIENT_STATUS:
            raise _TransientError(f"the server answered {error.code}") from error
        raise DataError(
            f"download: {file.url} answered {error.code} {error.reason}; {OTHERWISE}"
        ) from error
    except DROPPED as error:
        raise _TransientError(f"connection lost: {error}") from error
    except OSError as error:
        raise DataError(
            f"download: cannot write {partial}: {error.strerror}; free some space or point "
            "VSM_DATA at a folder that can be written"
        ) from error


def _append(
    file: PublicFile, response: HTTPResponse, partial: Path, have: int, progress: Progress
) -> None:
    """Append a response to the ``have`` bytes that are there, if it begins where they end."""
    # "Content-Range: bytes N-M/L", or no such header for the whole file
    first = response.headers.get("Content-Range", "").removeprefix("bytes ").split("-")[0]
    start = int(first) if first.isdecimal() else 0
    if start != have:
        have = 0
        partial.unlink(missing_ok=True)
        if start:
            raise _TransientError(f"asked for the rest, got bytes from {start}")
    length = response.headers.get("Content-Length", "")
    total = have + int(length) if length.isdecimal() else 0
    progress.start(f"downloading {file.name}", total or None)
    progress.advance(have)
    with partial.open("ab") as written:
        while block := response.read(BLOCK):
            have += len(block)
            if have > file.size_limit:
                written.truncate(0)
                raise DataError(
                    f"download: {file.url} sent more than {file.size_limit:,} bytes, which is not "
                    f"the published file; {OTHERWISE}"
                )
            written.write(block)
            progress.advance(len(block))
    if have < total:
        raise _TransientError(f"connection closed after {have:,} of {total:,} bytes")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
