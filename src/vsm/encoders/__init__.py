"""From images to features: backbones, pretrained networks, and the :class:`Encoder`."""

from vsm.encoders.backbones import (
    BACKBONES,
    Backbone,
    BuiltInBackbone,
    CustomBackbone,
    FrozenEncoder,
    build_backbone,
    evaluation_mode,
)
from vsm.encoders.encoder import Encoder, EncoderIdentity
from vsm.encoders.networks import Conv4, ResNet12, WideResNet

__all__ = [
    "BACKBONES",
    "Backbone",
    "BuiltInBackbone",
    "Conv4",
    "CustomBackbone",
    "Encoder",
    "EncoderIdentity",
    "FrozenEncoder",
    "ResNet12",
    "WideResNet",
    "build_backbone",
    "evaluation_mode",
]
