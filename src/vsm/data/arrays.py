"""Opening ``.npy`` files whose headers may say anything."""

import struct
import tokenize
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from vsm.system.documents import shortened

WRONG = (
    *(ValueError, TypeError, SyntaxError, OverflowError, EOFError, LookupError, AttributeError),
    *(MemoryError, RecursionError, struct.error, tokenize.TokenError),
)
"""What numpy raises for headers that were changed."""


def open_array(path: Path) -> npt.NDArray[Any]:
    """Map an array of numbers or strings; nothing is read until it is used.

    Raises:
        ValueError: in one line, if it holds none.
        OSError: if it is missing, or cannot be opened.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait
        raise ValueError("is no regular file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("is an archive of arrays")
    except WRONG as error:
        raise ValueError(shortened(error) or type(error).__name__) from error
    return cast(npt.NDArray[Any], array)
