"""Supervised training of a backbone on all training classes, for ``vsm train`` to begin with."""

from vsm.pretraining.loop import FewShotScores, pretrain

__all__ = ["FewShotScores", "pretrain"]
