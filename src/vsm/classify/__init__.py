"""Using trained models: images and examples in, answers and reasons out."""

from vsm.classify.classifier import NONE_OF_THESE, FewShotClassifier
from vsm.classify.fitted import Recalled
from vsm.classify.labeling import Suggestion

__all__ = ["NONE_OF_THESE", "FewShotClassifier", "Recalled", "Suggestion"]
