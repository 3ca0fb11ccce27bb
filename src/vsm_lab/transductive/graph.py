"""Graphs of nearest neighbors among the images of a task."""

import torch
from torch import Tensor

from vsm_lab.transductive.contract import squared_distances

ROUNDING = 100  # of a squared distance of unit vectors, in units of its dtype's precision


def neighbor_weights(features: Tensor, count: int) -> Tensor:
    """A of images ``[T, M, D]``, ``[T, M, M]``: 1 in row i for each of the ``count`` nearest to i.

    An image is no neighbor of itself. Neighbors at the same distance share what is left to them, so
    that the graph does not depend on their order: a row always adds up to ``count``, or to the
    number of others if there are fewer.
    """
    num_images = features.shape[1]
    count = min(count, num_images - 1)
    if count < 1:
        return features.new_zeros(len(features), num_images, num_images)
    distances = squared_distances(features, features)
    distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    last = distances.topk(count, largest=False).values[..., -1:]
    slack = ROUNDING * torch.finfo(features.dtype).eps
    nearer = (distances < last - slack).to(features)
    level = (distances <= last + slack).to(features) - nearer
    return nearer + level * (count - nearer.sum(-1, keepdim=True)) / level.sum(-1, keepdim=True)
