"""The nearest example, by cosine."""

from torch import Tensor
from torch.nn import functional as F

from vsm.baselines.contract import Baseline
from vsm.seeding import Randomness


class NearestNeighbor(Baseline):
    """The class of the most similar support image, as a search by embeddings would answer.

    Probabilities are the softmax of the largest cosine in each class over the temperature.
    """

    def fit_predict(self, support: Tensor, queries: Tensor, random: Randomness) -> Tensor:  # noqa: ARG002 - contract
        """Classify ``[T, N, Q, D]`` by ``[T, N, K, D]``; nothing is drawn."""
        way, shot = support.shape[1:3]
        examples = F.normalize(support, dim=-1).flatten(1, 2)  # [T, N·K, D]
        cosines = F.normalize(queries, dim=-1).flatten(1, 2) @ examples.mT  # [T, N·Q, N·K]
        nearest = cosines.unflatten(-1, (way, shot)).amax(-1)
        return F.log_softmax(nearest / self.settings.temperature, -1)

    def elements_per_task(self, way: int, shot: int, queries: int, num_features: int) -> int:
        """Return about how many numbers an episode needs at a time."""
        return way * (shot + queries) * num_features + way**2 * queries * shot
