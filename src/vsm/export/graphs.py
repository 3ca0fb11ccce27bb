"""What is exported, as modules: images to features, and features to probabilities.

They compute what :class:`vsm.FewShotClassifier` does, by the same code.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.export.noise import RecordedNoise, StoredNoise
from vsm.memory import SupportSet
from vsm.nn.prototype_classifier import mean_distance, predictive
from vsm.runs.trained_model import TrainedModel
from vsm.seeding import generator

NOISE_NAMES = ("memory_choice", "memory_noise", "prototype_noise")
"""Of a classifier's draws; one that draws fewer times lacks the first."""


class EncoderGraph(nn.Module):
    """Images, or rows of features, to the features that a classifier takes."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model, self.preprocessing = trained.model, trained.preprocessing

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed.

        Args:
            inputs: images ``[n, C, H, W]`` from 0 to 1; features ``[n, D]`` if the model has no
                backbone.

        Returns:
            ``[n, D]``.
        """
        if self.preprocessing is not None:
            constants = (self.preprocessing.mean, self.preprocessing.std)
            mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in constants)
            inputs = (inputs - mean) / deviation
        return self.model.embed(inputs)


class Answers(NamedTuple):
    """What a classifier's graph gives for Q queries and N classes.

    Attributes:
        probabilities: ``[Q, N]``.
        distances: to each class's prototype, averaged over its samples ``[Q, N]``.
        recalled_weights: λ ``[N, A]``; None for methods without memory.
    """

    probabilities: Tensor
    distances: Tensor
    recalled_weights: Tensor | None


class ClassifierGraph(nn.Module):
    """Support and queries to probabilities, with the memory inside: Eqs. 1 and 7-10."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model = trained.model
        self.memory = trained.state
        fitted = dict(trained.calibration.temperatures) or {1: 1.0}
        self.log_shots, self.log_temperatures = (
            torch.tensor(values).log()
            for values in (sorted(fitted), [fitted[shot] for shot in sorted(fitted)])
        )

    def temperature(self, shots: Tensor) -> Tensor:
        """Return what ``Calibration.temperature`` does: ``[N, 1]`` to ``[]``."""
        starts, steps = self.log_shots[:-1], self.log_shots.diff()
        passed = (shots.log().mean() - starts).clamp_min(0).minimum(steps)
        slopes = self.log_temperatures.diff() / steps
        return (self.log_temperatures[0] + (slopes * passed).sum()).exp()

    def forward(
        self,
        support_features: Tensor,
        support_labels: Tensor,
        query_features: Tensor,
        temperature: Tensor,
        slot_mask: Tensor | None,
        noise: list[Tensor],
    ) -> Answers:
        """Infer the classes, and classify.

        Args:
            support_features: ``[S, D]``, of all classes in any order.
            support_labels: ``[S, N]``, 1 where an example is of a class, else 0. Rows of zeros
                do not count.
            query_features: ``[Q, D]``.
            temperature: T of the probabilities p^(1/T) / Z ``[]``; 0 is the model's own for so many
                examples.
            slot_mask: boolean ``[N, A]``, slots that a class may not recall, or ``[1, A]`` for
                all classes; None for methods without memory.
            noise: see :class:`vsm.export.noise.StoredNoise`.
        """
        shots = support_labels.sum(0).unsqueeze(-1)  # [N, 1]
        mean = (support_labels.mT @ support_features / shots).unsqueeze(0)
        support = SupportSet(mean.unsqueeze(2), mean, shots.unsqueeze(0))
        if slot_mask is not None:
            rows = torch.arange(mean.shape[1]) % torch.full((1,), slot_mask.shape[0])
            slot_mask = slot_mask[rows].unsqueeze(0)  # [1, N, A]
        inferred = self.model.infer(support, self.memory, StoredNoise(noise), slot_mask)
        queries = query_features.unsqueeze(0)
        log_probabilities = predictive(self.model.classifier(queries, inferred.prototypes))
        chosen = torch.where(temperature > 0, temperature, self.temperature(shots))
        kind = self.model.classifier.distance
        recalled = inferred.recollection
        return Answers(
            F.softmax(log_probabilities / chosen, dim=-1)[0],
            mean_distance(queries, inferred.prototypes, kind)[0],
            None if recalled is None else recalled.weights[0],
        )

    def by_name(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take inputs and give answers by the names that the graph's have."""
        required = ("support_features", "support_labels", "query_features", "temperature")
        answers = self(
            *(inputs[name] for name in required),
            inputs.get("slot_mask"),
            [inputs[name] for name in NOISE_NAMES if name in inputs],
        )
        return {name: value for name, value in answers._asdict().items() if value is not None}


@torch.no_grad()
def classifier_noise(trained: TrainedModel, way: int, seed: int = 0) -> dict[str, Tensor]:
    """Return what :class:`vsm.FewShotClassifier` draws for ``way`` classes, by names of inputs.

    Returns:
        Each ``[way, samples, width]``; empty where the model draws nothing.
    """
    noise = RecordedNoise(generator(seed, "classify"))
    mean = torch.zeros(1, way, trained.model.num_features)
    memory = trained.state
    trained.model.infer(SupportSet(mean.unsqueeze(2), mean), memory, noise)
    return dict(zip(NOISE_NAMES[-len(noise.drawn) :], noise.drawn, strict=False))
