"""Pictures of any data, embedded by any model, and never twice.

Features are kept by the content of the picture that they were made of, in one SQLite file for each
encoder and way of preparing pictures. A cache that cannot be read or written is done without.
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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsm.data import Dataset, FeatureDataset, ImageDataset, folder, open_dataset
from vsm.data.catalog import FEATURES_PREFIX, FOLDER_PREFIX
from vsm.data.dataset import SPLITS
from vsm.data.images import CHUNK, decode_all, read_file
from vsm.data.preprocessing import Preprocessing
from vsm.data.store import data_root
from vsm.errors import DataError, RunError
from vsm.evaluation.evaluator import evaluation_mode, with_features
from vsm.memory.named import EncoderIdentity
from vsm.model import FewShotModel
from vsm.runs.trained_model import TrainedModel
from vsm.system.devices import send
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.progress import NULL_PROGRESS, Progress

BATCH = 32  # pictures that pass a large network at once
NUMBERS_IN_MEMORY = 1 << 26  # of features, 256 MB; more are kept in a file
Features = npt.NDArray[np.float32]


class EmbeddingCache:
    """Features by the digest of what they were made of; it may forget, but never mixes up.

    Args:
        path: of the SQLite file; it is made where there is none, and made anew if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Features]:
        """Return what is known of ``keys``."""
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
        """Keep more of them."""
        rows = [(key, one.tobytes(), zlib.crc32(one.tobytes())) for key, one in features.items()]
        with self._open() as database:
            if database is not None:
                database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?)", rows)

    @contextmanager
    def _open(self) -> "Iterator[sqlite3.Connection | None]":
        """Give the database, or None where it cannot be used; whatever fails is done without."""
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
        """Open the file; one that is no database is made anew, since it can be."""
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


class PictureEmbedder:
    """Embeds pictures with the backbone of a model, prepared as that wants them.

    Features are those before the adapter, as :meth:`FewShotModel.encode` gives them.
    """

    def __init__(self, model: FewShotModel, preprocessing: Preprocessing, encoder: str) -> None:
        self.model, self.preprocessing = model, preprocessing
        described = (encoder, model.settings.model.views, str(model.precision))
        digest = hashlib.sha256(repr((described, preprocessing.as_dict())).encode()).hexdigest()[
            :16
        ]
        path = data_root() / "embeddings" / f"{digest}.sqlite"
        self.cache = EmbeddingCache(path)

    def files(
        self,
        files: Sequence[Path],
        progress: Progress = NULL_PROGRESS,
        processes: Processes = SINGLE_PROCESS,
    ) -> Features:
        """Embed picture files ``[n, D]``; rows that other ``processes`` own stay zero."""
        content, decode = (lambda n: read_file(files[n])), self._decode(files)
        return self._embed(len(files), content, decode, progress, processes)

    def arrays(
        self,
        dataset: ImageDataset,
        progress: Progress = NULL_PROGRESS,
        processes: Processes = SINGLE_PROCESS,
    ) -> Features:
        """Embed the images of a dataset ``[n, D]``, as :meth:`files` does."""

        def content(place: int) -> bytes:
            image = np.ascontiguousarray(dataset.images[place])
            return b"%r" % (image.shape,) + image.tobytes()

        def decode(places: Sequence[int], _: Sequence[bytes]) -> torch.Tensor:
            pictures = [np.ascontiguousarray(dataset.images[place]) for place in places]
            return self.preprocessing.pixels(pictures)

        return self._embed(dataset.num_samples, content, decode, progress, processes)

    def _decode(
        self, files: Sequence[Path]
    ) -> Callable[[Sequence[int], Sequence[bytes]], torch.Tensor]:

        def decode(places: Sequence[int], contents: Sequence[bytes]) -> torch.Tensor:
            given = range(len(places))
            parts = decode_all(
                given, contents.__getitem__, self.preprocessing, lambda n: str(files[places[n]])
            )
            return torch.from_numpy(np.concatenate(list(parts))).permute(0, 3, 1, 2)

        return decode

    def _embed(
        self,
        count: int,
        content: Callable[[int], bytes],
        decode: Callable[[Sequence[int], Sequence[bytes]], torch.Tensor],
        progress: Progress,
        processes: Processes,
    ) -> Features:
        """Embed ``count`` pictures, a part at a time; what was embedded before is looked up."""
        features = _room_for(count, self.model.num_features)
        owned = processes.owned(torch.arange(count), count).nonzero().flatten().tolist()
        for places in _parts(owned, CHUNK):
            contents = [content(place) for place in places]
            keys = [hashlib.sha256(one).digest() for one in contents]
            known = self.cache.get(keys)
            known = {key: one for key, one in known.items() if one.shape == features.shape[1:]}
            progress.advance(sum(key in known for key in keys))
            missing = {key: n for n, key in enumerate(keys) if key not in known}
            for part in _parts(list(missing.items()), BATCH):
                chosen = [n for _, n in part]
                pixels = decode([places[n] for n in chosen], [contents[n] for n in chosen])
                rows = self._encode(pixels)
                fresh = dict(zip((key for key, _ in part), rows, strict=True))
                self.cache.put(fresh)
                known |= fresh
                progress.advance(len(part))
            for place, key in zip(places, keys, strict=True):
                features[place] = known[key]
        if self.cache.problem is not None:
            progress.message(
                f"the cache {self.cache.path} was not used ({self.cache.problem}); delete it if "
                "that goes on"
            )
        return features

    @torch.no_grad()
    def _encode(self, pixels: torch.Tensor) -> Features:
        with evaluation_mode(self.model):
            inputs = self.preprocessing.normalize(send(pixels, self.model.device))
            features = self.model.encode(inputs).cpu()
        if not features.isfinite().all():
            raise RunError(
                "encoder: it gives NaN or infinite features; is it damaged, or not meant for such "
                "pictures?"
            )
        return features.float().numpy()


