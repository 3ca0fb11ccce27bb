"""Tiny trees of every published layout, drawn here, and where the real files are."""

import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

# Where the real files may be. VSM_DATA as the user set it: tests point it elsewhere when they run.
REAL_DATA = [
    *map(Path, filter(None, [os.environ.get("VSM_DATA")])),
    Path(__file__).resolve().parents[2] / "shared" / "data",
]


def shared_data(*parts: str) -> Path:
    """Return a path in a folder of real files, or skip the test and say why."""
    for root in REAL_DATA:
        if root.joinpath(*parts).exists():
            return root.joinpath(*parts)
    pytest.skip(f"real data: {'/'.join(parts)} is in none of {', '.join(map(str, REAL_DATA))}")


def color_image(number: int, side: int) -> npt.NDArray[np.uint8]:
    """Return a flat uint8 ``[side, side, 3]`` image whose red value is ``number``."""
    return np.full((side, side, 3), (number % 256, 100, 200), dtype=np.uint8)


def encoded(image: npt.NDArray[np.uint8], kind: str = "PNG") -> bytes:
    """Return an image as the contents of a file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind)
    return buffer.getvalue()


def omniglot_drawing(side: int = 105) -> bytes:
    """Return a black stroke down the left edge of white paper, in one bit, as Omniglot has it."""
    drawing = Image.new("1", (side, side), 1)
    drawing.paste(0, (8, 8, 20, side - 8))
    buffer = io.BytesIO()
    drawing.save(buffer, "PNG")
    return buffer.getvalue()


def write_tree(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` below ``root`` and return it."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` into a zip and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_pickle(path: Path, value: object, protocol: int = 2) -> Path:
    """Pickle ``value`` at ``path`` and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def python2_pickle(value: Any) -> bytes:
    """Return what Python 2 with an old numpy would have written at protocol 2."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    if isinstance(value, str):
        raw = value.encode("latin1")
        return b"T" + len(raw).to_bytes(4, "little") + raw
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(k) + _python2(v) for k, v in value.items()) + b"u"
    assert isinstance(value, np.ndarray)
    order, code = value.dtype.str[:1].encode(), value.dtype.str[1:].encode()
    return b"".join(
        (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01(",
            *map(_python2, value.shape),
            b"tcnumpy\ndtype\nU"
            + bytes([len(code)])
            + code
            + b"K\x00K\x01\x87R(K\x03U\x01"
            + order,
            b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            _python2(value.tobytes().decode("latin1")),
            b"tb",
        )
    )


def leftovers(root: Path) -> list[str]:
    """Return everything below ``root`` but finished datasets and downloads."""
    done = {path.parent for path in root.glob("*/index.json")}
    return [str(p) for p in root.iterdir() if p not in done] if root.exists() else []
