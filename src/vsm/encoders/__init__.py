"""From images to features: backbones, pretrained networks, and the :class:`Encoder`."""

from vsm.encoders.backbones import (
    BACKBONES,
    Backbone,
    BuiltInBackbone,
    FrozenEncoder,
    build_backbone,
)
from vsm.encoders.conv4 import Conv4
from vsm.encoders.custom import CustomBackbone
from vsm.encoders.efficientnet_lite import EfficientNetLite
from vsm.encoders.encoder import Encoder, EncoderIdentity, evaluation_mode
from vsm.encoders.resnet12 import ResNet12
from vsm.encoders.wrn28_10 import WideResNet

__all__ = [
    "BACKBONES",
    "Backbone",
    "BuiltInBackbone",
    "Conv4",
    "CustomBackbone",
    "EfficientNetLite",
    "Encoder",
    "EncoderIdentity",
    "FrozenEncoder",
    "ResNet12",
    "WideResNet",
    "build_backbone",
    "evaluation_mode",
]
