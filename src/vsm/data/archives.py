"""Reading files out of folders, zips and tars in place, without unpacking anything.

Archives are untrusted. A member whose name leaves the archive, a link, or a size that no
honest archive of pictures reaches is refused by name when the archive is opened, before a byte of
it is used.
"""

import io
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Protocol

from vsm.errors import DataError

MAXIMUM_RATIO = 100  # unpacked to packed; pictures and pickled arrays stay below 10
RATIO_ALLOWANCE = 1 << 20  # bytes; tiny archives of blank pictures pack better than any honest one


class Tree(Protocol):
    """Files under one root.

    Attributes:
        location: the folder or archive, for messages.
        names: paths of all files relative to the root, with ``/`` between parts, sorted.
        in_any_order: False if reading a file may mean unpacking everything before it.
    """

    location: Path
    names: list[str]
    in_any_order: bool

    def read(self, name: str) -> bytes:
        """Return the contents of one of ``names``; may be called from several threads."""


def read_file(tree: Tree, name: str) -> bytes:
    """Return the contents of one file of ``tree``, or a :class:`DataError` that names it."""
    try:
        return tree.read(name)
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise DataError(
            f"cannot read {name} in {tree.location}: {error}; fetch or copy it again"
        ) from error


@contextmanager
def open_tree(path: Path) -> Iterator[Tree]:
    """Open a folder, zip or tar as a :class:`Tree`; nothing is unpacked."""
    if path.is_dir():
        yield _Folder(path)
        return
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; check the path given with --from")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield _Zip(path, archive)
            return
        with tarfile.open(path) as tar:
            yield _Tar(path, tar)
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read as a zip or tar archive ({error}); fetch it again"
        ) from error


class _Folder:
    """The files below a folder; links to folders are not followed."""

    in_any_order = True

    def __init__(self, location: Path) -> None:
        self.location = location
        self.names = sorted(
            (Path(folder) / file).relative_to(location).as_posix()
            for folder, _, files in os.walk(location, onerror=_unreadable)
            for file in files
        )

    def read(self, name: str) -> bytes:
        return (self.location / name).read_bytes()


def _unreadable(error: OSError) -> None:
    raise DataError(f"cannot list {error.filename}: {error.strerror}; check its permissions")


class _Zip:
    in_any_order = True

    def __init__(self, location: Path, archive: zipfile.ZipFile) -> None:
        self.location = location
        self._archive = archive
        names = set()
        budget = _Budget(location)
        for member in archive.infolist():
            # The upper half of the external attributes is a Unix mode, when there is one.
            linked = stat.S_ISLNK(member.external_attr >> 16)
            budget.admit(member.filename, member.file_size, linked)
            if not member.is_dir():
                names.add(member.filename)
        self.names = sorted(names)

    def read(self, name: str) -> bytes:
        return self._archive.read(name)


class _Tar:
    def __init__(self, location: Path, archive: tarfile.TarFile) -> None:
        self.location = location
        self.in_any_order = type(archive.fileobj) is io.BufferedReader  # not compressed
        self._archive = archive
        self._one_at_a_time = Lock()  # members share one position in the file
        self._members: dict[str, tarfile.TarInfo] = {}
        budget = _Budget(location)
        for member in archive:
            budget.admit(member.name, member.size, not (member.isfile() or member.isdir()))
            if member.isfile():
                self._members[member.name] = member
        self.names = sorted(self._members)

    def read(self, name: str) -> bytes:
        with self._one_at_a_time:
            file = self._archive.extractfile(self._members[name])
            assert file is not None  # only regular files are in _members
            return file.read()


class _Budget:
    """Refuses unsafe names, links, and more bytes than an honest archive can hold."""

    def __init__(self, location: Path) -> None:
        self._location = location
        self._remaining = MAXIMUM_RATIO * location.stat().st_size + RATIO_ALLOWANCE

    def admit(self, name: str, size: int, linked: bool) -> None:
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if ".." in parts or parts[:1] == ("/",) or (parts and parts[0].endswith(":")):
            self._refuse(name, "its name points outside the archive")
        if linked:
            self._refuse(name, "it is a link or a device, not a file")
        self._remaining -= size
        if self._remaining < 0:
            self._refuse(name, f"it unpacks to over {MAXIMUM_RATIO} times the archive's size")

    def _refuse(self, name: str, reason: str) -> None:
        raise DataError(
            f"{self._location}: refused because of member {name!r}: {reason}; "
            "get the archive from its official source"
        )
