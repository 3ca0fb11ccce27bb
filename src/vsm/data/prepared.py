"""Prepared datasets on disk: one memory-mapped uint8 array and an index.

A prepared dataset is a folder ``<root>/<name>`` with ``images.npy`` and ``index.json``. It is
written into a temporary folder first and renamed into place: complete or absent. The root is
``$VSM_DATA`` if set, else the platform's cache folder.
"""

import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from vsm.data.dataset import (
    SPLITS,
    ClassLists,
    ImageDataset,
    PixelNormalization,
    Pixels,
    class_index,
)
from vsm.errors import DataError
from vsm.system.files import atomic_directory, read_object, shortened, user_folder, write_json
from vsm.system.progress import NULL_PROGRESS, Progress

FORMAT = 3
BLOCK_BYTES, NUM_BLOCKS = 4096, 64  # of the images, that are checked whenever they are opened
ABANDONED_SECONDS = 86_400  # no preparation is still writing after a day


class Preparation(NamedTuple):
    """A dataset about to be written; its pixels are read as ``batches`` is consumed."""

    image_shape: tuple[int, int, int]  # (height, width, channels)
    class_lists: ClassLists  # of each split; no class is in two
    class_sizes: Mapping[str, int]  # images of each class, at least 1, in the order of the images
    batches: Iterable[Pixels]  # uint8 [batch, height, width, channels], class after class
    origin: str  # where it is from, in one line


def data_root() -> Path:
    """Return the folder that holds prepared datasets; it may not exist yet."""
    return user_folder("cache")


def is_prepared(name: str) -> bool:
    """Whether ``name`` has been prepared under :func:`data_root`."""
    return (data_root() / name / "index.json").is_file()


def write(
    name: str,
    preparation: Preparation,
    normalization: PixelNormalization,
    progress: Progress = NULL_PROGRESS,
) -> Path:
    """Write a prepared dataset atomically as ``name`` and return its folder."""
    target, lists = data_root() / name, preparation.class_lists
    for abandoned in target.parent.glob(f".{name}.*"):  # by a preparation that was killed
        if time.time() - abandoned.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(abandoned, ignore_errors=True)
    progress.start(f"preparing {name}", sum(preparation.class_sizes.values()))
    try:
        with atomic_directory(target) as folder:
            images = folder / "images.npy"
            checksum = _write_images(images, preparation, progress)
            index = {
                "format": FORMAT,
                "origin": preparation.origin,
                "sha256": checksum,
                "sampled": _sampled_checksum(images),
                "normalization": asdict(normalization),
                "splits": {split: names for split, names in lists.items() if names},
                "class_sizes": dict(preparation.class_sizes),
            }
            write_json(folder / "index.json", index)
    except OSError as error:
        raise unwritable(target, error) from error
    return target


def unwritable(target: Path, error: OSError) -> DataError:
    """Return the error to raise if something cannot be stored under :func:`data_root`."""
    return DataError(
        f"data: cannot write {target}: {error.strerror or error}; free some space or point "
        "VSM_DATA at a folder that can be written"
    )


def _write_images(path: Path, preparation: Preparation, progress: Progress) -> str:
    """Write an ``.npy`` file batch by batch and return the checksum of its pixels.

    On a full disk these writes raise an error; a write to a mapped page would end the process.
    """
    checksum = hashlib.sha256()
    shape = preparation.image_shape
    expected, written = sum(preparation.class_sizes.values()), 0
    header = {"descr": "|u1", "fortran_order": False, "shape": (expected, *shape)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for batch in preparation.batches:
            if batch.dtype != np.uint8 or batch.shape[1:] != shape:
                raise ValueError(f"expected uint8 images {shape}, got {batch.shape[1:]}")
            pixels = np.ascontiguousarray(batch).data
            file.write(pixels)
            checksum.update(pixels)
            written += len(batch)
            progress.advance(len(batch))
        file.flush()
        os.fsync(file.fileno())
    if written != expected:
        raise DataError(f"expected {expected} images, got {written}")
    return checksum.hexdigest()


def _sampled_checksum(path: Path) -> str:
    """Return a checksum of the size of a file and of blocks all over it, the first included."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        checksum = hashlib.sha256(str(size).encode())
        for place in np.linspace(0, max(0, size - BLOCK_BYTES), NUM_BLOCKS, dtype=np.int64):
            file.seek(int(place))
            checksum.update(file.read(BLOCK_BYTES))
    return checksum.hexdigest()


def verify(name: str) -> None:
    """Raise :class:`DataError` unless the pixels of a prepared dataset match their checksum."""
    size = read(name).images.nbytes
    with (data_root() / name / "images.npy").open("rb") as file:
        file.seek(-size, os.SEEK_END)
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != read_index(name)["sha256"]:
        raise _damaged(name, "the checksum does not match")


def read_index(name: str) -> dict[str, Any]:
    """Return the index of a prepared dataset, after checking it."""
    path = data_root() / name / "index.json"
    try:
        index = read_object(path)
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r}, expected {FORMAT}")
        _check_index(index)
    except FileNotFoundError:
        raise DataError(f"data: {name} is not prepared (looked in {path.parent})") from None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(name, f"index.json: {shortened(repr(error))}") from error
    return index


def _check_index(index: dict[str, Any]) -> None:
    sizes, splits = index["class_sizes"], index["splits"]
    names = [name for split in splits.values() for name in split]
    mean, std = index["normalization"]["mean"], index["normalization"]["std"]
    if not (
        all(isinstance(index[key], str) for key in ("origin", "sha256", "sampled"))
        and all(type(size) is int and size > 0 for size in sizes.values())
        and splits.keys() <= set(SPLITS)
        and len(set(names)) == len(names)
        and set(names) <= sizes.keys()
        and len(mean) == len(std)
        and all(map(math.isfinite, mean))
        and all(0 < one < math.inf for one in std)
    ):
        raise ValueError("invalid classes, splits or normalization")


def read(name: str) -> ImageDataset:
    """Open a prepared dataset; its images stay on disk until they are used."""
    index = read_index(name)
    path = data_root() / name / "images.npy"
    normalization = PixelNormalization(**{k: tuple(v) for k, v in index["normalization"].items()})
    try:
        images = open_array(path)
        sampled = _sampled_checksum(path)
    except (OSError, ValueError) as error:
        raise _damaged(name, f"images.npy: {error}") from error
    expected = (sum(index["class_sizes"].values()), len(normalization.mean))
    is_plain = images.dtype == np.uint8 and images.ndim == 4 and images.flags.c_contiguous
    if not is_plain or images.shape[::3] != expected:
        raise _damaged(name, f"images.npy is {images.dtype} {images.shape}")
    if sampled != index["sampled"]:
        raise _damaged(name, "images.npy was changed")
    return ImageDataset(
        name=name,
        images=images,
        normalization=normalization,
        origin=index["origin"],
        **class_index(index["class_sizes"], index["splits"]),
    )


def open_array(path: Path) -> npt.NDArray[Any]:
    """Map an ``.npy`` file of numbers or strings; else raise a ``ValueError`` or ``OSError``."""
    if path.exists() and not path.is_file():  # opening a pipe would wait
        raise ValueError("is not a regular file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("is an archive of arrays")
    except OSError:
        raise
    except Exception as error:  # numpy raises almost anything for damaged headers
        raise ValueError(shortened(error) or type(error).__name__) from error
    return cast(npt.NDArray[Any], array)


def _damaged(name: str, reason: object) -> DataError:
    return DataError(
        f"data: the prepared {name} in {data_root() / name} is damaged ({reason}); delete that "
        "folder and prepare it again"
    )
