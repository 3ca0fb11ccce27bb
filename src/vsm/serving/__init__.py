"""Using trained models: pictures and examples in, answers out. No mathematics of its own."""

from vsm.serving.estimator import FewShotClassifier
from vsm.serving.explanation import Explanation, Recalled, Uncertainty
from vsm.serving.pictures import PictureFormat
from vsm.serving.pretrained import Pretrained, open_pretrained

__all__ = [
    "Explanation",
    "FewShotClassifier",
    "PictureFormat",
    "Pretrained",
    "Recalled",
    "Uncertainty",
    "open_pretrained",
]
