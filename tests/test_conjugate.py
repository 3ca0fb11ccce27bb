"""Conjugate inference: Bayes' rule against quadrature, its limits, and every memory's prior."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from memories import remember
from tiny import variant
from vsm.errors import SettingsError
from vsm.memory import MEMORIES, Memory, SlotMemory, SupportSet
from vsm.memory.slots.kanerva import KanervaMemory, KanervaRecall
from vsm.memory.slots.recall import ConjugateInference, MemoryPrior, VariationalRecall
from vsm.model import FewShotModel, Prediction, objective
from vsm.nn.distributions import DiagonalGaussian
from vsm.nn.layers import MemoryConditionedNetwork, predictive
from vsm.runs.checkpoints import TrainingState
from vsm.settings import (
    KanervaSettings,
    MemorySettings,
    Method,
    ModelSettings,
    RunSettings,
    SamplingSettings,
)
from vsm.training import build_optimizer, training_step

TASKS, WAY, QUERIES, SLOTS, WIDTH = 2, 3, 4, 7, 5
MEMORY_METHODS: list[Method] = ["rote", "transformed", "vsm", "kanerva"]


def settings_of(method: Method, log_variance: float = -2.0, **memory: object) -> RunSettings:
    return variant(
        RunSettings(),
        method=method,
        way=WAY,
        shot=1,
        queries=QUERIES,
        tasks=TASKS,
        model=ModelSettings(
            inference="conjugate", hidden_units=8, initial_log_variance=log_variance
        ),
        memory=replace(MemorySettings(), **memory),  # type: ignore[arg-type]
        kanerva=KanervaSettings(slots=SLOTS),
        sampling=SamplingSettings(train_prototypes=5, evaluation_prototypes=5),
    )


def model_of(method: Method, log_variance: float = -2.0, **memory: object) -> FewShotModel:
    return FewShotModel(settings_of(method, log_variance, **memory), (WIDTH,)).double()


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def support_of(shot: int) -> SupportSet:
    return SupportSet.of(values(TASKS, WAY, shot, WIDTH, seed=1))


def memory_of(model: FewShotModel, num_slots: int = SLOTS) -> Memory | None:
    return remember(model.consolidation, values(num_slots, WIDTH, seed=3))


def forward(model: FewShotModel, memory: Memory | None, shot: int = 1) -> Prediction:
    prediction: Prediction = model.eval()(
        support_of(shot).features,
        values(TASKS, WAY, QUERIES, WIDTH, seed=2),
        memory,
        torch.Generator().manual_seed(0),
    )
    return prediction


def inference(**memory: object) -> ConjugateInference:
    settings = settings_of("vsm", -2.0, **memory)
    built = ConjugateInference(WIDTH, settings.model, settings.memory).double()
    with torch.no_grad():
        built.noise.unbounded.copy_(values(WIDTH, seed=5))
    return built


def some_prior(known: bool = True) -> MemoryPrior:
    gaussian = DiagonalGaussian(
        values(TASKS, WAY, WIDTH, seed=6), 0.5 * values(TASKS, WAY, WIDTH, seed=7)
    )
    everywhere = torch.full((TASKS, WAY), known)
    return MemoryPrior(gaussian, torch.zeros(TASKS, WAY, SLOTS).double(), everywhere)


@pytest.mark.parametrize("shot", [1, 5])
def test_the_posterior_has_the_moments_of_prior_times_likelihood_by_quadrature(shot: int) -> None:
    built, support, prior = inference(), support_of(shot), some_prior()
    posterior = built(support, prior)
    z = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    noise = built.noise().exp()
    for place in [(0, 0, 0), (1, 2, 4), (0, 1, 3)]:
        d = place[-1]
        log_density = torch.distributions.Normal(
            prior.gaussian.mean[place], prior.gaussian.variance[place].sqrt()
        ).log_prob(z)
        for k in range(shot):
            seen = support.features[place[0], place[1], k, d]
            log_density = log_density + torch.distributions.Normal(z, noise[d].sqrt()).log_prob(
                seen
            )
        density = (log_density - log_density.max()).exp()
        density = density / density.sum()
        mean = (density * z).sum()
        variance = (density * (z - mean).square()).sum()
        torch.testing.assert_close(posterior.mean[place], mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(posterior.variance[place], variance, rtol=1e-6, atol=1e-8)


def bayes(mean: float, variance: float, noise: float, seen: list[float]) -> tuple[float, float]:
    """Return the mean and log-variance of a Gaussian mean after it was ``seen`` with noise."""
    precision = 1 / variance + len(seen) / noise
    return (mean / variance + sum(seen) / noise) / precision, -math.log(precision)


@pytest.mark.parametrize("shot", [1, 3])
def test_the_noise_learns_through_what_the_memory_is_worth(shot: int) -> None:
    """The oracle is Bayes' rule for one feature in plain numbers, and a finite difference."""
    support, prior = support_of(shot), some_prior()
    for moment in (0, 1):
        for t, n, d in [(0, 0, 0), (1, 2, 4), (0, 1, 3)]:
            built = inference()
            place = (t, n, d)
            posterior = built(support, prior)
            (posterior.mean, posterior.log_variance)[moment][place].backward()
            gradient = built.noise.unbounded.grad
            assert gradient is not None
            start = built.noise.unbounded[d].item()
            ends = []
            for unbounded in (start + 1e-5, start - 1e-5):
                noise = math.exp(unbounded / (1 + abs(unbounded) / 10))
                seen = support.features[t, n, :, d].tolist()
                told = prior.gaussian.mean[place].item(), prior.gaussian.variance[place].item()
                ends.append(bayes(*told, noise, seen)[moment])
            difference = (ends[0] - ends[1]) / 2e-5
            assert gradient[d].item() == pytest.approx(difference, rel=1e-5)
            assert gradient.count_nonzero() == 1


