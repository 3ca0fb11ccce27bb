"""EM of Gaussian classes on the queries, anchored at the statistics of the support set."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm_lab.transductive.contract import TransductiveBaseline, grid, unit
from vsm_lab.transductive.graph import ROUNDING, neighbor_weights

SMALLEST_VARIANCE = 1e-6  # of an entry of a vector of length one
INNER_STEPS = 5  # of the assignments, which depend on one another through the graph


class StatA(TransductiveBaseline):
    """Realistic test-time adaptation of vision-language models (Zanella et al. 2025), StatA.

    Assignments z of the queries and Gaussians N_n = (μ_n, Σ_n), Σ_n diagonal, minimize by turns

        Σ_i KL(z_i | ŷ_i) − λ/2 Σ_ij w_ij z_i · z_j
            + ω [−Σ_in z_in log N_n(x_i) + α Σ_n KL(N'_n | N_n)].

    ŷ are the predictions before adaptation, w the cosines of neighbors. The last term anchors the
    Gaussians, as α more observations would. With counts b_n = Σ_i z_in and β_n = b_n / (b_n + α),

        z_i ← softmax(log ŷ_i + ω log N(x_i) + λ Σ_j w_ij z_j)
        μ_n ← β_n v_n + (1 − β_n) μ'_n                       v_n: mean of x, weighted by z_n
        Σ_n ← β_n T_n + (1 − β_n) (Σ' + (μ'_n − μ_n)²)       T_n: mean of (x − μ_n)².

    The authors do more than the objective says: ``hard`` counts in b_n the queries that class n is
    most probable for, and ``unit`` scales μ', v and μ to length one. With both 0 no step raises it.

    Adapted, because there is no text: μ'_n is the support's mean, and ŷ the softmax of cosines to
    it (sharpness 100 in CLIP). As in the paper, Σ' is the variance of the queries around μ', by ŷ.
    Added: ``shared`` gives all classes one Σ, the mean of Σ_n weighted by b_n + α, which minimizes
    the same objective. Left out: the authors' code has no log |Σ_n| in the likelihood.
    """

    label = "stat-a"
    defaults: ClassVar = {
        "anchor": 1,  # α
        "sharpness": 3,
        "likelihood": 0.02,  # ω
        "smoothness": 1,  # λ, for the neighbors of a query together
        "neighbors": 3,
        "hard": 1,
        "unit": 1,
        "shared": 0,
        "steps": 10,
    }
    candidates = (
        *grid(anchor=[1, 4], likelihood=[0.01, 0.02], shared=[0, 1]),
        *grid(anchor=[1, 4], sharpness=[10], shared=[1]),
        *grid(anchor=[1, 4], unit=[0], shared=[1]),
    )
    graphs = 6

    def solve(self, support: Tensor, queries: Tensor) -> Tensor:
        """See :class:`TransductiveBaseline`."""
        anchor = self._scale(support.mean(2))  # μ' [T, N, D]
        initial = F.log_softmax(self.chosen["sharpness"] * queries @ unit(anchor).mT, -1)  # log ŷ
        graph = self._graph(queries)
        assigned = initial.exp()  # z [T, B, N]
        spread = _scatter(queries, assigned, anchor).sum(1, keepdim=True) / queries.shape[1]
        spread = spread.clamp_min(SMALLEST_VARIANCE)  # Σ' [T, 1, D]
        mean, variance = anchor, spread.expand_as(anchor)
        for step in range(int(self.chosen["steps"]) + 1):
            if step:
                share = self._shares(assigned)  # β [T, N, 1]
                counts = assigned.sum(1).unsqueeze(-1).clamp_min(torch.finfo(queries.dtype).eps)
                found = self._scale(assigned.mT @ queries / counts)  # v
                mean = self._scale(share * found + (1 - share) * anchor)
                found = _scatter(queries, assigned, mean) / counts  # T
                variance = share * found + (1 - share) * (spread + (anchor - mean).square())
                if self.chosen["shared"]:  # 1 / (1 − β) is in proportion to b + α
                    weights = 1 / (1 - share)
                    variance = (weights * variance).sum(1, keepdim=True) / weights.sum(1, True)
                variance = variance.clamp_min(SMALLEST_VARIANCE).expand_as(anchor)
            fixed = initial + self.chosen["likelihood"] * _log_likelihood(queries, mean, variance)
            for _ in range(INNER_STEPS):
                scores = fixed + graph @ assigned
                assigned = F.softmax(scores, -1)
        return F.log_softmax(scores, -1)

    def _scale(self, means: Tensor) -> Tensor:
        return unit(means) if self.chosen["unit"] else means

    def _graph(self, queries: Tensor) -> Tensor:
        """Return λ W ``[T, B, B]``, symmetric; a negative cosine counts as 0."""
        count = int(self.chosen["neighbors"])
        cosines = (queries @ queries.mT).clamp_min(0)
        graph = neighbor_weights(queries, count) * cosines
        return self.chosen["smoothness"] / (2 * count) * (graph + graph.mT)

    def _shares(self, assigned: Tensor) -> Tensor:
        """Return β ``[T, N, 1]``."""
        if self.chosen["hard"]:
            slack = ROUNDING * torch.finfo(assigned.dtype).eps
            best = (assigned >= assigned.amax(-1, keepdim=True) - slack).to(assigned)
            assigned = best / best.sum(-1, keepdim=True)  # classes that tie share a query
        counts = assigned.sum(1).unsqueeze(-1)
        return counts / (counts + self.chosen["anchor"])


def _scatter(points: Tensor, assigned: Tensor, mean: Tensor) -> Tensor:
    """Σ_i z_in (x_i − μ_n)²: ``[T, N, D]``."""
    first, second = assigned.mT @ points, assigned.mT @ points.square()
    return second - 2 * mean * first + mean.square() * assigned.sum(1).unsqueeze(-1)


def _log_likelihood(points: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log N_n(x_i) but for a constant: ``[T, B, N]``."""
    precision = 1 / variance
    rest = (mean.square() * precision + variance.log()).sum(-1).unsqueeze(1)  # [T, 1, N]
    return -(points.square() @ precision.mT - 2 * points @ (mean * precision).mT + rest) / 2
