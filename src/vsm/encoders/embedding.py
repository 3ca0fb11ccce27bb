"""Embedding the images of any data with any encoder, each image once.

Features are cached on disk by the content of their image, in one SQLite file for each encoder and
preprocessing. A cache that cannot be read or written is not used.
"""

import hashlib
import os
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vsm.data import Dataset, FeatureDataset, ImageDataset, Split, folder, open_dataset
from vsm.data.catalog import FEATURES_PREFIX, FOLDER_PREFIX
from vsm.data.dataset import SPLITS, class_index
from vsm.data.images import Preprocessing, decode_all, read_file
from vsm.data.prepared import data_root, unwritable
from vsm.encoders.backbones import evaluation_mode
from vsm.encoders.encoder import Encoder
from vsm.errors import DataError, RunError
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.progress import NULL_PROGRESS, Progress

NUMBERS_IN_MEMORY = 1 << 26  # of features, 256 MB; larger arrays are kept in a file
Features = npt.NDArray[np.float32]
Result = TypeVar("Result")


class EmbeddingCache:
    """Features by the digest of their image, in an SQLite file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None  # the first error; the cache is not used after it

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Features]:
        """Return the features of those ``keys`` that are stored and intact."""
        query = "SELECT key, feature, checksum FROM features WHERE key = ?"
        rows = self._run(lambda file: [row for key in keys for row in file.execute(query, (key,))])
        return {
            key: np.frombuffer(feature, np.float32)
            for key, feature, checksum in rows or ()
            if zlib.crc32(feature) == checksum
        }

    def put(self, features: dict[bytes, Features]) -> None:
        """Store features."""
        rows = [(key, one.tobytes(), zlib.crc32(one.tobytes())) for key, one in features.items()]
        statement = "INSERT OR REPLACE INTO features VALUES (?, ?, ?)"
        self._run(lambda file: file.executemany(statement, rows))

    def _run(self, action: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """Run ``action`` in a transaction; return None if the cache cannot be used."""
        if self.problem is None:
            try:
                with closing(self._connect()) as database, database:
                    return action(database)
            except (OSError, sqlite3.Error) as error:
                self.problem = str(error)
        return None

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        create = (
            "CREATE TABLE IF NOT EXISTS features (key BLOB PRIMARY KEY, feature BLOB, "
            "checksum INTEGER) WITHOUT ROWID"
        )
        database = sqlite3.connect(self.path, timeout=30)
        try:
            database.execute(create)
        except sqlite3.Error as error:
            database.close()
            if type(error) is not sqlite3.DatabaseError:
                raise
            self.path.unlink(missing_ok=True)  # not a database
            return self._connect()
        return database


def cache_of(encoder: Encoder) -> EmbeddingCache:
    """Return the cache for the features of an encoder with its preprocessing."""
    assert encoder.preprocessing is not None
    identity = (encoder.fingerprint, encoder.settings.views, str(encoder.placement.precision))
    key = repr((identity, encoder.preprocessing.as_dict()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return EmbeddingCache(data_root() / "embeddings" / f"{digest}.sqlite")


def embed_files(
    encoder: Encoder, files: Sequence[Path], progress: Progress = NULL_PROGRESS
) -> Tensor:
    """Embed image files ``[n, D]`` as :meth:`Encoder.embed_images` does, using the cache."""
    if encoder.preprocessing is None:
        raise DataError(f"model: it takes features of {encoder.data}, not images; use another")
    encoded = torch.from_numpy(encode_files(encoder, files, progress))
    with torch.no_grad():
        return encoder.adapt(encoded.to(encoder.placement.device))


def encode_files(
    encoder: Encoder,
    files: Sequence[Path],
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> Features:
    """Encode image files ``[n, D]``, before the adapter; rows of other processes are zero."""
    form = encoder.preprocessing
    assert form is not None

    def decode(ids: Sequence[int], contents: Sequence[bytes]) -> Tensor:
        numbers = range(len(ids))
        batches = decode_all(numbers, contents.__getitem__, form, lambda n: str(files[ids[n]]))
        return torch.from_numpy(np.concatenate(list(batches))).permute(0, 3, 1, 2)

    features = _zeros(len(files), encoder.num_features)
    ids = processes.owned(torch.arange(len(files)), len(files)).nonzero().flatten()
    _encode(encoder, ids, lambda n: read_file(files[n]), decode, features, progress)
    return features


def encode_dataset(
    encoder: Encoder,
    dataset: ImageDataset,
    splits: Sequence[Split] | None = None,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> FeatureDataset:
    """Encode the images of a dataset before the adapter, keeping its classes and splits.

    With ``splits`` the rows of other images are NaN, so that nothing can be learned from them. Each
    of the ``processes`` encodes a share of the images; the rows of others are zero.
    """
    preprocessing, count = encoder.preprocessing, dataset.num_samples
    assert preprocessing is not None
    is_prepared = Preprocessing.of(dataset) == preprocessing

    def read(image_id: int) -> bytes:
        image = np.ascontiguousarray(dataset.images[image_id])
        return b"%r" % (image.shape,) + image.tobytes()

    def decode(ids: Sequence[int], _: Sequence[bytes]) -> Tensor:
        if is_prepared:
            return dataset.load(np.asarray(ids))
        return preprocessing.pixels([np.ascontiguousarray(dataset.images[n]) for n in ids])

    features, ids = _zeros(count, encoder.num_features), torch.arange(count)
    if splits is not None:
        features[:] = np.nan
        ids = torch.from_numpy(np.concatenate([dataset.split_ids(split) for split in splits]))
    _encode(encoder, ids[processes.owned(ids, count)], read, decode, features, progress)
    shared = {field.name: getattr(dataset, field.name) for field in fields(Dataset)}
    return FeatureDataset(features=features, **shared)


@torch.no_grad()
def _encode(
    encoder: Encoder,
    ids: Tensor,
    read: Callable[[int], bytes],
    decode: Callable[[Sequence[int], Sequence[bytes]], Tensor],
    features: Features,
    progress: Progress,
) -> None:
    """Write the features of the images ``ids`` into ``features``, using the cache.

    ``read`` returns the content of an image, and ``decode`` makes pixels uint8 ``[B, C, H, W]`` of
    ids and contents.
    """
    cache = cache_of(encoder)
    for part in ids.split(encoder.batch_size):
        batch = part.tolist()
        contents = [read(image_id) for image_id in batch]
        keys = [hashlib.sha256(content).digest() for content in contents]
        stored = cache.get(keys)
        known = {key: row for key, row in stored.items() if row.shape == features.shape[1:]}
        missing = {key: n for n, key in enumerate(keys) if key not in known}
        if missing:
            chosen = list(missing.values())
            pixels = decode([batch[n] for n in chosen], [contents[n] for n in chosen])
            with evaluation_mode(encoder.backbone):
                rows = encoder.encode(encoder.normalize(pixels)).float().cpu()
            if not rows.isfinite().all():
                raise RunError("encoder: it gives NaN or infinite features; is it damaged?")
            fresh = dict(zip(missing, rows.numpy(), strict=True))
            cache.put(fresh)
            known |= fresh
        for image_id, key in zip(batch, keys, strict=True):
            features[image_id] = known[key]
        progress.advance(len(batch))
    if cache.problem is not None:
        progress.message(
            f"the cache {cache.path} was not used ({cache.problem}); delete it if this persists"
        )


def _zeros(count: int, width: int) -> Features:
    """Return zeros ``[count, width]``, in memory or, if they are many, in a temporary file."""
    if count * width <= NUMBERS_IN_MEMORY:
        return np.zeros((count, width), np.float32)
    data_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=data_root(), prefix="features-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, 4 * count * width)  # fails now on a full disk
            return np.memmap(file, np.float32, "r+", shape=(count, width))
        except OSError as error:
            raise unwritable(data_root(), error) from error


def open_data(
    encoder: Encoder,
    data: str,
    *,
    merge_splits: bool = False,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> Dataset:
    """Open ``data`` for an encoder; images are encoded unless they are its inputs already.

    An encoder without preprocessing gets that of ``data``. ``merge_splits`` puts all classes into
    the split ``all``. ``processes`` are as in :func:`encode_dataset`.
    """
    is_own = data == encoder.data and not encoder.settings.is_frozen_encoder
    if encoder.preprocessing is None or is_own:
        dataset = open_dataset(data)
        if encoder.preprocessing in (None, Preprocessing.of(dataset)):
            found, expected = list(dataset.input_shape), list(encoder.input_shape)
            if isinstance(dataset, ImageDataset) and found != expected:
                problem = f"takes images {expected}, but those of {data} are {found}"
                raise RunError(f"encoder: {encoder.source or encoder.data} {problem}")
            encoder.preprocessing = Preprocessing.of(dataset)
            return _merge_splits(dataset) if merge_splits else dataset
    if data.startswith(FEATURES_PREFIX):
        raise DataError(f"data: images are needed here, but {data} holds features of an encoder")
    if data.startswith(FOLDER_PREFIX):
        path = Path(data.removeprefix(FOLDER_PREFIX)).expanduser()
        lists, files = folder.list_classes(path, merge_splits)
        images = [file for listed in files.values() for file in listed]
        progress.start("embed", len(images) // processes.count)
        return FeatureDataset(
            name=f"folder:{path.resolve().name}",
            origin=f"{path.resolve()}: {len(images):,} images of {len(files):,} classes",
            features=encode_files(encoder, images, progress, processes),
            **class_index({name: len(listed) for name, listed in files.items()}, lists),
        )
    dataset = open_dataset(data)
    assert isinstance(dataset, ImageDataset)
    progress.start("embed", dataset.num_samples // processes.count)
    encoded = encode_dataset(encoder, dataset, None, progress, processes)
    return _merge_splits(encoded) if merge_splits else encoded


def _merge_splits(dataset: Dataset) -> Dataset:
    classes = [dataset.classes(split) for split in SPLITS if split in dataset.splits]
    return replace(dataset, splits={"all": np.concatenate(classes)})
