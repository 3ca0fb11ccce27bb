"""A backbone of the user's own, named ``module:attribute``.

The attribute is called with the image shape ``(C, H, W)`` and returns a ``torch.nn.Module`` that
maps images ``[B, C, H, W]`` to features ``[B, D]``. Its module is imported only here, and only if
the user has named it.
"""

import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vsm.data.preprocessing import Preprocessing
from vsm.encoders.parts import subsample_strided_1x1
from vsm.errors import BackboneError
from vsm.seeding import Randomness, default_generator, integers

DRY_RUN_BATCH = 2  # images; more than one, to tell the batch from the features
SEED_LIMIT = 2**62


class CustomBackbone(nn.Module):
    """Makes a backbone of a module that knows nothing about this package.

    Attributes:
        network: the user's module.
        num_features: D, found by one dry run in evaluation mode. If the module has a
            ``num_features`` of its own, the two must agree.

    Args:
        name: ``module:attribute``; the module is searched in the current folder and among
            installed packages, as by ``python -m``.
        image_shape: ``(channels, height, width)`` of the input.

    Raises:
        BackboneError: in one line, whatever is wrong with the user's code.
    """

    def __init__(self, name: str, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        with _current_folder_on_path():
            factory, remedy = _load_factory(name), "; it is called with the image shape (C, H, W)"
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

        In training ``random`` seeds torch's global generator while the module runs, so that its
        dropout is repeatable; the generator's state is restored.
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


@torch.no_grad()
def count_features(network: nn.Module, name: str, image_shape: tuple[int, int, int]) -> int:
    """Return the number of features, found by a dry run on blank images."""
    shape = [DRY_RUN_BATCH, *image_shape]
    was_training = network.training
    network.eval()
    with reported_as(f"backbone: the module of {name} failed on images {shape} with"):
        features: Any = network(torch.zeros(shape))
    network.train(was_training)
    got = _kind(features)
    if isinstance(features, Tensor):
        got = f"{str(features.dtype).removeprefix('torch.')} {list(features.shape)}"
        rows, width = features.shape if features.ndim == 2 else (0, 0)
        if rows == DRY_RUN_BATCH and width and features.is_floating_point():
            declared = getattr(network, "num_features", width)
            if declared == width:
                return width
            raise BackboneError(
                f"backbone: {name} says num_features = {declared!r}, but gave [{rows}, {width}] "
                f"from images {shape}; leave its classifier out, or correct num_features"
            )
    raise BackboneError(
        f"backbone: {name} gave {got}, expected floating-point features [{DRY_RUN_BATCH}, D] from "
        f"images {shape}"
    )


def custom_preprocessing(name: str) -> Preprocessing | None:
    """Return the ``preprocessing`` attribute of the user's own ``module:attribute``, if any."""
    with _current_folder_on_path():
        stated = getattr(_load_factory(name), "preprocessing", None)
    if stated is None:
        return None
    known = {field.name for field in fields(Preprocessing)}
    if not isinstance(stated, Mapping) or "side" not in stated or not known.issuperset(stated):
        raise BackboneError(
            f"encoder: {name}.preprocessing: expected a dictionary with side, and perhaps "
            f"{', '.join(sorted(known - {'side'}))}, got {stated!r:.100}"
        )
    return checked_preprocessing(name, stated)


def checked_preprocessing(name: str, stated: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing that the encoder ``name`` states; images have color by default."""
    defaults = {"channels": 3, "ink": False, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    try:
        return Preprocessing.from_dict({**defaults, **stated})
    except (TypeError, ValueError) as error:
        raise BackboneError(
            f"encoder: {name} has an invalid preprocessing ({error}); see its configuration"
        ) from error


@contextmanager
def reported_as(problem: str, remedy: str = "") -> Iterator[None]:
    """Turn any error inside the block into one line: problem, type, first line, remedy."""
    try:
        yield
    except BackboneError:
        raise
    except Exception as error:  # the code is not ours, and may raise anything
        first = str(error).strip().partition("\n")[0]
        described = f"{type(error).__name__}: {first}".removesuffix(": ")
        raise BackboneError(f"{problem} {described}{remedy}") from error


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
