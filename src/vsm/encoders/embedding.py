"""Images of any data, embedded by any encoder, and never twice.

Features are kept on disk by the content of their image, in one SQLite file for each encoder and
way of preparing images. A cache that cannot be read or written is not used.
"""

import hashlib
import os
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vsm.data import Dataset, FeatureDataset, ImageDataset, Split, folder, open_dataset
from vsm.data.catalog import FEATURES_PREFIX, FOLDER_PREFIX
from vsm.data.dataset import SPLITS, class_index
from vsm.data.images import decode_all, read_file
from vsm.data.preprocessing import Preprocessing
from vsm.data.store import data_root
from vsm.encoders.encoder import Encoder
from vsm.errors import DataError, RunError
from vsm.system.devices import send
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.progress import NULL_PROGRESS, Progress

NUMBERS_IN_MEMORY = 1 << 26  # of features, 256 MB; more are kept in a file
Features = npt.NDArray[np.float32]
Decoder = Callable[[Sequence[int], Sequence[bytes]], Tensor]
"""From positions and contents of images to their pixels uint8 ``[B, C, H, W]``."""


class EmbeddingCache:
    """Features by the digest of their image; some may be lost, but none are ever exchanged.

    Args:
        path: of the SQLite file; it is created if missing, and replaced if damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Features]:
        """Return the features of those ``keys`` that are stored."""
        found: dict[bytes, Features] = {}
        with self._open() as database:
            if database is None:
                return found
            for key in keys:
                row = database.execute(
                    "SELECT feature, checksum FROM features WHERE key = ?", (key,)
                ).fetchone()
                if row is not None and zlib.crc32(row[0]) == row[1]:
                    found[key] = np.frombuffer(row[0], np.float32)
        return found

    def put(self, features: dict[bytes, Features]) -> None:
        """Store features."""
        rows = [(key, one.tobytes(), zlib.crc32(one.tobytes())) for key, one in features.items()]
        with self._open() as database:
            if database is not None:
                database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?)", rows)

    @contextmanager
    def _open(self) -> "Iterator[sqlite3.Connection | None]":
        """Yield the database, or None if it cannot be used."""
        database = None if self.problem is not None else self._connected()
        try:
            if database is None:
                yield None
                return
            with database:
                yield database
        except sqlite3.Error as error:
            self.problem = str(error)
        finally:
            if database is not None:
                database.close()

    def _connected(self) -> sqlite3.Connection | None:
        """Open the file; replace one that is not a database."""
        for attempt in range(2):
            database = None
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                database = sqlite3.connect(self.path, timeout=30)
                database.execute(
                    "CREATE TABLE IF NOT EXISTS features (key BLOB PRIMARY KEY, feature BLOB, "
                    "checksum INTEGER) WITHOUT ROWID"
                )
                return database
            except (OSError, sqlite3.Error) as error:
                self.problem = str(error)
                if database is not None:
                    database.close()
                if attempt or type(error) is not sqlite3.DatabaseError:
                    break
                self.path.unlink(missing_ok=True)
                self.problem = None
        return None


def cache_of(encoder: Encoder) -> EmbeddingCache:
    """Return the cache of an encoder's features, which also depend on how images are prepared."""
    assert encoder.preprocessing is not None
    described = (encoder.fingerprint, encoder.settings.views, str(encoder.placement.precision))
    key = repr((described, encoder.preprocessing.as_dict()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return EmbeddingCache(data_root() / "embeddings" / f"{digest}.sqlite")


def encode_files(
    encoder: Encoder,
    files: Sequence[Path],
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> Features:
    """Encode image files ``[n, D]``, before the adapter; rows that other processes own are zero."""
    assert encoder.preprocessing is not None
    form = encoder.preprocessing

    def decode(places: Sequence[int], contents: Sequence[bytes]) -> Tensor:
        given = range(len(places))
        parts = decode_all(given, contents.__getitem__, form, lambda n: str(files[places[n]]))
        return torch.from_numpy(np.concatenate(list(parts))).permute(0, 3, 1, 2)

    features = _room_for(len(files), encoder.num_features)
    places = processes.owned(torch.arange(len(files)), len(files)).nonzero().flatten()
    _encode(encoder, places, lambda n: read_file(files[n]), decode, features, progress)
    return features


def embed_files(
    encoder: Encoder, files: Sequence[Path], progress: Progress = NULL_PROGRESS
) -> Tensor:
    """Embed image files as :meth:`Encoder.embed_images` does, but never twice: ``[n, D]``."""
    if encoder.preprocessing is None:
        raise DataError(f"model: it takes features of {encoder.data}, not images; use another")
    encoded = torch.from_numpy(encode_files(encoder, files, progress))
    with torch.no_grad():
        return encoder.adapt(encoded.to(encoder.placement.device))


def encode_dataset(
    encoder: Encoder,
    dataset: ImageDataset,
    splits: Sequence[Split] | None = None,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> FeatureDataset:
    """Encode the images of a dataset, of any size; its classes and splits stay.

    Args:
        encoder: makes the features, before its adapter.
        dataset: holds the images.
        splits: which images to encode, the rows of others being NaN so that nothing can be learned
            from them; None: all.
        progress: counts images.
        processes: each encodes a share of the images, and the rows of the others are zero.
    """
    preprocessing, count = encoder.preprocessing, dataset.num_samples
    assert preprocessing is not None
    is_prepared = Preprocessing.of(dataset) == preprocessing

    def content(place: int) -> bytes:
        image = np.ascontiguousarray(dataset.images[place])
        return b"%r" % (image.shape,) + image.tobytes()

    def decode(places: Sequence[int], _: Sequence[bytes]) -> Tensor:
        if is_prepared:
            return dataset.load(np.asarray(places))
        return preprocessing.pixels([np.ascontiguousarray(dataset.images[n]) for n in places])

    features = _room_for(count, encoder.num_features)
    places = torch.arange(count)
    if splits is not None:
        features[:] = np.nan
        places = torch.from_numpy(np.concatenate([dataset.split_ids(split) for split in splits]))
    places = places[processes.owned(places, count)]
    _encode(encoder, places, content, decode, features, progress)
    return FeatureDataset(
        name=dataset.name,
        class_names=dataset.class_names,
        class_starts=dataset.class_starts,
        splits=dataset.splits,
        origin=dataset.origin,
        features=features,
    )


@torch.no_grad()
def _encode(
    encoder: Encoder,
    places: Tensor,
    content: Callable[[int], bytes],
    decode: Decoder,
    features: Features,
    progress: Progress,
) -> None:
    """Write the features of the images at ``places``; what was encoded before is looked up."""
    assert encoder.preprocessing is not None
    cache = cache_of(encoder)
    for part in places.split(encoder.batch_size):
        batch = part.tolist()
        contents = [content(place) for place in batch]
        keys = [hashlib.sha256(one).digest() for one in contents]
        known = {
            key: one for key, one in cache.get(keys).items() if one.shape == features.shape[1:]
        }
        missing = {key: n for n, key in enumerate(keys) if key not in known}
        if missing:
            chosen = list(missing.values())
            pixels = decode([batch[n] for n in chosen], [contents[n] for n in chosen])
            inputs = encoder.preprocessing.normalize(send(pixels, encoder.placement.device))
            with encoder.evaluating():
                rows = encoder.encode(inputs).float().cpu()
            if not rows.isfinite().all():
                raise RunError(
                    "encoder: it gives NaN or infinite features; is it damaged, or not meant for "
                    "such images?"
                )
            fresh = dict(zip(missing, rows.numpy(), strict=True))
            cache.put(fresh)
            known |= fresh
        for place, key in zip(batch, keys, strict=True):
            features[place] = known[key]
        progress.advance(len(batch))
    if cache.problem is not None:
        progress.message(
            f"the cache {cache.path} was not used ({cache.problem}); delete it if that goes on"
        )


def _room_for(count: int, width: int) -> Features:
    """Return zeros ``[count, width]``, in memory, or in a temporary file if they are many."""
    if count * width <= NUMBERS_IN_MEMORY:
        return np.zeros((count, width), np.float32)
    data_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=data_root(), prefix="features-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, 4 * count * width)  # fails now on a full disk
            return np.memmap(file, np.float32, "r+", shape=(count, width))
        except OSError as error:
            raise DataError(
                f"data: there is no room for {count:,} rows of {width} features in {data_root()} "
                f"({error.strerror}); set VSM_DATA to a folder on a larger disk"
            ) from error


def open_data(
    encoder: Encoder,
    data: str,
    *,
    merge_splits: bool = False,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> Dataset:
    """Open ``data`` for an encoder; images unlike those that it was trained on are encoded.

    Args:
        encoder: its preprocessing becomes that of ``data`` if it has none.
        data: ``folder:PATH``, whose files are read as they are, or another dataset by name.
        merge_splits: put the classes of all splits into one, ``all``.
        progress: counts images that are encoded.
        processes: each encodes a share of the images, and the rows of the others are zero.
    """
    is_own = data == encoder.data and not encoder.settings.is_frozen_encoder
    if encoder.preprocessing is None or is_own:
        dataset = open_dataset(data)
        if encoder.preprocessing in (None, Preprocessing.of(dataset)):
            encoder.require_inputs_of(dataset)
            encoder.preprocessing = Preprocessing.of(dataset)
            return _merged(dataset) if merge_splits else dataset
    if data.startswith(FEATURES_PREFIX):
        raise DataError(f"data: images are needed here, but {data} holds features of an encoder")
    if data.startswith(FOLDER_PREFIX):
        return _encoded_folder(encoder, data, merge_splits, progress, processes)
    dataset = open_dataset(data)
    assert isinstance(dataset, ImageDataset)
    progress.start("embed", dataset.num_samples // processes.count)
    encoded = encode_dataset(encoder, dataset, None, progress, processes)
    return _merged(encoded) if merge_splits else encoded


def _merged(dataset: Dataset) -> Dataset:
    found = [dataset.classes(one) for one in SPLITS if one in dataset.splits]
    return replace(dataset, splits={"all": np.concatenate(found)})


def _encoded_folder(
    encoder: Encoder, data: str, merge_splits: bool, progress: Progress, processes: Processes
) -> FeatureDataset:
    path = Path(data.removeprefix(FOLDER_PREFIX)).expanduser()
    lists, files = folder.list_classes(path, merge_splits)
    images = [file for found in files.values() for file in found]
    progress.start("embed", len(images) // processes.count)
    return FeatureDataset(
        name=f"folder:{path.resolve().name}",
        origin=f"{path.resolve()}: {len(images):,} images of {len(files):,} classes",
        features=encode_files(encoder, images, progress, processes),
        **class_index({name: len(found) for name, found in files.items()}, lists),
    )
