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
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vsm.data.dataset import SPLITS, ImageDataset, Normalization, Split
from vsm.errors import DataError
from vsm.system.files import atomic_directory

FORMAT = 2
VERIFIED_AT_ONCE = 4096  # images
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
    images: Iterable[npt.NDArray[np.uint8]],
    *,
    num_images: int,
    image_shape: tuple[int, int, int],
    class_names: Sequence[str],
    class_sizes: Sequence[int],
    splits: dict[Split, list[int]],
    normalization: Normalization,
    origin: str,
) -> Path:
    """Write a prepared dataset atomically and return its folder.

    Args:
        name: folder name under :func:`data_root`.
        images: batches of uint8 ``[batch, height, width, channels]``, class after class.
        num_images: how many images the batches hold in all.
        image_shape: ``(height, width, channels)``.
        class_names: unique names, in the order of the images.
        class_sizes: images of each class.
        splits: class ids of each split.
        normalization: stored beside the images.
        origin: one line for people: file, seed or address the images came from.
    """
    target = data_root() / name
    _sweep(target)
    try:
        with atomic_directory(target) as folder:
            checksum = _write_images(folder / "images.npy", images, (num_images, *image_shape))
            index = {
                "format": FORMAT,
                "name": name,
                "origin": origin,
                "sha256": checksum,
                "normalization": asdict(normalization),
                "splits": splits,
                "class_names": list(class_names),
                "class_sizes": [int(size) for size in class_sizes],
            }
            (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"cannot write prepared data to {target}: {error.strerror or error}; free some space "
            "or point VSM_DATA at a folder that can be written"
        ) from error
    return target


def _write_images(
    path: Path, batches: Iterable[npt.NDArray[np.uint8]], shape: tuple[int, ...]
) -> str:
    """Write an ``.npy`` file batch by batch and return the checksum of its pixels.

    Ordinary writes, not a memory map: a full disk is then an error that can be reported, where a
    write to a mapped page would end the process.
    """
    checksum = hashlib.sha256()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    filled = 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for batch in batches:
            if batch.dtype != np.uint8 or batch.shape[1:] != shape[1:]:
                raise ValueError(f"expected uint8 images {shape[1:]}, got {batch.shape[1:]}")
            pixels = np.ascontiguousarray(batch).data
            file.write(pixels)
            checksum.update(pixels)
            filled += len(batch)
        file.flush()
        os.fsync(file.fileno())
    if filled != shape[0]:
        raise DataError(f"expected {shape[0]} images, got {filled}")
    return checksum.hexdigest()


def _sweep(target: Path) -> None:
    """Remove what a preparation of ``target`` that was killed, not interrupted, left long ago."""
    for abandoned in target.parent.glob(f".{target.name}.*"):
        if time.time() - abandoned.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(abandoned, ignore_errors=True)


def verify(name: str) -> None:
    """Raise :class:`DataError` unless the pixels of a prepared dataset match their checksum."""
    index = read_index(name)
    images = read(name).images
    checksum = hashlib.sha256()
    for start in range(0, len(images), VERIFIED_AT_ONCE):
        checksum.update(np.ascontiguousarray(images[start : start + VERIFIED_AT_ONCE]).data)
    if checksum.hexdigest() != index["sha256"]:
        raise _damaged(name, data_root() / name, "the checksum does not match")


def prepared_names() -> list[str]:
    """Return the folder names of all prepared datasets."""
    return sorted(path.parent.name for path in data_root().glob("[!.]*/index.json"))


def read_index(name: str) -> dict[str, Any]:
    """Return the parsed index of a prepared dataset, or say how to get one."""
    path = data_root() / name / "index.json"
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"data: {name} is not prepared (looked in {path.parent})") from None
    except (OSError, ValueError) as error:
        raise _damaged(name, path.parent, str(error)) from error
    if (
        index.get("format") == 1
    ):  # other names of the same; preparing anew may mean downloading anew
        constants = index.pop("normalisation")
        index["normalization"] = {"mean": constants["mean"], "std": constants["standard_deviation"]}
        index["format"] = FORMAT
    if index.get("format") != FORMAT:
        raise _damaged(name, path.parent, f"format {index.get('format')!r}, expected {FORMAT}")
    return index


def read(name: str) -> ImageDataset:
    """Open a prepared dataset; its images stay on disk until they are used."""
    index = read_index(name)
    folder = data_root() / name
    try:
        images = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(name, folder, str(error)) from error
    starts = np.concatenate([[0], np.cumsum(index["class_sizes"], dtype=np.int64)])
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != starts[-1]:
        raise _damaged(name, folder, f"images.npy is {images.dtype} {images.shape}")
    return ImageDataset(
        name=name,
        images=images,
        class_names=tuple(index["class_names"]),
        class_starts=starts,
        splits={
            split: np.asarray(index["splits"][split], dtype=np.int64)
            for split in SPLITS
            if split in index["splits"]
        },
        normalization=Normalization(
            mean=tuple(index["normalization"]["mean"]),
            std=tuple(index["normalization"]["std"]),
        ),
        origin=index["origin"],
    )


def _damaged(name: str, folder: Path, reason: str) -> DataError:
    return DataError(
        f"data: the prepared {name} in {folder} is damaged ({reason}); delete that folder and "
        "prepare it again"
    )
