"""Temperatures against plain loops, a fine grid, and labels drawn at a known one."""

import math

import pytest
import torch

from vsm.data import EpisodeSampler, ImageDataset
from vsm.evaluation.evaluator import (
    BOUNDS,
    Evaluation,
    evaluate,
    fit_temperature,
    query_labels,
    scale_by_temperature,
)
from vsm.model import FewShotModel
from vsm.settings import RunSettings


def predictions(count: int, way: int, spread: float, random: torch.Generator) -> torch.Tensor:
    return torch.log_softmax(spread * torch.randn(count, way, generator=random), -1)


def nll_by_loop(log_probabilities: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    total = 0.0
    for row, label in zip(log_probabilities.double().tolist(), labels.tolist(), strict=True):
        powers = [math.exp(value) ** (1 / temperature) for value in row]
        total -= math.log(powers[label] / sum(powers))
    return total / len(labels)


def test_tempered_probabilities_are_normalized_powers(random: torch.Generator) -> None:
    log_probabilities = predictions(6, 4, 2.0, random)
    for row, result in zip(
        log_probabilities, scale_by_temperature(log_probabilities, 1.7), strict=True
    ):
        powers = [math.exp(value) ** (1 / 1.7) for value in row.tolist()]
        expected = [power / sum(powers) for power in powers]
        assert result.exp().tolist() == pytest.approx(expected, rel=1e-5)


def test_a_temperature_of_one_changes_no_bit(random: torch.Generator) -> None:
    log_probabilities = predictions(50, 5, 3.0, random)
    assert torch.equal(scale_by_temperature(log_probabilities, 1.0), log_probabilities)


def test_the_fit_is_the_best_of_a_fine_grid(random: torch.Generator) -> None:
    log_probabilities = predictions(80, 5, 2.0, random)
    labels = torch.randint(5, (80,), generator=random)
    labels[:55] = log_probabilities[:55].argmax(-1)
    grid = [0.5 * 1.01**step for step in range(250)]  # 0.5 … 6
    best = min(grid, key=lambda temperature: nll_by_loop(log_probabilities, labels, temperature))
    assert grid[0] < best < grid[-1]
    fitted = fit_temperature(log_probabilities, labels)
    assert fitted == pytest.approx(best, rel=0.0101)
    at_fit = nll_by_loop(log_probabilities, labels, fitted)
    for factor in (0.99, 1.01):
        assert at_fit < nll_by_loop(log_probabilities, labels, factor * fitted)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_the_temperature_that_labels_were_drawn_at_is_found(
    temperature: float, random: torch.Generator
) -> None:
    log_probabilities = predictions(60_000, 5, 2.0, random)
    chances = scale_by_temperature(log_probabilities, temperature).exp()
    labels = torch.multinomial(chances, 1, generator=random).squeeze(-1)
    assert fit_temperature(log_probabilities, labels) == pytest.approx(temperature, rel=0.03)


def test_faultless_and_worthless_predictions_stay_within_bounds(random: torch.Generator) -> None:
    log_probabilities = predictions(20, 3, 1.0, random)
    best, worst = log_probabilities.argmax(-1), log_probabilities.argmin(-1)
    assert fit_temperature(log_probabilities, best) == pytest.approx(BOUNDS[0])
    assert fit_temperature(log_probabilities, worst) == pytest.approx(BOUNDS[1])


def test_an_evaluation_is_calibrated_by_the_temperature_and_decides_as_before(
    tiny_dataset: ImageDataset, tiny_settings: RunSettings
) -> None:
    model = FewShotModel(tiny_settings, tiny_dataset.input_shape)
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    memory = model.empty_memory()
    plain = evaluate(model, memory, sampler, 7, seed=1)
    log_probabilities, labels = plain.log_probabilities.flatten(0, 1), plain.labels.flatten()
    assert log_probabilities.shape == (7 * 3 * 2, 3)
    warm = evaluate(model, memory, sampler, 7, seed=1, temperature=3.0)
    assert plain.nll == pytest.approx(nll_by_loop(log_probabilities, labels, 1.0), rel=1e-5)
    assert warm.nll == pytest.approx(nll_by_loop(log_probabilities, labels, 3.0), rel=1e-5)
    assert warm.nll != pytest.approx(plain.nll, rel=1e-3)
    assert torch.equal(warm.correct, plain.correct)


def test_a_temperature_that_was_put_in_is_found() -> None:
    random = torch.Generator().manual_seed(0)
    honest = (2 * torch.randn(200, 20, 5, generator=random)).log_softmax(-1)
    order = honest.exp().flatten(0, 1).multinomial(1, generator=random).view(200, 20)
    # Answers are listed class after class, so turn every row until its true class has its place.
    places = torch.arange(5).repeat_interleave(4)
    turns = (torch.arange(5) + order.unsqueeze(-1) - places.unsqueeze(-1)) % 5
    honest = honest.gather(-1, turns)
    too_sure = (honest * 2.5).log_softmax(-1)
    class_ids = torch.zeros(200, 5, dtype=torch.int64)
    evaluation = Evaluation(class_ids, too_sure, query_labels(too_sure))
    found = evaluation.best_temperature()
    assert found == pytest.approx(2.5, rel=0.1)
    after = evaluation.scale_by_temperature(found)
    assert after.nll < evaluation.nll
    assert torch.equal(after.correct, evaluation.correct)
    for other in (0.9 * found, 1.1 * found):
        assert after.nll < evaluation.scale_by_temperature(other).nll
