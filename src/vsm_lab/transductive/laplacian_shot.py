"""Prototypes, and a graph that makes neighboring queries agree."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm_lab.transductive.contract import TransductiveBaseline, grid, squared_distances, unit
from vsm_lab.transductive.graph import ROUNDING, neighbor_weights

RECTIFYING_SHARPNESS = 10


class LaplacianShot(TransductiveBaseline):
    """Laplacian regularized few-shot learning (Ziko, Dolz, Granger and Ben Ayed 2020).

    Assignments y of the queries minimize, with d_n the squared distance to the prototype,

        Σ_i y_i · (log y_i + d_i) − λ/2 Σ_ij w_ij y_i · y_j,

    by bound updates y_i ← softmax(−d_i + λ Σ_j w_ij y_j), from y_i = softmax(−d_i). The paper has W
    positive semi-definite; no update raises the objective if no eigenvalue of W is below −2/λ.

    Adapted: w is 1 for mutual neighbors and ½ for one-sided ones, because only a symmetric graph
    has this objective (the authors' code has 1 for the neighbors of i, whatever those of j are); a
    fixed number of steps. Prototypes are rectified, as the paper does, only if ``rectify`` is 1:
    queries are moved by the difference of the means of support and queries, which presumes classes
    of equal size.
    """

    label = "laplacian-shot"
    defaults: ClassVar = {"neighbors": 3, "smoothness": 0.7, "rectify": 0, "steps": 20}
    candidates = grid(neighbors=[3, 5], smoothness=[0.3, 0.5, 0.7], rectify=[0, 1])
    graphs = 6

    def solve(self, support: Tensor, queries: Tensor) -> Tensor:
        """See :class:`TransductiveBaseline`."""
        prototypes = support.mean(2)
        if self.chosen["rectify"]:
            queries = queries + support.mean((1, 2)).unsqueeze(1) - queries.mean(1, keepdim=True)
            prototypes = rectified(support, queries)
        distances = squared_distances(queries, prototypes)
        graph = neighbor_weights(queries, int(self.chosen["neighbors"]))
        graph = self.chosen["smoothness"] / 2 * (graph + graph.mT)  # λ W [T, B, B]
        scores = -distances
        for _ in range(int(self.chosen["steps"])):
            scores = graph @ F.softmax(scores, -1) - distances
        return F.log_softmax(scores, -1)


def rectified(support: Tensor, queries: Tensor) -> Tensor:
    """Means ``[T, N, D]`` of all images nearest to each prototype by cosine.

    An image weighs what the softmax of 10 cosines gives to the class, and the sum is divided by the
    number of images, as in the authors' code. A class that is nearest to none keeps its prototype.
    """
    prototypes = support.mean(2)
    images = torch.cat([support.flatten(1, 2), queries], 1)
    cosines = unit(images) @ unit(prototypes).mT  # [T, S + B, N]
    slack = ROUNDING * torch.finfo(images.dtype).eps
    nearest = (cosines >= cosines.amax(-1, keepdim=True) - slack).to(images)
    shares = nearest * F.softmax(RECTIFYING_SHARPNESS * cosines, -1)
    counts = nearest.sum(1).unsqueeze(-1)  # [T, N, 1]
    means = shares.mT @ images / counts.clamp_min(1)
    return torch.where(counts > 0, means, prototypes)
