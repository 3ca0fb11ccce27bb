"""Using trained models: pictures and examples in, answers and reasons out."""

from vsm.classify.classifier import NONE_OF_THESE, FewShotClassifier
from vsm.classify.explanation import Explanation, Recalled, Uncertainty

__all__ = ["NONE_OF_THESE", "Explanation", "FewShotClassifier", "Recalled", "Uncertainty"]
