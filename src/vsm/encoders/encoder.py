"""The encoder, which turns images into features, each image once.

Everything that embeds images shares one :class:`Encoder`. It is fingerprinted once, and it keeps
the features of the images that it has embedded until its weights change. Features of files and of
images that need preprocessing are also cached on disk, by the content of their image, in one SQLite
file for each encoder and preprocessing. A cache that cannot be read or written is not used.
"""

import hashlib
import os
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.data import Dataset, FeatureDataset, ImageDataset, Split, folder, open_dataset
from vsm.data.catalog import FOLDER_PREFIX
from vsm.data.dataset import SPLITS, class_index
from vsm.data.features import as_features
from vsm.data.images import Preprocessing, as_list, decode_all, read_file
from vsm.data.prepared import data_root, unwritable
from vsm.encoders.backbones import Backbone, build_backbone, evaluation_mode
from vsm.encoders.pretrained import load_pretrained, pretrained_preprocessing
from vsm.errors import DataError, RunError, SettingsError
from vsm.seeding import Randomness
from vsm.settings import ModelSettings
from vsm.system.devices import ON_CPU, Placement, computing_in, send
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import fingerprint

LARGEST_BATCH = 256
PIXELS_AT_ONCE = 1 << 21  # height · width · images; larger images pass the network in fewer
NUMBERS_IN_MEMORY = 1 << 26  # of features, 256 MB; larger arrays are kept in a file
Features = npt.NDArray[np.float32]
Result = TypeVar("Result")


class EncoderIdentity(NamedTuple):
    """Identifies an encoder: a name for people, and a digest of its weights."""

    name: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.name} [{self.fingerprint[:12]}]"

    @staticmethod
    def stored(values: Mapping[str, Any]) -> "EncoderIdentity":
        """Rebuild it from the stored result of ``_asdict``, or raise a ``TypeError``."""
        found = EncoderIdentity(**values)
        if not all(isinstance(value, str) for value in found):
            raise TypeError("name and fingerprint of an encoder must be strings")
        return found

    @staticmethod
    def of(
        settings: ModelSettings, data: str | None, weights: Mapping[str, Tensor]
    ) -> "EncoderIdentity":
        """Identify the encoder of a model by its settings, data and ``state_dict``."""
        kinds = ("backbone.", "adapter.")
        parts = {name: weight for name, weight in weights.items() if name.startswith(kinds)}
        frozen = settings.is_frozen_encoder  # the name identifies the weights
        has_backbone = frozen or any(name.startswith("backbone.") for name in parts)
        source = settings.backbone if has_backbone else str(data)
        kind, _, place = source.partition(":")  # hf:PLACE, whose weights have a digest
        identifying = {
            "source": kind if frozen and place else source,
            "normalize_features": settings.normalize_features,
            "mirror": settings.mirror,
        }
        if settings.shift:  # absent if 0, to keep the fingerprints of encoders without shifts
            identifying["shift"] = settings.shift
        name = f"{source} of {data}" if data and has_backbone and not frozen else source
        return EncoderIdentity(name, fingerprint(parts, identifying))


@dataclass
class _EmbeddedImages:
    """Features of some images of a dataset."""

    images: object  # the array of pixels, whose address must not be reused
    rows: Tensor  # of each image in features; -1 if it was not embedded; int64 [P]
    features: Tensor  # [n, D], on the encoder's device


