"""Published transductive few-shot classifiers on fixed features, to compare the memory with.

Each classifies the queries of a task together. Hyper-parameters come from ``candidates``, of which
validation classes choose one.
"""

from collections.abc import Mapping

from vsm_lab.transductive.contract import TransductiveBaseline
from vsm_lab.transductive.label_propagation import LabelPropagation
from vsm_lab.transductive.laplacian_shot import LaplacianShot
from vsm_lab.transductive.pt_map import PowerTransformMap
from vsm_lab.transductive.soft_kmeans import SoftKMeans
from vsm_lab.transductive.stat_a import StatA
from vsm_lab.transductive.tim import AlphaTim, Tim

__all__ = ["TRANSDUCTIVE", "TransductiveBaseline"]

TRANSDUCTIVE: Mapping[str, type[TransductiveBaseline]] = {
    method.label: method
    for method in (
        SoftKMeans,
        Tim,
        AlphaTim,
        LaplacianShot,
        PowerTransformMap,
        StatA,
        LabelPropagation,
    )
}
"""The methods by their names on the command line."""
