"""Downloading public files: checked by size and checksum, in a bounded number of attempts."""

import hashlib
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from vsm.errors import DataError
from vsm.system.files import atomic_path
from vsm.system.progress import Progress

BLOCK = 1 << 18  # bytes
TIMEOUT_SECONDS = 30.0
TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
DROPPED = (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
ALTERNATIVE = "get it by other means and pass it with --from"


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


def fetch(
    file: PublicFile, folder: Path, progress: Progress, *, tries: int = 6, wait_seconds: float = 1.0
) -> Path:
    """Download ``file`` into ``folder``, unless it is there already, and return its path.

    Only a file with the right checksum gets its name. The wait doubles with each attempt.
    """
    target, reason = folder / file.name, ""
    if target.is_file():
        with target.open("rb") as stored:
            if hashlib.file_digest(stored, _md5).hexdigest() == file.md5:
                return target
    for attempt in range(tries):
        if attempt:
            time.sleep(wait_seconds * 2 ** (attempt - 1))
        try:
            with atomic_path(target) as temporary:
                _receive(file, temporary, progress)
            return target
        except urllib.error.HTTPError as error:
            reason = f"the server answered {error.code} {error.reason}"
            if error.code not in TRANSIENT_STATUS:
                raise DataError(f"download: {file.url}: {reason}; {ALTERNATIVE}") from error
        except DROPPED as error:
            reason = f"connection lost: {' '.join(map(str, error.args))}"
        except OSError as error:
            raise DataError(
                f"download: cannot write {target}: {error.strerror}; free some space or point "
                "VSM_DATA at a folder that can be written"
            ) from error
    raise DataError(
        f"download: {file.url} failed {tries} times ({reason}); try again later, or {ALTERNATIVE}"
    )


def _receive(file: PublicFile, target: Path, progress: Progress) -> None:
    """Write the file to ``target``; raise ``ConnectionError`` if other bytes arrived."""
    digest, received = _md5(), 0
    with urllib.request.urlopen(file.url, timeout=TIMEOUT_SECONDS) as response:
        length = response.headers.get("Content-Length", "")
        progress.start(f"downloading {file.name}", int(length) if length.isdecimal() else None)
        with target.open("wb") as written:
            while block := response.read(BLOCK):
                received += len(block)
                if received > file.size_limit:
                    raise DataError(
                        f"download: {file.url} sent more than {file.size_limit:,} bytes, which is "
                        f"not the published file; {ALTERNATIVE}"
                    )
                digest.update(block)
                written.write(block)
                progress.advance(len(block))
    if digest.hexdigest() != file.md5:
        raise ConnectionError(
            f"received {received:,} bytes with MD5 {digest.hexdigest()}, expected {file.md5}"
        )


def _md5() -> "hashlib._Hash":
    return hashlib.md5(usedforsecurity=False)
