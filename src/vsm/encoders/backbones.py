"""The networks that turn images into features: built in, the user's own, or pretrained.

The user's own is named ``module:attribute``. The attribute is called with the image shape
``(C, H, W)`` and returns a ``torch.nn.Module`` that maps images ``[B, C, H, W]`` to features
``[B, D]``. Its module is imported only here, and only if the user has named it.
"""

import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vsm.data.images import Preprocessing
from vsm.encoders.networks import Conv4, ResNet12, WideResNet, subsample_strided_1x1
from vsm.encoders.pretrained import (
    VARIANTS,
    EfficientNetLite,
    checked_preprocessing,
    load_pretrained,
    network_digest,
    reported_as,
)
from vsm.errors import BackboneError
from vsm.seeding import Randomness, default_generator, integers
from vsm.settings import ModelSettings

DRY_RUN_BATCH = 2  # images; more than one, to tell the batch from the features


class CustomBackbone(nn.Module):
    """Makes a backbone of a module that knows nothing about this package.

    The module ``name`` is searched in the current folder and among installed packages, as by
    ``python -m``. Whatever is wrong with it is a ``BackboneError`` of one line.
    """

    def __init__(self, name: str, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        with _current_folder_on_path():
            factory = _load_factory(name)
            remedy = "; it is called with the image shape (C, H, W)"
            with reported_as(f"backbone: {name}({image_shape}) failed with", remedy):
                network = factory(image_shape)
            if not isinstance(network, nn.Module):
                raise BackboneError(
                    f"backbone: {name} returned {_kind(network)}, expected a torch.nn.Module"
                )
            self.network = network
            self.num_features = count_features(network, name, image_shape)
        subsample_strided_1x1(network)  # after the dry run, which initializes lazy layers
        for key, value in network.state_dict().items():
            if not isinstance(value, Tensor):
                raise BackboneError(
                    f"backbone: the state {key!r} of {name} is {_kind(value)}, and only tensors "
                    "can be saved; leave it out of its state_dict"
                )

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Map images ``[B, C, H, W]`` to features ``[B, num_features]`` of the same dtype.

        In training ``random`` seeds torch's global generator while the module runs.
        """
        if not self.training or random is None:
            return self._features(images)
        seed = integers(random, 2**62, len(images))[0].item()
        with default_generator(int(seed), "own backbone"):
            return self._features(images)

    def _features(self, images: Tensor) -> Tensor:
        # In the default layout, so that `view` works. `contiguous` is not enough: channels-last
        # strides of images of one channel count as contiguous and would stay.
        images = images.flatten().view(images.shape)
        features: Tensor = self.network(images)
        return features.to(images.dtype)


class FrozenEncoder(nn.Module):
    """Makes a backbone without parameters of a pretrained network.

    A run directory holds at most the digest of its weights, to notice others of the same name.
    """

    network: nn.Module
    digest: Tensor  # of the weights, [32] bytes; absent if the name identifies them

    def __init__(
        self, network: nn.Module, num_features: int, name: str, digest: bytes | None = None
    ) -> None:
        super().__init__()
        object.__setattr__(self, "network", network.eval().requires_grad_(False))  # not a child
        self.num_features = num_features
        self.name = name
        if digest is not None:
            self.register_buffer("digest", torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:  # noqa: ARG002 - contract
        """Map images ``[B, C, H, W]`` to features ``[B, num_features]``."""
        features: Tensor = self.network(images)
        return features

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """Apply ``fn`` to the network too, which is not a child."""
        self.network._apply(fn, recurse)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        """Refuse the digest of other weights."""
        stored, own = state_dict.get(f"{prefix}digest"), self._buffers.get("digest")
        if stored is not None and own is not None and not torch.equal(stored.cpu(), own.cpu()):
            new, old = (bytes(one.tolist()).hex()[:12] for one in (own, stored))
            raise BackboneError(
                f"encoder: {self.name} has other weights than those whose features were "
                f"remembered (SHA-256 {new}, expected {old}); use the version with the old weights"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)


BuiltInBackbone = Conv4 | ResNet12 | WideResNet
Backbone = BuiltInBackbone | CustomBackbone | FrozenEncoder

BACKBONES: dict[str, type[BuiltInBackbone]] = {
    "conv4": Conv4,
    "resnet12": ResNet12,
    "wrn28_10": WideResNet,
}


def build_backbone(
    settings: ModelSettings, image_shape: tuple[int, int, int], network: nn.Module | None = None
) -> Backbone:
    """Build the backbone that the settings name; the only place where backbones are built.

    ``network`` is that of a frozen encoder, if :func:`load_pretrained` was called before.
    """
    name = settings.backbone
    if settings.own_backbone is not None:
        return CustomBackbone(settings.own_backbone, image_shape)
    if settings.is_frozen_encoder:
        side = VARIANTS[name].side if name in VARIANTS else None
        if side is not None and tuple(image_shape) != (3, side, side):
            raise BackboneError(
                f"backbone: {name} takes images [3, {side}, {side}], got {list(image_shape)}; it "
                f"is frozen: learn a memory of its features with vsm memory learn --encoder {name}"
            )
        network = load_pretrained(name) if network is None else network
        if isinstance(network, EfficientNetLite):
            return FrozenEncoder(network, network.num_features, name)
        width = count_features(network, name, image_shape)
        return FrozenEncoder(network, width, name, network_digest(network))
    return BACKBONES[name](image_shape, settings.channels, settings.keep_probability)


@torch.no_grad()
def count_features(network: nn.Module, name: str, image_shape: tuple[int, int, int]) -> int:
    """Return the number of features, found by a dry run; ``num_features`` must agree, if any."""
    batch, shape = DRY_RUN_BATCH, [DRY_RUN_BATCH, *image_shape]
    problem = f"backbone: the module of {name} failed on images {shape} with"
    with evaluation_mode(network), reported_as(problem):
        features: Any = network(torch.zeros(shape))
    got, width = _kind(features), 0
    if isinstance(features, Tensor):
        got = f"{str(features.dtype).removeprefix('torch.')} {list(features.shape)}"
        if features.shape[:-1] == (batch,) and features.is_floating_point():
            width = features.shape[1]
    if not width:
        expected = f"floating-point features [{batch}, D] from images {shape}"
        raise BackboneError(f"backbone: {name} gave {got}, expected {expected}")
    declared = getattr(network, "num_features", width)
    if declared != width:
        raise BackboneError(
            f"backbone: {name} says num_features = {declared!r}, but gave [{batch}, {width}] from "
            f"images {shape}; leave its classifier out, or correct num_features"
        )
    return width


def custom_preprocessing(name: str) -> Preprocessing | None:
    """Return the ``preprocessing`` attribute of the user's own ``module:attribute``, if any."""
    with _current_folder_on_path():
        stated = getattr(_load_factory(name), "preprocessing", None)
    return None if stated is None else checked_preprocessing(name, stated)


def _load_factory(name: str) -> Callable[[tuple[int, int, int]], object]:
    """Import what ``module:attribute`` names; the current folder must be on the path already."""
    module_name, _, attribute = name.partition(":")
    problem = f"backbone: importing {module_name!r} for {name} failed with"
    with reported_as(problem, f'; `python -c "import {module_name}"` shows where'):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise BackboneError(
                f"backbone: there is no module {module_name!r} for {name}, neither in "
                f"{Path.cwd()} nor among installed packages; run vsm where it is, or install it"
            ) from error
    try:
        factory: Any = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise BackboneError(
            f"backbone: module {module_name!r} has no {attribute!r}; name a function or class "
            "that it has, as module:attribute"
        ) from error
    if isinstance(factory, nn.Module) or not callable(factory):
        raise BackboneError(
            f"backbone: {name} is {_kind(factory)}, expected a function or class that is called "
            "with the image shape (C, H, W) and returns a torch.nn.Module"
        )
    return factory  # type: ignore[no-any-return]


@contextmanager
def evaluation_mode(model: nn.Module | None) -> Iterator[None]:
    """Put ``model``, if any, in evaluation mode inside the block and restore its mode after."""
    if model is None or not any(module.training for module in model.modules()):
        yield  # asking is faster than setting all modes
        return
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Make modules of the current folder importable inside the block, as ``python -m`` does."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"
