"""Reading untrusted pickles: arrays, strings, numbers and containers only.

A pickle is a program that may call anything importable. Here every name it asks for is looked up
in one short table instead of being imported; whatever is not in the table is refused by name. Even
numpy's own reconstruction functions are replaced by stand-ins that accept plain element types only,
because numpy trusts the type descriptions in a pickle. Python 2 and 3 pickles of any protocol and
numpy's old and new module paths are understood.
"""

import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from vsm.errors import DataError

PLAIN_TYPE = re.compile(r"[biufcSUO]\d+")  # booleans, numbers, strings, references to what was read

# What the interpreter's unpickler raises when a stream is cut off or makes no sense.
MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    MemoryError,
    RecursionError,
    struct.error,
)


def load(file: IO[bytes], name: str) -> Any:
    """Read one pickle from ``file``; ``name`` is for messages.

    Text of Python 2 pickles arrives as bytes; see :func:`text` and :func:`text_keys`.

    Raises:
        DataError: if the pickle asks for anything but plain data, or is damaged.
    """
    try:
        return _built(_PlainUnpickler(file, name).load())
    except MALFORMED as error:
        raise DataError(f"{name}: damaged pickle ({error}); fetch or copy it again") from error


def load_path(path: Path) -> Any:
    """Read the pickle at ``path``."""
    try:
        with path.open("rb") as file:
            return load(file, str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the path") from error


def text(value: object) -> str:
    """Return a string of a pickle as text, whichever Python wrote it."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def text_keys(value: object, name: str) -> dict[str, Any]:
    """Return ``value`` as a dictionary with text keys, or say that ``name`` does not hold one."""
    if not isinstance(value, Mapping):
        raise DataError(f"{name}: expected a dictionary, got {type(value).__name__}")
    return {text(key): item for key, item in value.items()}


class _PlainUnpickler(pickle._Unpickler):
    """The standard unpickler in Python, which damaged input cannot crash as it can the one in C."""

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


class _Array:
    """Stands for an array while a pickle is read; keeps the state that numpy would be given.

    numpy's own ``__setstate__`` believes what it is told and can be made to crash.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def build(self) -> npt.NDArray[Any]:
        _, shape, described, is_fortran, data = self.state
        dtype = _element_type(described)
        order: Literal["F", "C"] = "F" if is_fortran else "C"
        if dtype.kind != "O":
            return np.frombuffer(data, dtype).reshape(shape, order=order)
        values = np.empty(len(data), dtype)
        for position, value in enumerate(data):
            values[position] = _built(value)
        return values.reshape(shape, order=order)


def _built(value: Any) -> Any:
    """Return ``value`` with the arrays in it built, however deep in containers."""
    if isinstance(value, _Array):
        return value.build()
    if isinstance(value, dict):
        return {key: _built(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_built(item) for item in value)
    return value


class _ElementType:
    """Stands for ``numpy.dtype(code)``; of the pickled state only the byte order is used."""

    __slots__ = ("code", "order")

    def __init__(self, code: str | bytes) -> None:
        self.code = text(code)
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = text(state[1])


def _element_type(described: object) -> np.dtype[Any]:
    if not isinstance(described, _ElementType) or not PLAIN_TYPE.fullmatch(described.code):
        raise pickle.UnpicklingError(f"unsupported element type {described!r}")
    return np.dtype(described.code).newbyteorder(described.order)  # type: ignore[arg-type]  # numpy checks


# The stand-ins below are instances without attributes, so that a pickle cannot change them either.


class _MakeElementType:
    __slots__ = ()

    def __call__(self, code: str | bytes, *_: object) -> _ElementType:
        return _ElementType(code)


class _ArrayMarker:
    """Stands for ``numpy.ndarray``, which pickles only pass on to ``_reconstruct``."""

    __slots__ = ()


class _MakeArray:
    __slots__ = ()

    def __call__(self, kind: object, *_: object) -> _Array:
        if not isinstance(kind, _ArrayMarker):
            raise pickle.UnpicklingError(f"unsupported array type {kind!r}")
        return _Array()


class _FromBuffer:
    __slots__ = ()

    def __call__(
        self, data: bytes, dtype: object, shape: tuple[int, ...], order: str
    ) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = np.frombuffer(data, _element_type(dtype))
        return values.reshape(shape, order="F" if text(order) == "F" else "C")


class _Scalar:
    __slots__ = ()

    def __call__(self, dtype: object, data: bytes) -> Any:
        return np.frombuffer(data, _element_type(dtype))[0]


class _Latin1:
    """Stands for ``_codecs.encode``, by which old protocols spell bytes."""

    __slots__ = ()

    def __call__(self, value: str | bytes, _: object) -> bytes:
        return value if isinstance(value, bytes) else value.encode("latin1")


class _EmptyBytes:
    """Stands for ``bytes``, which old protocols call for empty ones; sizes are not accepted."""

    __slots__ = ()

    def __call__(self) -> bytes:
        return b""


ADMITTED: Mapping[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ArrayMarker(),
    ("numpy", "dtype"): _MakeElementType(),
    ("numpy.core.multiarray", "_reconstruct"): _MakeArray(),
    ("numpy.core.multiarray", "scalar"): _Scalar(),
    ("numpy.core.numeric", "_frombuffer"): _FromBuffer(),
    ("_codecs", "encode"): _Latin1(),
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): kind
        for module in ("builtins", "__builtin__")
        for name, kind in {
            "bytes": _EmptyBytes(),
            "complex": complex,
            "frozenset": frozenset,
            "set": set,
        }.items()
    },
}
