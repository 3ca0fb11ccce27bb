"""Labels that spread along a graph of support and queries."""

from typing import ClassVar

import torch
from torch import Tensor

from vsm_lab.transductive.contract import (
    TransductiveBaseline,
    grid,
    squared_distances,
    support_targets,
)
from vsm_lab.transductive.graph import neighbor_weights


class LabelPropagation(TransductiveBaseline):
    """Learning with local and global consistency (Zhou et al. 2004), as in Liu et al. 2019 (TPN).

    Images are linked by w_ij = exp(−|x_i − x_j|² / (2 width²)) if one is among the nearest
    neighbors of the other. With S = D^(−½) W D^(−½), D the sums of the rows of W, and Y the labels
    of the support, 0 for queries, the labels that have spread are

        F = (I − α S)⁻¹ Y,

    and a query's probabilities its row of F over their sum. Adapted: TPN learns a width for every
    image together with the encoder, and takes a softmax of F; here one width is chosen, and α may
    be below the 0.99 of both papers. A query that no label reaches has even odds.
    """

    label = "label-propagation"
    defaults: ClassVar = {"neighbors": 20, "width": 0.3, "alpha": 0.8}
    candidates = grid(neighbors=[10, 20], width=[0.3, 0.5], alpha=[0.65, 0.8, 0.99])
    graphs = 8

    def solve(self, support: Tensor, queries: Tensor) -> Tensor:
        """See :class:`TransductiveBaseline`."""
        num_tasks, targets = len(queries), support_targets(support)  # [1, S, N]
        images = torch.cat([support.flatten(1, 2), queries], 1)  # [T, S + B, D]
        near = neighbor_weights(images, int(self.chosen["neighbors"]))
        kernel = (-squared_distances(images, images) / (2 * self.chosen["width"] ** 2)).exp()
        links = kernel * ((near + near.mT) > 0)  # W
        degrees = links.sum(-1, keepdim=True).clamp_min(torch.finfo(links.dtype).tiny)
        spreading = links / (degrees.sqrt() * degrees.sqrt().mT)
        system = torch.eye(images.shape[1]).to(images) - self.chosen["alpha"] * spreading
        labels = images.new_zeros(num_tasks, images.shape[1], targets.shape[-1])
        labels[:, : targets.shape[1]] = targets
        spread: Tensor = torch.linalg.solve(system, labels)[:, targets.shape[1] :]
        # Below this is rounding; it is positive, so that there is a logarithm.
        spread = spread.clamp_min(torch.finfo(spread.dtype).eps)
        return (spread / spread.sum(-1, keepdim=True)).log()
