"""Datasets by name: listing, preparing, opening and describing them.

``folder:PATH`` and ``glyphs`` are prepared when first opened; those of
:data:`vsm.data.published.CATALOG` once, from files that the user has or from a public download.
``features:PATH`` is read as it is.
"""

import hashlib
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import asdict, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from vsm.data import features, folder, glyphs, prepared
from vsm.data.dataset import (
    NO_AUGMENTATION,
    SPLITS,
    Dataset,
    FeatureDataset,
    ImageDataset,
    PixelNormalization,
    natural,
)
from vsm.data.published import CATALOG, PublicFile, PublishedDataset
from vsm.errors import DataError
from vsm.system.files import atomic_path
from vsm.system.progress import NULL_PROGRESS, Progress

FOLDER_PREFIX = "folder:"
STORED_FOLDER_PREFIX = "folder-"
FEATURES_PREFIX = "features:"
GRAY = PixelNormalization(mean=(0.5,), std=(0.5,))
IMAGENET = PixelNormalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
BLOCK = 1 << 18  # bytes of a download that are read at once
MAX_BYTES = 256 << 20  # of a download; no server fills a disk
TRIES, WAIT_SECONDS, TIMEOUT_SECONDS = 6, 1.0, 30.0
TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
DROPPED = (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
ALTERNATIVE = "get it by other means and pass it with --from"


def open_dataset(spec: str) -> Dataset:
    """Open images by the names of ``open_images``, or stored features by ``features:PATH``."""
    if spec.startswith(FEATURES_PREFIX):
        return features.read(_path(spec, FEATURES_PREFIX))
    return open_images(spec)


def open_images(spec: str) -> ImageDataset:
    """Open ``glyphs``, a name of the catalog, or ``folder:PATH``.

    A folder that was prepared can also be opened by the name that :func:`list_datasets` gives it,
    as it was then. An error about what is not prepared says what to run.
    """
    if spec.startswith(FEATURES_PREFIX):
        raise DataError(f"data: images are needed here, but {spec} holds features of an encoder")
    if spec == "glyphs":
        return glyphs.open_glyphs()
    if spec.startswith(FOLDER_PREFIX):
        path = _path(spec, FOLDER_PREFIX)
        return _open_folder(_prepare_folder(path, NULL_PROGRESS), f"folder:{path.resolve().name}")
    if spec.startswith(STORED_FOLDER_PREFIX) and prepared.is_prepared(spec):
        return _open_folder(spec, spec)
    entry = _entry(spec)
    if not prepared.is_prepared(spec):
        options = "--from PATH | --download" if entry.downloads else "--from PATH"
        raise DataError(
            f"data: {spec} is not prepared in {prepared.data_root()}; run "
            f"`vsm data prepare {spec} {options}`, where PATH is {entry.needs}"
        )
    return replace(prepared.read(spec), augmentation=entry.augmentation)


def prepare(
    name: str,
    source: Path | None = None,
    *,
    download: bool = False,
    allow_missing: bool = False,
    progress: Progress = NULL_PROGRESS,
) -> Path:
    """Prepare a dataset and return its folder; one that is prepared already is left as it is.

    ``name`` is one of the catalog, ``glyphs``, ``folder`` (with ``source``) or ``folder:PATH``.
    ``download`` fetches public files in place of ``source``. With ``allow_missing`` images may be
    missing from what was published; the origin then says so.
    """
    if name == "folder":
        if source is None:
            raise DataError("data: prepare folder needs --from PATH, a folder of class folders")
        name = f"{FOLDER_PREFIX}{source}"
    if name.startswith(FOLDER_PREFIX):
        return prepared.data_root() / _prepare_folder(_path(name, FOLDER_PREFIX), progress)
    if name.startswith(FEATURES_PREFIX):
        raise DataError(f"data: {name} needs no preparation; use it with --data {name}")
    if name == "glyphs":
        return _location(glyphs.open_glyphs())
    entry = _entry(name)
    if prepared.is_prepared(name):
        prepared.read(name)  # an error if it is damaged
        return prepared.data_root() / name
    if source is not None and download:
        raise DataError("data: --from and --download exclude each other; give one of them")
    if source is None:
        source = _download(name, entry, download, progress)
    elif not source.expanduser().exists():
        raise DataError(f"data: {source} does not exist; check the path given with --from")
    with entry.read(source.expanduser(), allow_missing) as preparation:
        return prepared.write(name, preparation, entry.normalization, progress)


def describe(spec: str) -> dict[str, Any]:
    """Return what there is to know about a prepared dataset, ready for JSON."""
    dataset = open_dataset(spec)
    sizes = dataset.class_sizes
    found: dict[str, Any] = {
        "name": dataset.name,
        "classes": len(dataset.class_names),
        "class_sizes": {"smallest": int(sizes.min()), "largest": int(sizes.max())},
        "splits": {split: len(dataset.splits.get(split, ())) for split in SPLITS},  # classes
        "origin": dataset.origin,
    }
    if isinstance(dataset, FeatureDataset):
        num_rows, num_features = dataset.features.shape
        size = dataset.features.nbytes
        return found | {"rows": num_rows, "num_features": num_features, "bytes": size}
    assert isinstance(dataset, ImageDataset)
    location = _location(dataset)
    return found | {
        "images": len(dataset.images),
        "image_shape": list(dataset.image_shape),
        "normalization": asdict(dataset.normalization),
        "augmentation": asdict(dataset.augmentation),
        "bytes": dataset.images.nbytes,
        "sha256": prepared.read_index(location.name)["sha256"],
        "location": str(location),
    }


def list_datasets() -> list[dict[str, Any]]:
    """Return one row for every known dataset and every prepared folder, ready for JSON."""
    rows = [_row("glyphs", "glyphs-v*", "built-in procedural characters", "nothing")]
    for name, entry in CATALOG.items():
        rows.append(_row(name, name, entry.title, entry.needs, bool(entry.downloads)))
    for index in sorted(prepared.data_root().glob(f"{STORED_FOLDER_PREFIX}*/index.json")):
        name = index.parent.name
        try:
            title = str(prepared.read_index(name)["origin"])
        except DataError as error:
            title = str(error)
        rows.append(_row(name, name, title, "a folder of class folders"))
    return rows


def _row(name: str, stored: str, title: str, needs: str, download: bool = False) -> dict[str, Any]:
    found = sorted(path.parent for path in prepared.data_root().glob(f"{stored}/index.json"))
    return {
        "name": name,
        "title": title,
        "prepared": bool(found),
        "location": str(found[-1]) if found else None,
        "bytes": sum(file.stat().st_size for file in found[-1].iterdir()) if found else None,
        "needs": needs,  # what --from expects
        "download": download,
    }


def _entry(name: str) -> PublishedDataset:
    try:
        return CATALOG[name]
    except KeyError:
        known = ", ".join(("glyphs", *CATALOG, "folder:PATH", "features:PATH"))
        raise DataError(f"data: unknown dataset {name!r}; known: {known}") from None


def _download(name: str, entry: PublishedDataset, wanted: bool, progress: Progress) -> Path:
    """Fetch the public files of ``entry`` and return the folder or file to read."""
    if not wanted:
        options = ", or --download" if entry.downloads else ""
        raise DataError(f"data: prepare {name} needs --from PATH, {entry.needs}{options}")
    if not entry.downloads:
        raise DataError(
            f"data: {name} has no public download; get it from its authors and pass --from PATH, "
            f"{entry.needs}"
        )
    downloads = prepared.data_root() / "downloads"
    files = [fetch(file, downloads, progress) for file in entry.downloads]
    return files[0]  # readers find a second part beside the first


def _path(spec: str, prefix: str) -> Path:
    path = spec.removeprefix(prefix)
    if not path:
        raise DataError(f"data: {prefix} needs a path, as in {prefix}PATH")
    return Path(path).expanduser()


def _prepare_folder(path: Path, progress: Progress) -> str:
    """Prepare the folder at ``path`` as it is now, and return the name it is stored under."""
    key = folder.key(path)
    if not prepared.is_prepared(key):
        preparation = folder.read(path)
        is_gray = preparation.image_shape[-1] == 1
        prepared.write(key, preparation, GRAY if is_gray else IMAGENET, progress)
    return key


def _open_folder(key: str, name: str) -> ImageDataset:
    dataset = prepared.read(key)
    channels, side, _ = dataset.image_shape
    augmentation = NO_AUGMENTATION if channels == 1 else natural(crop_padding=side // 10)
    return replace(dataset, name=name, augmentation=augmentation)


def _location(dataset: ImageDataset) -> Path:
    """Return the folder that a prepared dataset is mapped from."""
    assert isinstance(dataset.images, np.memmap)
    return Path(str(dataset.images.filename)).parent


def fetch(file: PublicFile, folder: Path, progress: Progress) -> Path:
    """Download ``file`` into ``folder``, unless it is there already, and return its path.

    Only a file with the right checksum gets its name. The wait doubles with each attempt.
    """
    target = folder / file.name
    reason = ""
    if target.is_file() and _md5(target) == file.md5:
        return target
    for attempt in range(TRIES):
        if attempt:
            time.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
        try:
            with atomic_path(target) as temporary:
                _receive(file, temporary, progress)
            return target
        except urllib.error.HTTPError as error:
            reason = f"the server answered {error.code} {error.reason}"
            if error.code not in TRANSIENT_STATUS:
                raise DataError(f"download: {file.url}: {reason}; {ALTERNATIVE}") from error
        except DROPPED as error:
            reason = f"connection lost: {' '.join(map(str, error.args))}"
        except OSError as error:
            raise prepared.unwritable(target, error) from error
    raise DataError(
        f"download: {file.url} failed {TRIES} times ({reason}); try again later, or {ALTERNATIVE}"
    )


def _receive(file: PublicFile, target: Path, progress: Progress) -> None:
    """Write the file to ``target``; raise ``ConnectionError`` if other bytes arrived."""
    received = 0
    with urllib.request.urlopen(file.url, timeout=TIMEOUT_SECONDS) as response:
        length = response.headers.get("Content-Length", "")
        progress.start(f"downloading {file.name}", int(length) if length.isdecimal() else None)
        with target.open("wb") as written:
            while block := response.read(BLOCK):
                received += len(block)
                if received > MAX_BYTES:
                    raise DataError(
                        f"download: {file.url} sent more than {MAX_BYTES:,} bytes, which is not "
                        f"the published file; {ALTERNATIVE}"
                    )
                written.write(block)
                progress.advance(len(block))
    if (found := _md5(target)) != file.md5:
        raise ConnectionError(f"received {received:,} bytes with MD5 {found}, expected {file.md5}")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