def test_a_set_strength_counts_for_that_many_support_images() -> None:
    built, support, prior = inference(strength=3.0), support_of(2), some_prior()
    posterior = built(support, prior)
    # Three images at μ₀ and the two of the support.
    together = torch.cat(
        [prior.gaussian.mean.unsqueeze(2).expand(-1, -1, 3, -1), support.features], 2
    )
    torch.testing.assert_close(posterior.mean, together.mean(2))
    torch.testing.assert_close(
        posterior.variance, (built.noise().exp() / 5).expand_as(together[:, :, 0])
    )


def test_many_support_images_outweigh_the_memory() -> None:
    built, prior = inference(), some_prior()
    one = support_of(1)
    many = SupportSet.of(one.features.expand(-1, -1, 200_000, -1))
    posterior = built(many, prior)
    torch.testing.assert_close(posterior.mean, one.mean, rtol=1e-4, atol=1e-4)
    assert posterior.variance.max() < 1e-4


@pytest.mark.parametrize("strength", [None, 1.5])
def test_where_nothing_is_known_only_the_support_counts(strength: float | None) -> None:
    built, support = inference(strength=strength), support_of(4)
    without, unknown = built(support, None), built(support, some_prior(known=False))
    torch.testing.assert_close(without.mean, support.mean)
    torch.testing.assert_close(unknown.mean, without.mean)
    torch.testing.assert_close(unknown.variance, without.variance)
    expected = built.noise().exp() / 4
    torch.testing.assert_close(without.variance, expected.expand_as(without.variance))


@pytest.mark.parametrize("method", ["vpn", *MEMORY_METHODS])
def test_without_memory_and_noise_every_method_is_protonet(method: Method) -> None:
    model = model_of(method, log_variance=-9.0)
    assert isinstance(model.inference, ConjugateInference)
    torch.nn.init.constant_(model.inference.noise.unbounded, -1e9)  # bounded: variance e^-10
    protonet = FewShotModel(RunSettings(method="protonet"), (WIDTH,)).double()
    ours = predictive(forward(model, memory_of(model, 0), 3).log_probabilities)
    theirs = predictive(forward(protonet, None, 3).log_probabilities)
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("method", MEMORY_METHODS)
def test_an_empty_memory_is_worth_nothing_and_a_full_one_something(method: Method) -> None:
    model = model_of(method)
    empty, full = forward(model, memory_of(model, 0)), forward(model, memory_of(model))
    nothing, something = empty.posterior.strength, full.posterior.strength
    assert nothing is not None
    assert something is not None
    assert torch.equal(nothing, torch.zeros_like(nothing))
    assert (something > 0).all()
    without = forward(model_of("vpn"), None)
    torch.testing.assert_close(empty.log_probabilities, without.log_probabilities)
    assert not torch.allclose(full.log_probabilities, without.log_probabilities)


def test_the_prior_of_vsm_has_the_moments_of_the_recalled_mixture() -> None:
    model = model_of("vsm")
    assert isinstance(model.recall, VariationalRecall)
    torch.nn.init.normal_(model.recall.network.head.output.weight, std=0.3)
    memory, support = memory_of(model), support_of(1)
    assert isinstance(memory, SlotMemory)
    prior = model.recall.prior(support, memory, None)
    slots = model.recall.network(memory.content)
    for t in range(TASKS):
        for n in range(WAY):
            mean = torch.zeros(WIDTH).double()
            second = torch.zeros(WIDTH).double()
            for a in range(SLOTS):
                weight = prior.weights[t, n, a]
                mean += weight * slots.mean[a]
                second += weight * (slots.variance[a] + slots.mean[a] ** 2)
            torch.testing.assert_close(prior.gaussian.mean[t, n], mean)
            torch.testing.assert_close(prior.gaussian.variance[t, n], second - mean**2)


def test_before_training_the_prior_is_what_the_slots_hold() -> None:
    model = model_of("vsm", addressing_scale=1e4)
    memory = memory_of(model)
    assert model.recall is not None
    assert isinstance(memory, SlotMemory)
    prior = model.recall.prior(support_of(1), memory, None)
    nearest = prior.weights.argmax(-1)
    torch.testing.assert_close(prior.gaussian.mean, memory.content[nearest])


