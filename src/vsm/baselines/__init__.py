"""Simple classifiers on fixed features, so that a gain of the memory means something.

They are measured by :func:`vsm.evaluation.evaluator.evaluate_classifier` on the episodes that every
model sees. This package knows features and nothing of models.
"""

from collections.abc import Callable, Mapping
from functools import partial

from vsm.baselines.adapter import ProtoNetAdapter
from vsm.baselines.calibration import DistributionCalibration
from vsm.baselines.centroids import SimpleShot
from vsm.baselines.contract import BaseFeatures, BaseFeaturesSource, Baseline
from vsm.baselines.logistic import LogisticRegression, fit_logistic_regression
from vsm.baselines.neighbors import NearestNeighbor
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
