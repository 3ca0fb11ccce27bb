"""Power transform, optimal transport to class centers, and their re-estimation."""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from vsm.baselines import tukey
from vsm_lab.transductive.contract import TransductiveBaseline, grid, squared_distances, unit


class PowerTransformMap(TransductiveBaseline):
    """Leveraging the feature distribution in transfer-based few-shot learning (Hu et al. 2021).

    *Every class is assumed to have the same number of queries*, B / N. The plan P that carries the
    queries to the centers c_n solves, with rows that add up to 1 and columns to B / N,

        minimize Σ P_in |x_i − c_n|² + 1/λ Σ P_in log P_in      (Sinkhorn),

    and the centers move a share of the way to the means of support and queries that P assigns:
    c_n ← c_n + rate · (ΣPx / ΣP − c_n). P from the last centers is the answer.

    Features are those of the paper, not centered by the training features: x^β with the sign kept
    (the paper's are not negative), scaled to length one, centered, support and queries each by
    their own mean in the task, and scaled again. So a single query is always at the center.

    Left out: the QR step, a rotation that changes no distance. Adapted: a fixed number of Sinkhorn
    steps, rows last, so that every query has probabilities.
    """

    label = "pt-map"
    defaults: ClassVar = {
        "power": 0.5,  # β
        "sharpness": 10,  # λ
        "rate": 0.2,
        "steps": 20,
        "sweeps": 100,  # of Sinkhorn
    }
    candidates = grid(power=[0.5, 1], sharpness=[5, 10, 20], rate=[0.2, 0.4])

    def transform(self, features: Tensor) -> Tensor:
        """Power transform, and center the support or the queries of every task by their mean."""
        features = unit(tukey(features, self.chosen["power"]))
        images = tuple(range(1, features.dim() - 1))
        return unit(features - features.mean(images, keepdim=True))

    def solve(self, support: Tensor, queries: Tensor) -> Tensor:
        """See :class:`TransductiveBaseline`."""
        centers = support.mean(2)  # [T, N, D]
        for _ in range(int(self.chosen["steps"])):
            plan = self.transport(queries, centers).exp()
            counts = support.shape[2] + plan.sum(1).unsqueeze(-1)
            means = (support.sum(2) + plan.mT @ queries) / counts
            centers = centers + self.chosen["rate"] * (means - centers)
        return self.transport(queries, centers)

    def transport(self, queries: Tensor, centers: Tensor) -> Tensor:
        """Return log P ``[T, B, N]``."""
        scores = -self.chosen["sharpness"] * squared_distances(queries, centers)
        rows = F.log_softmax(scores.mT.contiguous(), 1)  # [T, N, B], several times as fast
        for _ in range(int(self.chosen["sweeps"])):
            rows = F.log_softmax(rows - rows.logsumexp(-1, keepdim=True), 1)
        return rows.mT
