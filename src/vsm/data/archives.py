"""Reading the files of published datasets: folders, zips, tars, and the pickles in them.

All of them are untrusted. Only regular members of archives are read, in place, and archives that
would unpack to far more than images do are refused.

A pickle is a program that may call anything importable. Here every name it asks for is looked up in
one short table instead of being imported, and any other is refused. numpy trusts the type
descriptions in a pickle, so stand-ins that accept plain element types replace its reconstruction
functions. Pickles of Python 2 and 3, of any protocol and of any version of numpy are understood.
"""

import io
import os
import pickle
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

import numpy as np

from vsm.errors import DataError

MAX_RATIO = 100  # unpacked to packed; images and pickled arrays stay below 10
RATIO_ALLOWANCE = 1 << 20  # bytes; small archives of blank images compress better than that
UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error)
PLAIN_TYPE = re.compile(r"[biufcSU]\d+")  # booleans, numbers and strings


@dataclass(frozen=True)
class Tree:
    """Files under one root."""

    location: Path  # the folder or archive, for messages
    names: list[str]  # paths of all files relative to the root, with / between parts
    open: Callable[[str], IO[bytes]]  # one of the names; called from several threads unless a tar
    is_tar: bool = False  # members can only be read one at a time, a compressed tar's in order

    @property
    def file_names(self) -> set[str]:
        """Names of all files without their folders."""
        return {PurePosixPath(name).name for name in self.names}

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

    @contextmanager
    def pickled(self, name: str, what: str) -> Iterator[Any]:
        """Load the pickle of that name in any folder; report errors of its use as not ``what``."""
        found = [path for path in self.names if PurePosixPath(path).name == name]
        if not found:
            raise DataError(f"{self.location}: {name} is missing; fetch or copy it again")
        place = f"{self.location}/{found[0]}"
        with self.opened(found[0]) as file:
            value = load_pickle(file, place)
        try:
            yield value
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            reason = error if type(error) is ValueError else repr(error)
            raise DataError(f"{place}: not {what} ({reason}); fetch or copy it again") from error


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

            def open_member(name: str) -> IO[bytes]:
                return tar.extractfile(members[name]) or io.BytesIO()

            yield Tree(path, sorted(members), open_member, is_tar=True)
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


def load_pickle(file: IO[bytes], name: str) -> Any:
    """Read one pickle; strings of Python 2 are bytes, except for the keys of dictionaries."""
    try:
        return _built(_PlainUnpickler(file, name).load())
    except DataError:
        raise
    except Exception as error:  # the unpickler raises almost anything for a damaged stream
        raise DataError(f"{name}: damaged pickle ({error}); fetch or copy it again") from error


def text(value: object) -> str:
    """Return a string of a pickle as text, whichever Python wrote it."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


class _ElementType:
    """Stands for ``numpy.dtype(code)``; of the pickled state only the byte order is used."""

    state: tuple[Any, ...] = (3, "=")

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = text(code)


class _Array:
    """Stands for an array; numpy's own ``__setstate__`` can be made to crash by its input."""

    state: tuple[Any, ...] = ()


NDARRAY = object()  # stands for numpy.ndarray, which pickles only pass on to _reconstruct


def _reconstruct(kind: object, *_: object) -> _Array:
    if kind is not NDARRAY:
        raise pickle.UnpicklingError(f"unsupported array type {kind!r}")
    return _Array()


def _from_buffer(data: Any, element: object, shape: Any, order: str | bytes) -> Any:
    if not isinstance(element, _ElementType) or not PLAIN_TYPE.fullmatch(element.code):
        raise pickle.UnpicklingError(f"unsupported element type {element!r}")
    byte_order: Any = text(element.state[1])
    values = np.frombuffer(data, np.dtype(element.code).newbyteorder(byte_order))
    return values.reshape(shape, order="F" if text(order) == "F" else "C")


def _built(value: Any) -> Any:
    """Return ``value`` with the arrays in it built and keys as text, however deep."""
    if isinstance(value, _Array):
        _, shape, element, is_fortran, data = value.state
        return _from_buffer(data, element, shape, "F" if is_fortran else "C")
    if isinstance(value, dict):
        texts = {key: text(key) if isinstance(key, bytes) else key for key in value}
        return {texts[key]: _built(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_built(item) for item in value)
    return value


def _latin1(value: str | bytes, _: object) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin1")  # as old protocols do


ADMITTED: Mapping[tuple[str, str], Any] = {
    ("numpy", "ndarray"): NDARRAY,
    ("numpy", "dtype"): _ElementType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.multiarray", "scalar"): lambda dtype, data: _from_buffer(data, dtype, (), "C")[()],
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _latin1,
    ("__builtin__", "bytes"): lambda: b"",  # old protocols make empty ones so
}


class _PlainUnpickler(pickle._Unpickler):
    """The unpickler written in Python: unlike the one in C, damaged input cannot crash it."""

    stack: list[Any]

    def __init__(self, file: IO[bytes], name: str) -> None:
        super().__init__(file, encoding="bytes")
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ADMITTED[module.replace("numpy._core", "numpy.core"), name]
        except KeyError:
            raise DataError(
                f"{self._name}: refused, the pickle asks for {module}.{name}; only arrays, "
                "strings, numbers and containers are read, and nothing was run"
            ) from None

    def _set_state(self) -> None:
        """Handle BUILD for placeholders only: nothing in the table can be changed."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _ElementType):
            raise pickle.UnpicklingError("a state for something other than an array")
        self.stack[-1].state = state

    dispatch: ClassVar[dict[int, Any]] = pickle._Unpickler.dispatch | {pickle.BUILD[0]: _set_state}
