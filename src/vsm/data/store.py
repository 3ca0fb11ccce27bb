"""Prepared datasets on disk: one memory-mapped uint8 array and an index.

A prepared dataset is a folder ``<root>/<name>`` with ``images.npy`` and ``index.json``. It is
written into a temporary folder first and renamed into place: complete or absent. The root is
``$VSM_DATA`` if set, else the platform's cache folder.
"""

import hashlib
import math
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vsm.data.arrays import open_array
from vsm.data.dataset import SPLITS, ImageDataset, Normalization, Pixels
from vsm.data.preparation import Preparation
from vsm.errors import DataError, DocumentError
from vsm.system.documents import read_object, shortened, write_json
from vsm.system.files import atomic_directory
from vsm.system.progress import NULL_PROGRESS, Progress

FORMAT = 2
BLOCK_BYTES, NUM_BLOCKS = 4096, 64  # of the images, that are checked whenever they are opened
ABANDONED_SECONDS = 86_400  # no preparation is still writing after a day


def data_root() -> Path:
    """Return the folder that holds prepared datasets; it may not exist yet."""
    if chosen := os.environ.get("VSM_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vsm"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "vsm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vsm"


def is_prepared(name: str) -> bool:
    """Tell whether ``name`` has been prepared under :func:`data_root`."""
    return (data_root() / name / "index.json").is_file()


def write(
    name: str,
    preparation: Preparation,
    normalization: Normalization,
    progress: Progress = NULL_PROGRESS,
) -> Path:
    """Write a prepared dataset atomically as ``name`` and return its folder."""
    target = data_root() / name
    for abandoned in target.parent.glob(f".{name}.*"):  # by a preparation that was killed
        if time.time() - abandoned.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(abandoned, ignore_errors=True)
    progress.start(f"preparing {name}", sum(preparation.class_sizes.values()))
    try:
        with atomic_directory(target) as folder:
            checksum = _write_images(folder / "images.npy", preparation, progress)
            index = _index(name, preparation, normalization, checksum)
            index["sampled"] = _sampled(folder / "images.npy")
            write_json(folder / "index.json", index)
    except OSError as error:
        raise DataError(
            f"cannot write prepared data to {target}: {error.strerror or error}; free some space "
            "or point VSM_DATA at a folder that can be written"
        ) from error
    return target


def in_memory(name: str, preparation: Preparation, normalization: Normalization) -> ImageDataset:
    """Return what :func:`write` and :func:`read` make of a preparation, without the disk."""
    index = _index(name, preparation, normalization, "")
    return _dataset(name, index, np.concatenate(list(preparation.batches)))


def _index(
    name: str, preparation: Preparation, normalization: Normalization, checksum: str
) -> dict[str, Any]:
    ids = {class_name: class_id for class_id, class_name in enumerate(preparation.class_sizes)}
    lists = preparation.class_lists
    return {
        "format": FORMAT,
        "name": name,
        "origin": preparation.origin,
        "sha256": checksum,
        "normalization": asdict(normalization),
        "splits": {split: [ids[c] for c in lists[split]] for split in SPLITS if lists.get(split)},
        "class_names": list(preparation.class_sizes),
        "class_sizes": list(preparation.class_sizes.values()),
    }


def _write_images(path: Path, preparation: Preparation, progress: Progress) -> str:
    """Write an ``.npy`` file batch by batch and return the checksum of its pixels.

    Ordinary writes, not a memory map: a full disk is then an error that can be reported, where a
    write to a mapped page would end the process.
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


def _sampled(path: Path) -> str:
    """Return a checksum of the header of an array file, of its size, and of blocks all over it."""
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
    """Return the parsed index of a prepared dataset, or say how to get one."""
    path = data_root() / name / "index.json"
    try:
        index = read_object(path)
    except FileNotFoundError:
        raise DataError(f"data: {name} is not prepared (looked in {path.parent})") from None
    except DocumentError as error:
        raise _damaged(name, f"index.json {error.reason}") from error
    except OSError as error:
        raise _damaged(name, error.strerror) from error
    try:
        if index.get("format") == 1:  # other words; preparing anew may mean downloading anew
            old = index.pop("normalisation")
            index["normalization"] = {"mean": old["mean"], "std": old["standard_deviation"]}
            index["format"] = FORMAT
        if index.get("format") != FORMAT:
            raise ValueError(f"format {index.get('format')!r}, expected {FORMAT}")
        _check_index(index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = repr(error) if isinstance(error, KeyError) else error
        raise _damaged(name, f"index.json: {shortened(reason)}") from error
    return index


def _check_index(index: dict[str, Any]) -> None:
    """Raise whatever shows that an index is none."""
    names, sizes = index["class_names"], index["class_sizes"]
    if not all(isinstance(text, str) for text in (*names, index["origin"], index["sha256"])):
        raise TypeError("class_names, origin and sha256 are texts")
    if len(set(names)) != len(names) or len(sizes) != len(names):
        raise ValueError("class_names must differ, and each has one of class_sizes")
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError("class_sizes must be positive numbers")
    chosen = [class_id for split in index["splits"].values() for class_id in split]
    if not all(type(one) is int and 0 <= one < len(names) for one in chosen):
        raise ValueError("splits must be of positions in class_names")
    if len(set(chosen)) != len(chosen) or not index["splits"].keys() <= set(SPLITS):
        raise ValueError("splits must be train, validation and test, without a class in common")
    mean, std = index["normalization"]["mean"], index["normalization"]["std"]
    if len(mean) != len(std) or not all(map(math.isfinite, mean)):
        raise ValueError("normalization needs finite means, and as many standard deviations")
    if not all(0 < one < math.inf for one in std):
        raise ValueError("standard deviations must be above 0")


def read(name: str) -> ImageDataset:
    """Open a prepared dataset; its images stay on disk until they are used."""
    index = read_index(name)
    try:
        path = data_root() / name / "images.npy"
        images = open_array(path)
        sampled = _sampled(path) if "sampled" in index else None
    except (OSError, ValueError) as error:
        raise _damaged(name, f"images.npy: {error}") from error
    fits = images.dtype == np.uint8 and images.ndim == 4 and images.flags.c_contiguous
    if not fits or len(images) != sum(index["class_sizes"]):
        raise _damaged(name, f"images.npy is {images.dtype} {images.shape}")
    if images.shape[3] != len(index["normalization"]["mean"]):
        raise _damaged(name, f"images.npy has {images.shape[3]} channels")
    if sampled != index.get("sampled"):
        raise _damaged(name, "images.npy was changed")
    return _dataset(name, index, images)


def _dataset(name: str, index: dict[str, Any], images: Pixels) -> ImageDataset:
    splits, normalization = index["splits"], index["normalization"]
    return ImageDataset(
        name=name,
        images=images,
        class_names=tuple(index["class_names"]),
        class_starts=np.cumsum([0, *index["class_sizes"]], dtype=np.int64),
        splits={split: np.asarray(splits[split], np.int64) for split in SPLITS if split in splits},
        normalization=Normalization(tuple(normalization["mean"]), tuple(normalization["std"])),
        origin=index["origin"],
    )


def _damaged(name: str, reason: object) -> DataError:
    return DataError(
        f"data: the prepared {name} in {data_root() / name} is damaged ({reason}); delete that "
        "folder and prepare it again"
    )
