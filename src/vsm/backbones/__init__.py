"""Feature extractors. The package imports no sibling; its randomness is passed in."""

from vsm.backbones.conv4 import Conv4
from vsm.backbones.custom import CustomBackbone
from vsm.backbones.resnet12 import ResNet12
from vsm.backbones.wrn28_10 import WideResNet
from vsm.settings import ModelSettings

BuiltInBackbone = Conv4 | ResNet12 | WideResNet
Backbone = BuiltInBackbone | CustomBackbone

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
    return BACKBONES[settings.backbone](image_shape, settings.channels, settings.keep_probability)


__all__ = [
    "BACKBONES",
    "Backbone",
    "BuiltInBackbone",
    "Conv4",
    "CustomBackbone",
    "ResNet12",
    "WideResNet",
    "build_backbone",
]