@pytest.mark.parametrize("method", ["rote", "transformed", "vsm"])
def test_hidden_slots_are_no_part_of_the_prior(method: Method) -> None:
    model = model_of(method)
    memory, support = memory_of(model), support_of(1)
    assert memory is not None
    assert model.recall is not None
    hidden = torch.zeros(TASKS, WAY, SLOTS, dtype=torch.bool)
    hidden[..., 4:] = True
    masked = model.recall.prior(support, memory, hidden)
    assert (masked.weights[..., 4:] == 0).all()
    everything = model.recall.prior(support, memory, torch.ones_like(hidden))
    assert not everything.known.any()
    assert masked.known.all()


def test_the_prior_of_a_kanerva_machine_is_its_reading() -> None:
    model = model_of("kanerva")
    memory, support = memory_of(model), support_of(1)
    assert isinstance(model.recall, KanervaRecall)
    assert isinstance(memory, KanervaMemory)
    prior = model.recall.prior(support, memory, None)
    reading = model.recall.machine.read(prior.weights, memory)
    torch.testing.assert_close(prior.gaussian.mean, reading.mean)
    torch.testing.assert_close(prior.gaussian.log_variance, reading.log_variance)


@pytest.mark.parametrize("method", ["vpn", *MEMORY_METHODS])
def test_everything_that_matters_learns(method: Method) -> None:
    model = model_of(method).train()
    prediction = model(
        support_of(1).features,
        values(TASKS, WAY, QUERIES, WIDTH, seed=2),
        memory_of(model),
        torch.Generator().manual_seed(0),
    )
    prior = model.prior(values(TASKS, WAY, QUERIES, WIDTH, seed=2))
    terms = objective(prediction, prior, model.settings.objective)
    assert terms.kl_m == 0
    terms.total.backward()
    learns = {
        name for name, p in model.named_parameters() if p.grad is not None and p.grad.norm() > 0
    }
    assert "inference.noise.unbounded" in learns
    if method in ("rote", "transformed", "vsm"):
        assert "recall.addressing.log_scale" in learns
    if method in ("rote", "transformed"):
        assert "recall.variance.unbounded" in learns
    if method == "vsm":
        assert "recall.network.head.output.weight" in learns


@pytest.mark.parametrize("method", ["vpn", *MEMORY_METHODS])
def test_training_steps_log_what_the_memory_is_worth(method: Method) -> None:
    settings = settings_of(method)
    model = FewShotModel(settings, (WIDTH,))
    optimizer = build_optimizer(model, settings.optimizer)
    state = TrainingState(step=0, memory=model.empty_memory(), pending=None)
    inputs = values(TASKS, WAY, 1 + QUERIES, WIDTH, seed=4).float()
    class_ids = torch.arange(TASKS * WAY).view(TASKS, WAY)
    logged = []
    for _ in range(2):
        state.step += 1
        logged.append(training_step(model, optimizer, inputs, class_ids, state))
    if method == "vpn":
        assert "memory_strength" not in logged[1]
    else:
        assert logged[0]["memory_strength"] == 0
        assert logged[1]["memory_strength"] > 0


def test_a_memory_that_is_no_gaussian_keeps_the_network() -> None:
    model = FewShotModel(RunSettings(method="mann"), (WIDTH,))
    assert isinstance(model.inference, MemoryConditionedNetwork)


def test_memories_outside_the_space_of_features_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"model\.residual: conjugate inference"):
        RunSettings(model=ModelSettings(inference="conjugate", residual=False))


def test_a_negative_strength_is_refused() -> None:
    with pytest.raises(SettingsError, match="strength: must not be negative"):
        MemorySettings(strength=-1.0)


def test_every_memory_but_the_short_term_one_has_a_prior() -> None:
    assert set(MEMORY_METHODS) == set(MEMORIES) - {"mann"}


@pytest.mark.parametrize("method", ["vpn", *MEMORY_METHODS])
def test_classes_of_different_sizes_are_inferred_as_each_would_be_alone(method: Method) -> None:
    model = model_of(method).eval()
    memory, sizes = memory_of(model), [1, 4, 2]
    classes = [values(size, WIDTH, seed=20 + size) for size in sizes]
    support = SupportSet.of_classes(torch.cat(classes), sizes)
    together = model.infer(support, memory, torch.Generator().manual_seed(0)).mixture
    assert together is not None
    for n, features in enumerate(classes):
        alone = model.infer(
            SupportSet.of(features.view(1, 1, -1, WIDTH)), memory, torch.Generator().manual_seed(0)
        ).mixture
        assert alone is not None
        for one, other in (
            (together.components.mean, alone.components.mean),
            (together.components.log_variance, alone.components.log_variance),
        ):
            torch.testing.assert_close(one[:, n], other[:, 0])


def test_a_support_set_of_equal_classes_is_the_usual_one() -> None:
    features = values(1, WAY, 4, WIDTH, seed=1)
    ours, usual = SupportSet.of_classes(features.flatten(0, 2), [4] * WAY), SupportSet.of(features)
    assert torch.equal(ours.features, usual.features)
    assert torch.equal(ours.mean, usual.mean)
    assert ours.shots is usual.shots is None
