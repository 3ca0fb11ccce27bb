"""A backbone of the user's own, named ``module:attribute``.

The attribute is called with the image shape ``(C, H, W)`` and returns a ``torch.nn.Module`` that
maps images ``[B, C, H, W]`` to features ``[B, D]``. Nothing is imported before a
:class:`CustomBackbone` is built, and nobody builds one that the user has not named.
"""

import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vsm.encoders.parts import subsample_strided_1x1
from vsm.errors import BackboneError
from vsm.seeding import Randomness, default_generator, integers

DRY_RUN_BATCH = 2  # images; more than one, to tell the batch from the features
SEED_LIMIT = 2**62


class CustomBackbone(nn.Module):
    """Wraps a module that knows nothing of this package, so that it is a backbone.

    Attributes:
        network: the user's module.
        num_features: D, found by one dry run in evaluation mode. If the module has a
            ``num_features`` of its own, the two must agree.

    Args:
        name: ``module:attribute``; the module is found as by ``python -m``, that is in the current
            folder or among installed packages.
        image_shape: ``(channels, height, width)`` of the input.

    Raises:
        BackboneError: in one line, whatever is wrong with the user's code.
    """

    def __init__(self, name: str, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        with current_folder_on_path():
            self.network = _build(name, image_shape)
            self.num_features = count_features(self.network, name, image_shape)
        subsample_strided_1x1(self.network)  # after the dry run, which makes lazy layers
        _require_tensors(self.network, name)

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Map images ``[B, C, H, W]`` to features ``[B, num_features]`` of the same dtype.

        In training ``random`` seeds torch's global generator while the module runs, so that its
        dropout is repeatable; the generator's state is put back.
        """
        if not self.training or random is None:
            return self._features(images)
        seed = integers(random, SEED_LIMIT, len(images))[0].item()
        with default_generator(int(seed), "own backbone"):
            return self._features(images)

    def _features(self, images: Tensor) -> Tensor:
        # In the default layout, so that `view` works. `contiguous` is not enough: channels-last
        # strides of images of one channel count as contiguous and would stay.
        images = images.flatten().view(images.shape)
        features: Tensor = self.network(images)
        return features.to(images.dtype)


def load_factory(name: str) -> Callable[[tuple[int, int, int]], object]:
    """Import what ``module:attribute`` names; the current folder must be on the path already."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if _is_missing(module_name, error):
            raise BackboneError(
                f"backbone: there is no module {module_name!r} for {name}, neither in "
                f"{Path.cwd()} nor among installed packages; run vsm where it is, or install it"
            ) from error
        raise BackboneError(
            f"backbone: importing {module_name!r} for {name} failed with {_described(error)}; "
            f'`python -c "import {module_name}"` shows where'
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
def current_folder_on_path() -> Iterator[None]:
    """Let modules of the current folder be imported inside the block, as ``python -m`` does."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _build(name: str, image_shape: tuple[int, int, int]) -> nn.Module:
    factory = load_factory(name)
    try:
        network = factory(image_shape)
    except Exception as error:
        raise BackboneError(
            f"backbone: {name}({image_shape}) failed with {_described(error)}; it is called with "
            "the image shape (C, H, W)"
        ) from error
    if not isinstance(network, nn.Module):
        raise BackboneError(
            f"backbone: {name} returned {_kind(network)}, expected a torch.nn.Module"
        )
    return network


@torch.no_grad()
def count_features(network: nn.Module, name: str, image_shape: tuple[int, int, int]) -> int:
    """Embed blank images and return the number of features, or say what came instead."""
    shape = [DRY_RUN_BATCH, *image_shape]
    was_training = network.training
    network.eval()
    try:
        features: object = network(torch.zeros(shape))
    except Exception as error:
        raise BackboneError(
            f"backbone: the module of {name} failed on images {shape} with {_described(error)}"
        ) from error
    network.train(was_training)
    wanted = f"expected floating-point features [{DRY_RUN_BATCH}, D] from images {shape}"
    if not isinstance(features, Tensor):
        raise BackboneError(f"backbone: {name} gave {_kind(features)}, {wanted}")
    if (
        features.ndim != 2
        or len(features) != DRY_RUN_BATCH
        or not features.shape[1]
        or not features.is_floating_point()
    ):
        raise BackboneError(
            f"backbone: {name} gave {str(features.dtype).removeprefix('torch.')} "
            f"{list(features.shape)}, {wanted}"
        )
    num_features = features.shape[1]
    declared = getattr(network, "num_features", num_features)
    if declared != num_features:
        raise BackboneError(
            f"backbone: {name} says num_features = {declared!r}, but gave {list(features.shape)} "
            f"from images {shape}; leave its classifier out, or correct num_features"
        )
    return num_features


def _require_tensors(network: nn.Module, name: str) -> None:
    """Refuse state that a run directory, which holds tensors alone, cannot keep."""
    for key, value in network.state_dict().items():
        if not isinstance(value, Tensor):
            raise BackboneError(
                f"backbone: the state {key!r} of {name} is {_kind(value)}, and only tensors can "
                "be saved; leave it out of its state_dict"
            )


def _is_missing(module_name: str, error: Exception) -> bool:
    """Tell a module that is not there from one that fails to find something else."""
    return isinstance(error, ModuleNotFoundError) and (
        error.name == module_name or module_name.startswith(f"{error.name}.")
    )


def _described(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"
