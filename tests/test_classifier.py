"""Eq. 1 against plain loops."""

import math

import pytest
import torch
from torch import Tensor

from vsm.nn.layers import (
    Distance,
    PrototypeClassifier,
    mean_distance,
    pairwise_distance,
    predictive,
)
from vsm.settings import ModelSettings

TASKS, QUERIES, WAY, SAMPLES, WIDTH = 2, 4, 3, 5, 6


@pytest.fixture
def queries() -> Tensor:
    return torch.randn(TASKS, QUERIES, WIDTH, generator=torch.Generator().manual_seed(0)).double()


@pytest.fixture
def prototypes() -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(TASKS, WAY, SAMPLES, WIDTH, generator=random).double()


def loop_distance(query: Tensor, prototype: Tensor, distance: str) -> float:
    pairs: list[tuple[float, float]] = [
        (q.item(), p.item()) for q, p in zip(query, prototype, strict=True)
    ]
    if distance == "squared_euclidean":
        return sum((q - p) ** 2 for q, p in pairs)
    norms = math.sqrt(sum(q * q for q, _ in pairs)) * math.sqrt(sum(p * p for _, p in pairs))
    return 1 - sum(q * p for q, p in pairs) / norms


@pytest.mark.parametrize("distance", ["squared_euclidean", "cosine"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_probabilities_equal_plain_loops(
    queries: Tensor, prototypes: Tensor, distance: str, temperature: float
) -> None:
    settings = ModelSettings(distance=distance, temperature=temperature)  # type: ignore[arg-type]
    log_probabilities = PrototypeClassifier(settings).double()(queries, prototypes)
    assert log_probabilities.shape == (TASKS, QUERIES, WAY, SAMPLES)
    for t in range(TASKS):
        for b in range(QUERIES):
            for s in range(SAMPLES):
                scores = [
                    math.exp(
                        -loop_distance(queries[t, b], prototypes[t, n, s], distance) / temperature
                    )
                    for n in range(WAY)
                ]
                for n in range(WAY):
                    assert log_probabilities[t, b, n, s].exp().item() == pytest.approx(
                        scores[n] / sum(scores), rel=1e-5
                    )


def test_distances_are_differentiable_as_finite_differences_say(
    queries: Tensor, prototypes: Tensor
) -> None:
    queries.requires_grad_()
    for distance in ("squared_euclidean", "cosine"):
        assert torch.autograd.gradcheck(
            lambda q, d=distance: pairwise_distance(q, prototypes, d), queries
        )


def test_prediction_is_the_mean_of_the_probability_vectors(
    queries: Tensor, prototypes: Tensor
) -> None:
    log_probabilities = PrototypeClassifier(ModelSettings()).double()(queries, prototypes)
    combined = predictive(log_probabilities).exp()
    torch.testing.assert_close(combined, log_probabilities.exp().mean(-1))
    torch.testing.assert_close(combined.sum(-1), torch.ones(TASKS, QUERIES).double())


def test_permuting_classes_permutes_probabilities(queries: Tensor, prototypes: Tensor) -> None:
    classifier = PrototypeClassifier(ModelSettings()).double()
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(
        classifier(queries, prototypes[:, order]), classifier(queries, prototypes)[:, :, order]
    )


def test_only_a_learnable_temperature_learns() -> None:
    assert PrototypeClassifier(ModelSettings(learn_temperature=True)).log_temperature.requires_grad
    assert not PrototypeClassifier(ModelSettings()).log_temperature.requires_grad


@pytest.mark.parametrize("distance", ["squared_euclidean", "cosine"])
def test_the_mean_distance_is_that_over_the_samples(
    queries: Tensor, prototypes: Tensor, distance: Distance
) -> None:
    expected = pairwise_distance(queries, prototypes, distance).mean(-1)
    torch.testing.assert_close(mean_distance(queries, prototypes, distance), expected)
