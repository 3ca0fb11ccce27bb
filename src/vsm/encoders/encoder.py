"""The encoder, which turns images into features.

Everything that embeds images shares one :class:`Encoder`. It is fingerprinted once, and it keeps
the features of the images that it has embedded until its weights change.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.data import Dataset, ImageDataset
from vsm.data.features import as_features
from vsm.data.images import Preprocessing, as_list
from vsm.encoders.backbones import Backbone, build_backbone, evaluation_mode
from vsm.encoders.pretrained import load_pretrained, pretrained_preprocessing
from vsm.errors import SettingsError
from vsm.seeding import Randomness
from vsm.settings import ModelSettings
from vsm.system.devices import ON_CPU, Placement, computing_in, send
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import fingerprint

LARGEST_BATCH = 256
PIXELS_AT_ONCE = 1 << 21  # height · width · images; larger images pass the network in fewer


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
            found = list(inputs.shape)
            raise ValueError(f"inputs: expected features [B, {self.num_features}], got {found}")
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

    @torch.no_grad()
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
            found[known], found[~known] = table.features[rows[known]], fresh
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
    settings, network = ModelSettings(backbone=name), load_pretrained(name)
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
