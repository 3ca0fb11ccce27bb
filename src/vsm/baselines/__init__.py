"""Simple classifiers on fixed features, to compare the memory with.

:func:`vsm.evaluation.evaluator.evaluate_classifier` measures them on the same episodes as models.
"""

from collections.abc import Callable, Mapping
from functools import partial

from vsm.baselines.adapter import ProtoNetAdapter
from vsm.baselines.base import BaseFeatures, BaseFeaturesSource, Baseline
from vsm.baselines.distribution_calibration import DistributionCalibration
from vsm.baselines.logistic import LogisticRegression, fit_logistic_regression
from vsm.baselines.nearest import NearestNeighbor, SimpleShot
from vsm.settings import BaselineName, BaselineSettings

BASELINES: Mapping[BaselineName, Callable[[BaselineSettings, BaseFeaturesSource], Baseline]] = {
    "simpleshot": SimpleShot,
    "simpleshot_l2n": partial(SimpleShot, transformation="l2n"),
    "simpleshot_un": partial(SimpleShot, transformation="un"),
    "cosine": partial(SimpleShot, transformation="un", distance="cosine"),
    "knn": NearestNeighbor,
    "logistic": LogisticRegression,
    "logistic-tuned": LogisticRegression,  # with C chosen on validation classes
    "calibration": DistributionCalibration,
    "protonet-adapter": ProtoNetAdapter,
}

__all__ = [
    "BASELINES",
    "BaseFeatures",
    "BaseFeaturesSource",
    "Baseline",
    "DistributionCalibration",
    "LogisticRegression",
    "NearestNeighbor",
    "ProtoNetAdapter",
    "SimpleShot",
    "fit_logistic_regression",
]
