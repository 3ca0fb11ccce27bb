"""The networks that turn images into features, by name."""

from torch import nn

from vsm.data.preprocessing import Preprocessing
from vsm.encoders.conv4 import Conv4
from vsm.encoders.custom import CustomBackbone, count_features
from vsm.encoders.efficientnet_lite import VARIANTS, EfficientNetLite
from vsm.encoders.frozen import FrozenEncoder
from vsm.encoders.pretrained import (
    load_pretrained,
    network_digest,
    pretrained_preprocessing,
)
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
CROP_PADDING = 32  # pixels that TensorFlow's evaluation of EfficientNet-Lite cuts off


def build_backbone(
    settings: ModelSettings, image_shape: tuple[int, int, int], network: nn.Module | None = None
) -> Backbone:
    """Make the backbone that the settings name; the only place where backbones are made.

    ``settings.channels`` and ``settings.keep_probability`` apply to the built-in ones only. The
    user's own, ``module:attribute``, is imported here and nowhere else. ``network`` is what
    :func:`load_pretrained` returned, if it was called before.
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
        pretrained = load_pretrained(settings.backbone) if network is None else network
        width = count_features(pretrained, settings.backbone, image_shape)
        return FrozenEncoder(pretrained, width, settings.backbone, network_digest(pretrained))
    return BACKBONES[settings.backbone](image_shape, settings.channels, settings.keep_probability)


def frozen_preprocessing(name: str, network: nn.Module | None = None) -> Preprocessing:
    """Return how a frozen encoder wants images.

    EfficientNet-Lite wants their center, as (x − 127) / 128. ``network`` is as in
    :func:`build_backbone`.
    """
    if name not in VARIANTS:
        return pretrained_preprocessing(name, network)
    side = VARIANTS[name].side
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return Preprocessing(side, 3, crop=side / (side + CROP_PADDING), mean=mean, std=std)