class Encoder:
    """Turns images into features: a backbone, and perhaps a linear map, the adapter.

    Args:
        settings: the model's; backbone, views, adapter and normalization are used.
        input_shape: ``(channels, height, width)``, or ``(D,)`` of features: then without backbone.
        data: what it was trained on, or whose features it takes; None if that is unknown.
        preprocessing: how images become inputs; None for features, or if the dataset decides.
        source: where it was loaded from, if anywhere.
        backbone: the network, if it was built before.
    """

    def __init__(
        self,
        settings: ModelSettings,
        input_shape: tuple[int, ...],
        data: str | None,
        preprocessing: Preprocessing | None = None,
        source: str | None = None,
        backbone: Backbone | None = None,
    ) -> None:
        self.settings, self.input_shape, self.data = settings, tuple(input_shape), data
        self.preprocessing, self.source, self.backbone = preprocessing, source, backbone
        if backbone is None and len(self.input_shape) == 3:
            self.backbone = build_backbone(settings, self.input_shape)
        elif settings.own_backbone is not None:
            raise SettingsError(
                f"backbone: stored features need none, got {settings.own_backbone!r}; leave it out"
            )
        width = input_shape[0] if self.backbone is None else self.backbone.num_features
        self.num_features = width
        self.adapter: nn.Linear | None = None
        if settings.adapter == "linear":  # starts as the identity, and draws no random numbers
            device = torch.get_default_device()
            self.adapter = nn.utils.skip_init(nn.Linear, width, width, device=device)
            nn.init.eye_(self.adapter.weight)
            nn.init.zeros_(self.adapter.bias)
        self.placement = ON_CPU
        self.forget()

    def variant(self, settings: ModelSettings) -> "Encoder":
        """Return an encoder with the same backbone and other views, or without the adapter."""
        other = object.__new__(Encoder)
        vars(other).update(vars(self), settings=settings)
        if settings.adapter == "none":
            other.adapter = None
        other.forget()
        return other

    def place(self, placement: Placement) -> None:
        """Move to a device; from now on the backbone computes in the placement's precision."""
        if placement != self.placement:
            self.forget()
        self.placement = placement
        for part in self._parts().values():
            part.to(placement.device)

    def _parts(self) -> dict[str, nn.Module]:
        parts = {"backbone": self.backbone, "adapter": self.adapter}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights by their names in a model: ``backbone.…`` and ``adapter.…``."""
        return {
            f"{prefix}.{name}": value
            for prefix, part in self._parts().items()
            for name, value in part.state_dict().items()
        }

    def forget(self) -> None:
        """Drop the fingerprint and all features; call this after steps of a fused optimizer.

        Changes of weights that torch counts, as ``load_state_dict`` makes, are noticed without it.
        """
        self._identity: EncoderIdentity | None = None
        self._embedded: dict[object, _EmbeddedImages] = {}
        self._versions: list[tuple[int, int]] | None = None

    def _forget_if_changed(self) -> None:
        versions = [(value.data_ptr(), value._version) for value in self.state_dict().values()]
        if versions != self._versions:
            self.forget()
            self._versions = versions

    def share_features(self, other: "Encoder") -> None:
        """Share features with ``other`` from now on if both compute the same ones."""
        own, others = ((one.fingerprint, one.preprocessing, one.placement) for one in (self, other))
        if own == others:
            self._embedded = other._embedded

    @property
    def identity(self) -> EncoderIdentity:
        """Its name and fingerprint, computed on first use."""
        self._forget_if_changed()
        if self._identity is None:
            self._identity = EncoderIdentity.of(self.settings, self.data, self.state_dict())
        return self._identity

    @property
    def fingerprint(self) -> str:
        """A digest of everything that its features depend on, except the preprocessing."""
        return self.identity.fingerprint

    def encode(self, inputs: Tensor, random: Randomness | None = None) -> Tensor:
        """Map images ``[B, C, H, W]`` through the backbone; return features ``[B, D]`` as is."""
        if inputs.ndim == 2 and inputs.shape[1] == self.num_features:
            return inputs
        if inputs.ndim == 2 or self.backbone is None:
            raise ValueError(
                f"inputs: expected features [B, {self.num_features}], got {list(inputs.shape)}"
            )
        with computing_in(self.placement.precision, inputs.device):
            seen = [self.backbone(view, random) for view in views(inputs, *self.settings.views)]
            features: Tensor = sum(seen[1:], seen[0]) / len(seen)
        return features.to(inputs.dtype)

    def adapt(self, features: Tensor) -> Tensor:
        """Apply the adapter and the normalization of the settings: ``[B, D]`` to ``[B, D]``."""
        if self.adapter is not None:
            features = self.adapter(features)
        return F.normalize(features, dim=-1) if self.settings.normalize_features else features

    def embed(self, inputs: Tensor, random: Randomness | None = None) -> Tensor:
        """Map normalized images ``[B, C, H, W]``, or stored features, to features ``[B, D]``."""
        return self.adapt(self.encode(inputs, random))

    def embed_images(self, images: Any, progress: Progress = NULL_PROGRESS) -> Tensor:
        """Map images of any kinds, or rows of features, to features ``[n, D]``."""
        if self.preprocessing is None:
            return self.embed_samples(as_features(images, self.num_features))
        return self.embed_samples(self.preprocessing.pixels(as_list(images), progress))

    def embed_samples(self, samples: Tensor) -> Tensor:
        """Map pixels uint8 ``[n, C, H, W]`` of the right size, or features, to features."""
        return self._embed_in_parts(samples, self.normalize)

    def normalize(self, samples: Tensor) -> Tensor:
        """Send pixels or features to the encoder's device, and normalize pixels."""
        samples = send(samples, self.placement.device)
        return samples if self.preprocessing is None else self.preprocessing.normalize(samples)

    @torch.no_grad()
    def _embed_in_parts(
        self, samples: Tensor, load: Callable[[Tensor], Tensor], progress: Progress = NULL_PROGRESS
    ) -> Tensor:
        """Embed what ``load`` returns for parts of ``samples``, in evaluation mode."""
        parts = [torch.zeros(0, self.num_features, device=self.placement.device)]
        with evaluation_mode(self.backbone):
            for part in samples.split(self.batch_size):
                parts.append(self.embed(load(part)))
                progress.advance(len(part))
        return torch.cat(parts)

    @property
    def batch_size(self) -> int:
        """How many images pass the backbone at once."""
        pixels = self.input_shape[-1] * self.input_shape[-2] if self.backbone is not None else 1
        return max(1, min(LARGEST_BATCH, PIXELS_AT_ONCE // pixels))

    @torch.no_grad()
    def features(
        self,
        dataset: Dataset,
        image_ids: Tensor,
        progress: Progress = NULL_PROGRESS,
        keep: bool = True,
    ) -> Tensor:
        """Return the features of samples ``[...]`` in evaluation mode ``[..., D]``.

        Each image passes the network once, as long as the weights stay the same. The dataset has
        the encoder's inputs as they are, or its features. ``keep`` says whether to keep what is
        embedded now; it is False for more than fits into memory, with distinct ``image_ids``.
        """
        wanted, load = image_ids.flatten(), partial(self.load, dataset)
        if not isinstance(dataset, ImageDataset):
            found = self._embed_in_parts(wanted, load, progress)
            return found.view(*image_ids.shape, self.num_features)
        table = self._table(dataset)
        missing = wanted[table.rows[wanted] < 0]
        if len(missing) < len(wanted):
            progress.advance(len(wanted) - len(missing))
        if keep:
            missing = torch.tensor(list(dict.fromkeys(missing.tolist())), dtype=torch.int64)
        fresh = self._embed_in_parts(missing, load, progress)
        if keep:
            table.rows[missing] = torch.arange(len(missing)) + len(table.features)
            table.features = torch.cat([table.features, fresh])
        rows = table.rows[wanted].to(fresh.device)
        known = rows >= 0
        if known.all():
            found = table.features[rows]
        else:
            found = fresh.new_empty(len(wanted), self.num_features)
            found[known] = table.features[rows[known]]
            found[~known] = fresh
        return found.view(*image_ids.shape, self.num_features)

    def _table(self, dataset: ImageDataset) -> _EmbeddedImages:
        """Return what was embedded of a dataset; one opened again is the same if its file is."""
        self._forget_if_changed()
        images = dataset.images
        key = (str(getattr(images, "filename", None) or id(images)), dataset.normalization)
        if key not in self._embedded:
            rows = torch.full((dataset.num_samples,), -1)
            empty = torch.zeros(0, self.num_features, device=self.placement.device)
            self._embedded[key] = _EmbeddedImages(images, rows, empty)
        return self._embedded[key]

    def load(self, dataset: Dataset, image_ids: Tensor) -> Tensor:
        """Return the normalized samples ``[B]`` on the encoder's device: ``[B, ...]``."""
        return dataset.normalize(send(dataset.load(image_ids), self.placement.device))


def open_frozen(name: str) -> Encoder:
    """Open a frozen encoder by name; its network is built once."""
    settings = ModelSettings(backbone=name)
    network = load_pretrained(name)
    preprocessing = pretrained_preprocessing(name, network)
    backbone = build_backbone(settings, preprocessing.input_shape, network)
    return Encoder(settings, preprocessing.input_shape, None, preprocessing, name, backbone)


def views(images: Tensor, mirror: bool, shift: int) -> Iterator[Tensor]:
    """Yield the views of ``images [B, C, H, W]`` whose features are averaged, themselves first.

    ``shift`` adds copies moved by so many pixels up, down, left and right, with the border
    repeated, and ``mirror`` the mirror image of every view. Added views are channels-last.
    """
    moved = [images]
    if shift:
        *_, height, width = images.shape
        padded = F.pad(images, [shift] * 4, mode="replicate")
        for top, left in ((0, shift), (2 * shift, shift), (shift, 0), (shift, 2 * shift)):
            moved.append(padded[..., top : top + height, left : left + width])
    for number, view in enumerate(moved):
        yield view.contiguous(memory_format=torch.channels_last) if number else view
        if mirror:
            yield view.flip(-1).contiguous(memory_format=torch.channels_last)


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
                raise RunError(
                    "encoder: it gives NaN or infinite features; is it damaged, or not meant for "
                    "such images?"
                )
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
                raise RunError(
                    f"encoder: {encoder.source or encoder.data} takes images {expected}, but those "
                    f"of {data} are {found}; was it trained on images of another size?"
                )
            encoder.preprocessing = Preprocessing.of(dataset)
            return _merge_splits(dataset) if merge_splits else dataset
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
    if not isinstance(dataset, ImageDataset):
        raise DataError(f"data: images are needed here, but {data} holds features of an encoder")
    progress.start("embed", dataset.num_samples // processes.count)
    encoded = encode_dataset(encoder, dataset, None, progress, processes)
    return _merge_splits(encoded) if merge_splits else encoded


def _merge_splits(dataset: Dataset) -> Dataset:
    classes = [dataset.classes(split) for split in SPLITS if split in dataset.splits]
    return replace(dataset, splits={"all": np.concatenate(classes)})
