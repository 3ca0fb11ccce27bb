"""Reading files in folders, zips and tars in place; nothing is ever unpacked.

Archives are untrusted: only regular members are read, and an archive that would unpack to far more
than archives of images do is refused when it is opened.
"""

import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from vsm.data import pickles
from vsm.data.images import is_image_name
from vsm.errors import DataError

MAX_RATIO = 100  # unpacked to packed; images and pickled arrays stay below 10
RATIO_ALLOWANCE = 1 << 20  # bytes; small archives of blank images compress better than that
UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error)


@dataclass(frozen=True)
class Tree:
    """Files under one root."""

    location: Path  # the folder or archive, for messages
    names: list[str]  # paths of all files relative to the root, with / between parts
    open: Callable[[str], IO[bytes]]  # one of the names; called from several threads unless a tar
    is_tar: bool = False  # members can only be read one at a time, a compressed tar's in order

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open one file; errors name it."""
        try:
            with self.open(name) as file:
                yield file
        except UNREADABLE as error:
            place = f"{name} in {self.location}"
            raise DataError(f"cannot read {place}: {error}; fetch or copy it again") from error

    def read(self, name: str) -> bytes:
        """Return the contents of one file."""
        with self.opened(name) as file:
            return file.read()

    def load_pickle(self, name: str) -> Any:
        """Load the pickle of that name in any folder; see :mod:`vsm.data.pickles`."""
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
    """Open a folder, zip or tar as a :class:`Tree`."""
    if path.is_dir():
        yield Tree(path, _files_below(path), lambda name: (path / name).open("rb"))
        return
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; check the path given with --from")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _refuse_bomb(path, ((m.filename, m.file_size) for m in archive.infolist()))
                names = {member.filename for member in archive.infolist() if not member.is_dir()}
                yield Tree(path, sorted(names), archive.open)
            return
        with tarfile.open(path) as tar:
            _refuse_bomb(path, ((m.name, m.size) for m in tar))
            members = {member.name: member for member in tar.getmembers() if member.isfile()}
            yield Tree(
                path,
                sorted(members),
                lambda name: tar.extractfile(members[name]) or io.BytesIO(),
                True,
            )
    except UNREADABLE as error:
        problem = f"cannot be read as a zip or tar ({error})"
        raise DataError(f"{path}: {problem}; fetch it again") from error


def _files_below(path: Path) -> list[str]:
    """List the files below a folder; links to folders are not followed."""
    names, pending = [], [""]
    while pending:  # os.walk of Python 3.11 would recurse
        below = pending.pop()
        try:
            with os.scandir(path / below) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(f"{below}{entry.name}/")
                    elif Path(entry).is_file():  # no pipe, which never ends
                        names.append(below + entry.name)
        except OSError as error:
            where = error.filename
            raise DataError(f"cannot list {where}: {error.strerror}; check permissions") from error
    return sorted(names)


def _refuse_bomb(location: Path, members: Iterator[tuple[str, int]]) -> None:
    """Add up the sizes that the headers of members give; readers never go beyond these."""
    remaining = MAX_RATIO * location.stat().st_size + RATIO_ALLOWANCE
    for name, size in members:
        remaining -= size
        if remaining < 0:
            raise DataError(
                f"{location}: refused because of {name!r}: it unpacks to over {MAX_RATIO} times "
                "the archive's size; get the archive from its official source"
            )
