"""Labeled samples, images or features, by class and split, and how training images are varied."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vsm.errors import DataError
from vsm.seeding import Randomness, integers, uniform

Split = Literal["train", "validation", "test", "all"]
"""``all`` are the classes of all splits, where a dataset is opened as a whole."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
ClassLists = dict[Split, list[str]]
Pixels = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601: how bright red, green and blue look


def all_classes(lists: ClassLists) -> list[str]:
    """Return the classes of all splits, split after split."""
    return [name for names in lists.values() for name in names]


def random_split(
    names: Collection[str], sizes: Sequence[int] | None = None, seed: int = 0, source: str = "data"
) -> ClassLists:
    """Split classes at random into train, validation and test, by default 64 / 16 / 20 percent.

    The result depends on seed and names alone, since names are ordered by a hash of both.
    """
    if sizes is None:
        if len(names) < len(SPLITS):
            raise DataError(
                f"{source}: {len(names)} classes found, but at least {len(SPLITS)} are needed, one "
                "for each of train, validation and test; add classes, or check the path"
            )
        validation, test = (max(1, round(share * len(names))) for share in (0.16, 0.20))
        sizes = (len(names) - validation - test, validation, test)
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
    left = iter(ordered)
    return {split: sorted(islice(left, size)) for split, size in zip(SPLITS, sizes, strict=True)}


def class_index(sizes: Mapping[str, int], lists: ClassLists) -> dict[str, Any]:
    """Return names, starts and splits of classes with these sizes; empty splits are left out."""
    ids = {name: class_id for class_id, name in enumerate(sizes)}
    return {
        "class_names": tuple(sizes),
        "class_starts": np.cumsum([0, *sizes.values()], dtype=np.int64),
        "splits": {
            split: np.asarray([ids[name] for name in names], np.int64)
            for split, names in lists.items()
            if names
        },
    }


@dataclass(frozen=True)
class PixelNormalization:
    """Per-channel mean and standard deviation of pixels scaled to [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Augmentation:
    """A random affine map, crop, flip and change of colors, drawn for every image on its own.

    A factor for brightness b is drawn from [1 - b, 1 + b], and likewise the others.
    """

    crop_padding: int = 0  # black pixels added on all sides before a crop of the original size
    flip_probability: float = 0.0  # how often an image is mirrored left to right
    brightness: float = 0.0  # multiplies pixels
    contrast: float = 0.0  # multiplies distances from the image's mean gray value
    saturation: float = 0.0  # multiplies distances from the pixel's gray value; 0 for gray images
    affine: float = 0.0  # how far a map of the plane, -1 to 1 each way, is from the identity

    def __call__(self, pixels: Tensor, random: Randomness) -> Tensor:
        """Return varied copies of pixels 0…255, uint8 or float ``[B, C, H, W]`` channels-last."""
        if self.affine:
            pixels = self._map(pixels, random)
        if self.crop_padding or self.flip_probability:
            pixels = self._crop_and_flip(pixels, random)
        if self.brightness or self.contrast or self.saturation:
            pixels = self._change_colors(pixels, random)
        return pixels

    def _map(self, pixels: Tensor, random: Randomness) -> Tensor:
        """Show at x in [-1, 1]² what was at (I + M)x + t, or black; M and t are in [-a, a]."""
        drawn = self.affine * (2 * uniform(random, len(pixels), 6) - 1)
        maps = torch.cat([torch.eye(2).flatten() + drawn[:, :4], drawn[:, 4:]], 1)
        maps = maps.view(-1, 3, 2).mT.to(pixels.device)  # the columns of I + M, then t
        places = F.affine_grid(maps, list(pixels.shape), align_corners=False)
        found = F.grid_sample(pixels.float(), places, align_corners=False)
        if not pixels.is_floating_point():
            found = found.round_()
        return found.to(pixels.dtype).contiguous(memory_format=torch.channels_last)

    def _crop_and_flip(self, pixels: Tensor, random: Randomness) -> Tensor:
        """Choose, for every image, one window of its padded original or mirror image."""
        batch, _, height, width = pixels.shape
        padding = self.crop_padding
        top, left = integers(random, 2 * padding + 1, batch, 2).to(pixels.device).unbind(1)
        mirrored = uniform(random, batch) < self.flip_probability
        padded = F.pad(pixels.permute(0, 2, 3, 1), (0, 0, *[padding] * 4))
        both = torch.stack([padded, padded.flip(2)])  # [2, B, H + 2P, W + 2P, C]
        windows = both.unfold(2, height, 1).unfold(3, width, 1)  # [2, B, 2P+1, 2P+1, C, H, W]
        images = torch.arange(batch, device=pixels.device)
        chosen: Tensor = windows[mirrored.long().to(pixels.device), images, top, left]
        return chosen.contiguous(memory_format=torch.channels_last)

    def _change_colors(self, pixels: Tensor, random: Randomness) -> Tensor:
        """Change saturation, then contrast, then brightness, and clip once at the end.

        With gray value ``g = wᵀx``, its mean ``m`` over the image and factors ``s, c, b``, a pixel
        ``x`` becomes ``b (c (s x + (1 - s) g) + (1 - c) m)``.
        """
        batch, channels, height, width = pixels.shape
        ranges = torch.tensor([self.brightness, self.contrast, self.saturation])
        factors = 1 + ranges * (2 * uniform(random, batch, 3) - 1)
        b, c, s = factors.to(pixels.device).split(1, 1)  # each [B, 1]
        weights = torch.tensor(LUMA if channels == 3 else [1 / channels] * channels)
        values = pixels.permute(0, 2, 3, 1).flatten(1, 2).float()  # [B, HW, C]
        gray = values @ weights.to(pixels.device)  # [B, HW]
        constant = b * (1 - c) * gray.mean(1, keepdim=True)  # [B, 1]
        if not pixels.is_floating_point():
            constant += 0.5  # conversion to integers cuts off; so it rounds
        shared = torch.addcmul(constant, gray, b * c * (1 - s))  # [B, HW], for all channels
        changed = torch.addcmul(shared.unsqueeze(2), values, (b * c * s).unsqueeze(2))
        changed = changed.clamp_(0, 255).to(pixels.dtype)
        return changed.view(batch, height, width, channels).permute(0, 3, 1, 2)


NO_AUGMENTATION = Augmentation()


def natural(crop_padding: int) -> Augmentation:
    """Return the usual preset for photographs: padded crop, mirror, and colors within 40%."""
    return Augmentation(crop_padding, 0.5, brightness=0.4, contrast=0.4, saturation=0.4)


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """Samples of one shape, stored class after class; image ids are positions of samples."""

    name: str  # what the user calls it, e.g. glyphs
    class_names: tuple[str, ...]  # a class id is a position in this tuple
    class_starts: Ids  # [num_classes + 1]; class c owns samples starts[c]:starts[c + 1]
    splits: Mapping[Split, Ids]  # the class ids of each split; splits are disjoint
    origin: str = ""  # where the samples came from, for people

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as the model sees it."""

    @abstractmethod
    def load(self, image_ids: Tensor | Ids) -> Tensor:
        """Return the samples of ``image_ids`` as they are stored, ``[*image_ids.shape, ...]``."""

    def augment(
        self,
        samples: Tensor,
        random: Randomness,  # noqa: ARG002 - contract
        colors: bool = True,  # noqa: ARG002 - contract
        affine: float = 0.0,  # noqa: ARG002 - contract
    ) -> Tensor:
        """Vary loaded training samples, each on its own; features stay as they are.

        ``colors`` says whether to vary colors too, ``affine`` how far affine maps may be from the
        identity.
        """
        return samples

    def normalize(self, samples: Tensor) -> Tensor:
        """Turn loaded samples into the floats that the model expects."""
        return samples

    @property
    def num_samples(self) -> int:
        """Number of samples of all classes."""
        return int(self.class_starts[-1])

    @property
    def class_sizes(self) -> Ids:
        """Number of samples of every class."""
        return np.diff(self.class_starts)

    def classes(self, split: Split) -> Ids:
        """Return the class ids of ``split``, or say which splits there are."""
        if split not in self.splits:
            known = ", ".join(self.splits)
            raise DataError(f"split: {self.name} has the splits {known}; got {split!r}")
        return self.splits[split]

    def image_ids(self, class_id: int) -> Ids:
        """Return the positions of the samples of class ``class_id``."""
        return np.arange(self.class_starts[class_id], self.class_starts[class_id + 1])

    def split_ids(self, split: Split) -> Ids:
        """Return the positions of all samples of ``split``, class after class."""
        return np.concatenate([self.image_ids(class_id) for class_id in self.classes(split)])


