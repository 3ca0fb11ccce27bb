"""Using trained models: pictures and examples in, answers out. No mathematics of its own."""

from vsm.classify.estimator import NONE_OF_THESE, FewShotClassifier
from vsm.classify.explanation import Explanation, Recalled, Uncertainty
from vsm.classify.pictures import PictureFormat
from vsm.classify.pretrained import Pretrained, open_pretrained

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
