"""The networks that turn images into features, by name."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from vsm.encoders.conv4 import Conv4
from vsm.encoders.custom import CustomBackbone, count_features
from vsm.encoders.efficientnet_lite import VARIANTS, EfficientNetLite
from vsm.encoders.pretrained import load_pretrained, network_digest
from vsm.encoders.resnet12 import ResNet12
from vsm.encoders.wrn28_10 import WideResNet
from vsm.errors import BackboneError
from vsm.seeding import Randomness
from vsm.settings import ModelSettings


class FrozenEncoder(nn.Module):
    """Makes a backbone without parameters of a pretrained network.

    A run directory with such a backbone does not contain the weights, but at most their digest, so
    that other weights under the same name are noticed.

    Attributes:
        network: maps images ``[B, C, H, W]`` to features ``[B, D]``.
        num_features: D.
        name: the encoder's name, for messages.
        digest: digest of the weights, ``[32]`` bytes; absent if the name identifies them.
    """

    network: nn.Module
    digest: Tensor

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

    ``settings.channels`` and ``settings.keep_probability`` apply to the built-in ones only.
    ``network`` is that of a frozen encoder, if :func:`load_pretrained` was called before.
    """
    name = settings.backbone
    if settings.own_backbone is not None:
        return CustomBackbone(settings.own_backbone, image_shape)
    if name in VARIANTS:
        side = VARIANTS[name].side
        if tuple(image_shape) != (3, side, side):
            raise BackboneError(
                f"backbone: {name} takes images [3, {side}, {side}], got {list(image_shape)}; it "
                f"is frozen: learn a memory of its features with vsm memory learn --encoder {name}"
            )
        network = load_pretrained(name) if network is None else network
        return FrozenEncoder(network, EfficientNetLite.num_features, name)
    if settings.is_frozen_encoder:
        network = load_pretrained(name) if network is None else network
        width = count_features(network, name, image_shape)
        return FrozenEncoder(network, width, name, network_digest(network))
    return BACKBONES[name](image_shape, settings.channels, settings.keep_probability)