@dataclass(frozen=True, kw_only=True)
class ImageDataset(Dataset):
    """Images of one size, stored class after class."""

    images: Pixels  # [num_images, height, width, channels], possibly memory-mapped
    normalization: PixelNormalization  # applied when pixels become floats
    augmentation: Augmentation = NO_AUGMENTATION  # how training images are varied

    @cached_property
    def _constants(self) -> list[Tensor]:
        # 255 × mean and std as full images [C, H, W]: arithmetic between equal layouts is eight
        # times as fast as broadcasting three numbers along the innermost axis.
        _, height, width = self.image_shape
        constants = torch.tensor([self.normalization.mean, self.normalization.std]) * 255
        return [one.repeat(height, width, 1).permute(2, 0, 1) for one in constants]

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """``(channels, height, width)``, as a backbone sees it."""
        _, height, width, channels = self.images.shape
        return channels, height, width

    image_shape = input_shape

    def load(self, image_ids: Tensor | Ids) -> Tensor:
        """Return uint8 ``[*image_ids.shape, C, H, W]``, channels-last in memory as stored."""
        positions = np.asarray(image_ids)
        pixels = torch.from_numpy(self.images[positions.reshape(-1)])  # [B, H, W, C]
        return pixels.permute(0, 3, 1, 2).view(*positions.shape, *self.image_shape)

    def augment(
        self, pixels: Tensor, random: Randomness, colors: bool = True, affine: float = 0.0
    ) -> Tensor:
        """Vary training images ``[..., C, H, W]``; ``affine`` replaces the dataset's own."""
        augmentation = replace(self.augmentation, affine=affine or self.augmentation.affine)
        if not colors:
            augmentation = replace(augmentation, brightness=0.0, contrast=0.0, saturation=0.0)
        return augmentation(pixels.flatten(0, -4), random).view(pixels.shape)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Turn uint8 pixels ``[..., C, H, W]`` into normalized floats of the same shape."""
        mean, std = (constant.to(pixels.device) for constant in self._constants)
        return torch.sub(pixels, mean).div_(std)


@dataclass(frozen=True, kw_only=True)
class FeatureDataset(Dataset):
    """Feature vectors that some encoder made once; the model needs no backbone for them."""

    features: npt.NDArray[np.floating[Any]]  # [num_samples, D], possibly memory-mapped

    @property
    def input_shape(self) -> tuple[int]:
        """``(D,)``."""
        return (self.features.shape[1],)

    def load(self, image_ids: Tensor | Ids) -> Tensor:
        """Return the features of ``image_ids`` as float32 ``[*image_ids.shape, D]``."""
        positions = np.asarray(image_ids)
        rows = self.features[positions.reshape(-1)].astype(np.float32, copy=False)
        return torch.from_numpy(rows).view(*positions.shape, *self.input_shape)
