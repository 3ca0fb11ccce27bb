"""Using trained models: pictures and examples in, answers out. No mathematics of its own."""

from vsm.serving.estimator import NONE_OF_THESE, FewShotClassifier
from vsm.serving.explanation import Explanation, Recalled, Uncertainty
from vsm.serving.pictures import PictureFormat
from vsm.serving.pretrained import Pretrained, open_pretrained

__all__ = [
    "NONE_OF_THESE",
    "Explanation",
    "FewShotClassifier",
    "PictureFormat",
    "Pretrained",
    "Recalled",
    "Uncertainty",
    "open_pretrained",
]