def _room_for(count: int, width: int) -> Features:
    """Return zeros ``[count, width]``: in memory, or in a file that vanishes, if they are many."""
    if count * width <= NUMBERS_IN_MEMORY:
        return np.zeros((count, width), np.float32)
    data_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=data_root(), prefix="features-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, 4 * count * width)  # a full disk is told now
            return np.memmap(file, np.float32, "r+", shape=(count, width))
        except OSError as error:
            raise DataError(
                f"data: there is no room for {count:,} rows of {width} features in {data_root()} "
                f"({error.strerror}); set VSM_DATA to a folder on a larger disk"
            ) from error


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def embedded_files(
    trained: TrainedModel, files: Sequence[Path], progress: Progress = NULL_PROGRESS
) -> torch.Tensor:
    """Embed picture files as :meth:`TrainedModel.embed` does, but never twice: ``[n, D]``."""
    if trained.preprocessing is None:
        raise DataError(f"model: {trained.name} takes features, not pictures; use another")
    fingerprint = trained.encoder.fingerprint
    embedder = PictureEmbedder(trained.model, trained.preprocessing, fingerprint)
    encoded = torch.from_numpy(embedder.files(files, progress))
    with torch.no_grad(), evaluation_mode(trained.model):
        return trained.model.adapt(encoded.to(trained.model.device))


def open_data(
    model: FewShotModel,
    preprocessing: Preprocessing | None,
    trained_on: str | None,
    data: str,
    *,
    as_a_whole: bool = False,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> Dataset:
    """Open ``data`` for a model; pictures unlike those that it was trained on are embedded.

    Args:
        model: whose backbone embeds them.
        preprocessing: how the model wants pictures; None if it takes features.
        trained_on: data whose stored images are the model's inputs as they are.
        data: what to open.
        as_a_whole: put the classes of all splits into one, ``all``.
        progress: counts pictures that are embedded.
        processes: each embeds its part, and rows of the others stay zero.
    """
    if preprocessing is None:
        dataset = open_dataset(data)
        return _with_splits(dataset, as_a_whole)
    if data == trained_on and not model.settings.model.is_frozen_encoder:
        dataset = open_dataset(data)
        if Preprocessing.of(dataset) == preprocessing:
            return _with_splits(dataset, as_a_whole)
    identity = EncoderIdentity.of(model.settings, model.state_dict())
    embedder = PictureEmbedder(model, preprocessing, identity.fingerprint)
    return embedded_data(embedder, data, as_a_whole, progress, processes)


def _with_splits(dataset: Dataset, as_a_whole: bool) -> Dataset:
    if not as_a_whole:
        return dataset
    found = [dataset.classes(one) for one in SPLITS if one in dataset.splits]
    return replace(dataset, splits={"all": np.concatenate(found)})


def embedded_data(
    embedder: PictureEmbedder,
    data: str,
    as_a_whole: bool = False,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> FeatureDataset:
    """Embed all pictures of ``data``, whatever their size; classes and splits are theirs.

    Args:
        embedder: makes the features.
        data: ``folder:PATH``, whose files are read as they are, or a prepared dataset.
        as_a_whole: put the classes of all splits into one, ``all``.
        progress: counts pictures.
        processes: as in :func:`open_data`.
    """
    if data.startswith(FEATURES_PREFIX):
        raise DataError(f"data: pictures are needed here, but {data} holds features of an encoder")
    if not data.startswith(FOLDER_PREFIX):
        dataset = open_dataset(data)
        assert isinstance(dataset, ImageDataset)
        progress.start("embed", dataset.num_samples // processes.count)
        features = embedder.arrays(dataset, progress, processes)
        return with_features(_with_splits(dataset, as_a_whole), features)
    path = Path(data.removeprefix(FOLDER_PREFIX)).expanduser()
    lists, files = folder.list_classes(path, as_a_whole)
    names = list(files)
    pictures = [file for found in files.values() for file in found]
    progress.start("embed", len(pictures) // processes.count)
    ids = {name: position for position, name in enumerate(names)}
    return FeatureDataset(
        name=f"folder:{path.resolve().name}",
        class_names=tuple(names),
        class_starts=np.cumsum([0, *(len(files[name]) for name in names)], dtype=np.int64),
        splits={
            split: np.asarray([ids[name] for name in found], np.int64)
            for split, found in lists.items()
            if found
        },
        origin=f"{path.resolve()}: {len(pictures):,} images of {len(names):,} classes",
        features=embedder.files(pictures, progress, processes),
    )
