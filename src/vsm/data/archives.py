"""Reading files out of folders, zips and tars in place, without unpacking anything.

Archives are untrusted. When one is opened, a member whose name leaves the archive, a link, or more
data than an archive of images can hold is refused by name, before a byte of it is used.
"""

import io
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import IO, Any

from vsm.data import pickles
from vsm.data.images import is_image_name
from vsm.errors import DataError

MAXIMUM_RATIO = 100  # unpacked to packed; images and pickled arrays stay below 10
RATIO_ALLOWANCE = 1 << 20  # bytes; small archives of blank images compress better than that
UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error)


@dataclass(frozen=True)
class Tree:
    """Files under one root."""

    location: Path  # the folder or archive, for messages
    names: list[str]  # paths of all files relative to the root, with / between parts
    in_any_order: bool  # False if reading a file may mean unpacking everything before it
    open: Callable[[str], IO[bytes]]  # one of the names; called from several threads

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open one file; errors name it."""
        try:
            with self.open(name) as file:
                yield file
        except UNREADABLE as error:
            raise DataError(
                f"cannot read {name} in {self.location}: {error}; fetch or copy it again"
            ) from error

    def read(self, name: str) -> bytes:
        """Return the contents of one file."""
        with self.opened(name) as file:
            return file.read()

    def load_pickle(self, name: str) -> Any:
        """Return what a pickle holds, in whichever folder it is; see :mod:`vsm.data.pickles`."""
        found = [path for path in self.names if PurePosixPath(path).name == name]
        if not found:
            raise DataError(f"{self.location}: {name} is missing; fetch or copy it again")
        with self.opened(found[0]) as file:
            return pickles.load(file, f"{self.location}/{found[0]}")

    def images_by_class(
        self, class_of: Callable[[PurePosixPath], str] = lambda path: path.parent.name
    ) -> dict[str, list[str]]:
        """Return the image files of every class, by default that of the folder they are in."""
        files: dict[str, list[str]] = {}
        for name in filter(is_image_name, self.names):
            files.setdefault(class_of(PurePosixPath(name)), []).append(name)
        return files


@contextmanager
def open_tree(path: Path) -> Iterator[Tree]:
    """Open a folder, zip or tar as a :class:`Tree`; nothing is unpacked."""
    if path.is_dir():
        yield _folder(path)
        return
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; check the path given with --from")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield _zip(path, archive)
            return
        with tarfile.open(path) as tar:
            yield _tar(path, tar)
    except UNREADABLE as error:
        raise DataError(
            f"{path}: cannot be read as a zip or tar archive ({error}); fetch it again"
        ) from error


def _folder(path: Path) -> Tree:
    """List the files below a folder; links to folders are not followed."""
    names, waiting = [], [""]
    while waiting:  # os.walk of Python 3.11 would recurse
        below = waiting.pop()
        try:
            with os.scandir(path / below) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{below}{entry.name}/")
                    elif Path(entry).is_file():  # no pipe, which never ends
                        names.append(below + entry.name)
        except OSError as error:
            raise DataError(
                f"cannot list {error.filename}: {error.strerror}; check its permissions"
            ) from error
    return Tree(path, sorted(names), True, lambda name: (path / name).open("rb"))


def _zip(path: Path, archive: zipfile.ZipFile) -> Tree:
    members = archive.infolist()
    # The upper half of the external attributes is a Unix mode, when there is one.
    _refuse_unsafe(
        path, ((m.filename, m.file_size, stat.S_ISLNK(m.external_attr >> 16)) for m in members)
    )
    names = sorted({member.filename for member in members if not member.is_dir()})
    return Tree(path, names, True, archive.open)


def _tar(path: Path, archive: tarfile.TarFile) -> Tree:
    _refuse_unsafe(path, ((m.name, m.size, not (m.isfile() or m.isdir())) for m in archive))
    members = {member.name: member for member in archive.getmembers() if member.isfile()}
    one_at_a_time = Lock()  # members share one position in the file

    def read(name: str) -> IO[bytes]:
        with one_at_a_time:
            file = archive.extractfile(members[name])
            assert file is not None  # only regular files are in members
            return io.BytesIO(file.read())

    is_uncompressed = type(archive.fileobj) is io.BufferedReader
    return Tree(path, sorted(members), is_uncompressed, read)


def _refuse_unsafe(location: Path, members: Iterable[tuple[str, int, bool]]) -> None:
    """Check the name, the size, and whether it is a link or device, of one member after another."""
    remaining = MAXIMUM_RATIO * location.stat().st_size + RATIO_ALLOWANCE
    for name, size, is_link in members:
        remaining -= size
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if ".." in parts or parts[:1] == ("/",) or (parts and parts[0].endswith(":")):
            reason = "its name points outside the archive"
        elif is_link:
            reason = "it is a link or a device, not a file"
        elif remaining < 0:
            reason = f"it unpacks to over {MAXIMUM_RATIO} times the archive's size"
        else:
            continue
        raise DataError(
            f"{location}: refused because of member {name!r}: {reason}; get the archive from its "
            "official source"
        )
