"""Soft k-means on the queries, started at the means of the support set."""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from vsm_lab.transductive.contract import TransductiveBaseline, grid, squared_distances


class SoftKMeans(TransductiveBaseline):
    """Meta-learning for semi-supervised few-shot classification (Ren et al. 2018).

    A query x belongs to class n with the probability z_n = softmax_n(−|x − p_n|² / temperature),
    and joins its prototype with that weight, a support image with weight 1:

        p_n ← (Σ_support x + Σ_queries z_n x) / (K + Σ_queries z_n).

    Adapted: the unlabeled images are the queries themselves; the encoder, which the paper trains
    together with one such step, is fixed, so distances have a temperature, and there may be more
    steps. Left out: the paper's distractor cluster and masking, whose parameters are learned.
    """

    label = "soft-kmeans"
    defaults: ClassVar = {"temperature": 0.1, "steps": 4}
    candidates = grid(temperature=[0.4, 0.2, 0.1, 0.05], steps=[1, 4, 16])

    def solve(self, support: Tensor, queries: Tensor) -> Tensor:
        """See :class:`TransductiveBaseline`."""
        prototypes = support.mean(2)  # [T, N, D]
        scores = self._scores(queries, prototypes)
        for _ in range(int(self.chosen["steps"])):
            assigned = F.softmax(scores, -1)  # z [T, B, N]
            counts = support.shape[2] + assigned.sum(1)  # [T, N]
            prototypes = (support.sum(2) + assigned.mT @ queries) / counts.unsqueeze(-1)
            scores = self._scores(queries, prototypes)
        return F.log_softmax(scores, -1)

    def _scores(self, queries: Tensor, prototypes: Tensor) -> Tensor:
        return -squared_distances(queries, prototypes) / self.chosen["temperature"]
