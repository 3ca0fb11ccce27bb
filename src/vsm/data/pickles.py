"""Reading untrusted pickles: arrays, strings, numbers and containers only.

A pickle is a program that may call anything importable. Here every name it asks for is looked up
in one short table instead of being imported, and any other is refused. Even numpy's own
reconstruction functions are replaced by stand-ins that accept plain element types only, because
numpy trusts the type descriptions in a pickle. Python 2 and 3 pickles of any protocol and numpy's
old and new module paths are understood.
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, ClassVar

import numpy as np

from vsm.errors import DataError

PLAIN_TYPE = re.compile(r"[biufcSU]\d+")  # booleans, numbers and strings


def load(file: IO[bytes], name: str) -> Any:
    """Read one pickle from ``file``; ``name`` is for messages.

    Strings of Python 2 pickles are bytes, see :func:`text`, except for the keys of dictionaries.
    """
    try:
        return _built(_PlainUnpickler(file, name).load())
    except DataError:
        raise
    except Exception as error:  # the unpickler raises almost anything for a damaged stream
        raise DataError(f"{name}: damaged pickle ({error}); fetch or copy it again") from error


@contextmanager
def expecting(what: str, name: str) -> Iterator[None]:
    """Say that the pickle ``name`` is not ``what`` if the block fails to use it as that."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        reason = error if type(error) is ValueError else repr(error)
        raise DataError(f"{name}: not {what} ({reason}); fetch or copy it again") from error


def text(value: object) -> str:
    """Return a string of a pickle as text, whichever Python wrote it."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


class _ElementType:
    """Stands for ``numpy.dtype(code)``; of the pickled state only the byte order is used."""

    state: tuple[Any, ...] = (3, "=")

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = text(code)


class _Array:
    """Stands for an array while a pickle is read; keeps the state that numpy would be given.

    numpy's own ``__setstate__`` trusts its input and can be made to crash.
    """

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
    ("__builtin__", "bytes"): lambda: b"",  # as old protocols make empty ones
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
