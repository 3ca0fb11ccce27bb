"""Feature extractors. The package imports no sibling; its randomness is passed in."""

from vsm.encoders.conv4 import Conv4
from vsm.encoders.custom import CustomBackbone, count_features
from vsm.encoders.efficientnet_lite import VARIANTS, EfficientNetLite
from vsm.encoders.frozen import FrozenEncoder
from vsm.encoders.pretrained import load_pretrained, network_digest
from vsm.encoders.resnet12 import ResNet12
from vsm.encoders.wrn28_10 import WideResNet
from vsm.errors import BackboneError
from vsm.settings import ModelSettings

BuiltInBackbone = Conv4 | ResNet12 | WideResNet
Backbone = BuiltInBackbone | CustomBackbone | FrozenEncoder

BACKBONES: dict[str, type[BuiltInBackbone]] = {
    "conv4": Conv4,
    "resnet12": ResNet12,
    "wrn28_10": WideResNet,
}


def build_backbone(settings: ModelSettings, image_shape: tuple[int, int, int]) -> Backbone:
    """Make the backbone that the settings name; the only place where backbones are made.

    ``settings.channels`` and ``settings.keep_probability`` shape the built-in ones alone. The
    user's own, ``module:attribute``, is imported here and nowhere else.
    """
    if settings.own_backbone is not None:
        return CustomBackbone(settings.own_backbone, image_shape)
    if settings.backbone in VARIANTS:
        side = VARIANTS[settings.backbone].side
        if tuple(image_shape) != (3, side, side):
            raise BackboneError(
                f"backbone: {settings.backbone} takes images [3, {side}, {side}], got "
                f"{list(image_shape)}; it is frozen: learn a memory of its features with vsm "
                f"memory learn --encoder {settings.backbone}"
            )
        network = EfficientNetLite(settings.backbone)
        return FrozenEncoder(network, EfficientNetLite.num_features, settings.backbone)
    if settings.is_frozen_encoder:
        pretrained = load_pretrained(settings.backbone)
        width = count_features(pretrained, settings.backbone, image_shape)
        return FrozenEncoder(pretrained, width, settings.backbone, network_digest(pretrained))
    return BACKBONES[settings.backbone](image_shape, settings.channels, settings.keep_probability)


__all__ = [
    "BACKBONES",
    "Backbone",
    "BuiltInBackbone",
    "Conv4",
    "CustomBackbone",
    "EfficientNetLite",
    "FrozenEncoder",
    "ResNet12",
    "WideResNet",
    "build_backbone",
]
