"""Prepared datasets on disk: one memory-mapped uint8 array and an index.

A prepared dataset is a folder ``<root>/<name>`` with ``images.npy`` and ``index.json``. It is
written into a temporary folder first and renamed into place: complete or absent. The root is
``$VSM_DATA`` if set, else the platform's cache folder.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vsm.data.dataset import SPLITS, ImageDataset, Normalization, Pixels
from vsm.data.preparation import Preparation
from vsm.errors import DataError
from vsm.system.files import atomic_directory
from vsm.system.progress import NULL_PROGRESS, Progress

FORMAT = 2
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
            (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
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
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"data: {name} is not prepared (looked in {path.parent})") from None
    except (OSError, ValueError) as error:
        raise _damaged(name, error) from error
    if index.get("format") == 1:  # other words; preparing anew may mean downloading anew
        constants = index.pop("normalisation")
        index["normalization"] = {"mean": constants["mean"], "std": constants["standard_deviation"]}
        index["format"] = FORMAT
    if index.get("format") != FORMAT:
        raise _damaged(name, f"format {index.get('format')!r}, expected {FORMAT}")
    return index


def read(name: str) -> ImageDataset:
    """Open a prepared dataset; its images stay on disk until they are used."""
    index = read_index(name)
    try:
        images = np.load(data_root() / name / "images.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(name, error) from error
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != sum(index["class_sizes"]):
        raise _damaged(name, f"images.npy is {images.dtype} {images.shape}")
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
