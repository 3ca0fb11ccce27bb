"""Labeled samples, images or features, grouped by class, and classes grouped by split."""

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
from torch import Tensor

from vsm.data.augmentation import NO_AUGMENTATION, Augmentation
from vsm.errors import DataError
from vsm.seeding import Randomness

Split = Literal["train", "validation", "test", "all"]
"""``all`` are the classes of all splits, where a dataset is opened as a whole."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
ClassLists = dict[Split, list[str]]
Pixels = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


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
    """Return the arguments of a dataset with classes of these sizes; empty splits are left out."""
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
        """Vary loaded training samples, each on its own; features stay as they are."""
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
