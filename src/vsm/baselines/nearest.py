"""Nearest class mean and nearest neighbor."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from vsm.baselines.base import BaseFeaturesSource, Baseline
from vsm.nn.prototype_classifier import Distance, pairwise_distance
from vsm.seeding import Randomness
from vsm.settings import BaselineSettings

Transformation = Literal["un", "l2n", "cl2n"]


class SimpleShot(Baseline):
    """SimpleShot (Wang, Chao, Weinberger and van der Maaten 2019).

    Nearest class mean by distance of features that are left alone (``un``), scaled to length one
    (``l2n``), or centered by the mean of all training features first (``cl2n``). The mean of scaled
    features is not scaled again. The published rule is Euclidean and has no probabilities; these
    are the softmax of the negative squared distance, or cosine distance, over the temperature.
    """

    def __init__(
        self,
        settings: BaselineSettings,
        base: BaseFeaturesSource,
        transformation: Transformation = "cl2n",
        distance: Distance = "squared_euclidean",
    ) -> None:
        super().__init__(settings, base)
        self.transformation, self.distance = transformation, distance

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """See :class:`Baseline`; nothing is drawn."""
        centroids = self._transform(support).mean(2, keepdim=True)  # [T, N, 1, D]
        inputs = self._transform(queries).flatten(1, 2)  # [T, N·Q, D]
        distances = pairwise_distance(inputs, centroids, self.distance).squeeze(-1)
        return F.log_softmax(-distances / self.settings.temperature, -1)

    def _transform(self, features: Tensor) -> Tensor:
        if self.transformation == "cl2n":
            features = features - self.base().mean
        return features if self.transformation == "un" else F.normalize(features, dim=-1)


class NearestNeighbor(Baseline):
    """The class of the most similar support image, as in a search by embeddings.

    Probabilities are the softmax of the largest cosine in each class over the temperature.
    """

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """See :class:`Baseline`; nothing is drawn."""
        way, shot = support.shape[1:3]
        examples = F.normalize(support, dim=-1).flatten(1, 2)  # [T, N·K, D]
        cosines = F.normalize(queries, dim=-1).flatten(1, 2) @ examples.mT  # [T, N·Q, N·K]
        nearest = cosines.unflatten(-1, (way, shot)).amax(-1)
        return F.log_softmax(nearest / self.settings.temperature, -1)

    def elements_per_task(self, way: int, shot: int, queries: int, num_features: int) -> int:
        """See :class:`Baseline`."""
        return way * (shot + queries) * num_features + way**2 * queries * shot
