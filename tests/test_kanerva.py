"""The Kanerva machine: Bayesian regression in float64, its readings against sampling."""

import math

import pytest
import torch
from torch import Tensor, nn

from memories import remember
from vsm.errors import SettingsError
from vsm.memory import Observations, SupportSet
from vsm.memory.named import trained_memory
from vsm.memory.slots.kanerva import (
    KanervaConsolidation,
    KanervaMachine,
    KanervaMemory,
    KanervaRecall,
)
from vsm.model import FewShotModel
from vsm.nn.distributions import DiagonalGaussian
from vsm.runs.trained_model import made_in_memory
from vsm.settings import KanervaSettings, ModelSettings, RunSettings

SLOTS, WIDTH = 4, 3
MODEL = ModelSettings(
    inference="network", hidden_units=6, residual=False, initial_log_variance=-1.0
)


def machine_of(slots: int = SLOTS) -> KanervaMachine:
    torch.manual_seed(0)
    machine = KanervaMachine(WIDTH, KanervaSettings(slots=slots), MODEL).double()
    with torch.no_grad():  # a prior that is not the initial one
        machine.prior_mean.normal_()
        machine.log_prior_variance.fill_(0.7)
    return machine


def features_of(count: int, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, WIDTH, generator=random, dtype=torch.float64)


def observe(features: Tensor) -> Observations:
    return Observations(features, torch.zeros(len(features), dtype=torch.int64))


def written(machine: KanervaMachine, *batches: Tensor, retention: float = 1.0) -> KanervaMemory:
    consolidation = KanervaConsolidation(machine, retention)
    memory = consolidation.empty()
    for step, features in enumerate(batches):
        memory = consolidation(memory, observe(features), step)
    return memory


def one_at_a_time(
    machine: KanervaMachine, features: Tensor, noise: list[float]
) -> tuple[Tensor, Tensor]:
    """The original's update rule, R and U of one observation after another, each with its noise."""
    mean = machine.prior_mean.detach().clone()
    covariance = machine.prior_variance.item() * torch.eye(len(mean), dtype=torch.float64)
    for z, variance in zip(features, noise, strict=True):
        w = machine.weights(z).detach()
        surprise = z - w @ mean
        uncertainty = w @ covariance @ w + variance
        gain = covariance @ w / uncertainty
        mean = mean + torch.outer(gain, surprise)
        covariance = covariance - torch.outer(gain, w @ covariance)
    return mean, covariance


def test_weights_are_cosines_between_keys_and_addresses() -> None:
    machine, features = machine_of(), features_of(2)
    weights = machine.weights(features)
    for p in range(2):
        key = machine.key(features[p])
        for s in range(SLOTS):
            expected = torch.dot(key, machine.addresses[s]) / (
                key.norm() * machine.addresses[s].norm()
            )
            torch.testing.assert_close(weights[p, s], expected)


def test_the_posterior_equals_the_originals_update_one_observation_at_a_time() -> None:
    machine, features = machine_of(), features_of(9)
    posterior = machine.posterior(written(machine, features))
    mean, covariance = one_at_a_time(machine, features, [machine.noise_variance.item()] * 9)
    torch.testing.assert_close(posterior[0], mean)
    torch.testing.assert_close(posterior[1], covariance)


def test_the_posterior_equals_a_dense_gaussian_conditioned_on_all_observations() -> None:
    machine, features = machine_of(), features_of(6)
    posterior = machine.posterior(written(machine, features))
    # Memory (row by row) and observations are jointly Gaussian in S·D + P·D dimensions.
    weights = machine.weights(features)
    prior = machine.prior_variance * torch.eye(SLOTS * WIDTH, dtype=torch.float64)
    design = torch.kron(weights.contiguous(), torch.eye(WIDTH, dtype=torch.float64))
    noise = machine.noise_variance * torch.eye(6 * WIDTH, dtype=torch.float64)
    observed = design @ prior @ design.mT + noise
    gain = prior @ design.mT @ torch.linalg.inv(observed)
    surprise = features.flatten() - design @ machine.prior_mean.flatten()
    mean = machine.prior_mean.flatten() + gain @ surprise
    covariance = prior - gain @ design @ prior
    torch.testing.assert_close(posterior[0].flatten(), mean)
    expected = torch.kron(posterior[1].contiguous(), torch.eye(WIDTH, dtype=torch.float64))
    torch.testing.assert_close(expected, covariance)


def test_writing_at_once_in_parts_or_in_another_order_gives_one_memory() -> None:
    machine, features = machine_of(), features_of(8)
    at_once = written(machine, features)
    in_parts = written(machine, features[:3], features[3:4], features[4:])
    shuffled = written(machine, features[torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])])
    for other in (in_parts, shuffled):
        torch.testing.assert_close(other.tensors(), at_once.tensors())
    assert at_once.count == 8


@pytest.mark.parametrize("retention", [0.0, 0.6, 1.0])
def test_old_evidence_counts_as_if_it_had_been_observed_with_more_noise(retention: float) -> None:
    machine, features = machine_of(), features_of(6)
    memory = written(machine, features[:2], features[2:3], features[3:], retention=retention)
    posterior = machine.posterior(memory)
    noise = machine.noise_variance.item()
    ages = [2, 2, 1, 0, 0, 0]
    left = [noise / retention**age if retention or not age else math.inf for age in ages]
    mean, covariance = one_at_a_time(machine, features, left)
    torch.testing.assert_close(posterior[0], mean)
    torch.testing.assert_close(posterior[1], covariance)


def test_readings_are_distributed_as_samples_of_the_memory_with_noise() -> None:
    machine = machine_of()
    memory = written(machine, features_of(3))
    weights = machine.weights(features_of(2, seed=4)).detach()
    reading = machine.read(weights, memory)
    mean, covariance = machine.posterior(memory)
    random = torch.Generator().manual_seed(0)
    draws = 200_000
    root = torch.linalg.cholesky(covariance)
    noise = torch.randn(draws, SLOTS, WIDTH, generator=random, dtype=torch.float64)
    memories = mean + root @ noise  # [draws, S, D]
    noise = torch.randn(draws, 2, WIDTH, generator=random, dtype=torch.float64)
    read = weights @ memories + machine.noise_variance.sqrt() * noise
    torch.testing.assert_close(reading.mean, read.mean(0), rtol=0, atol=0.01)
    torch.testing.assert_close(reading.variance, read.var(0), rtol=0.02, atol=0)


def test_an_empty_memory_reads_as_the_prior() -> None:
    machine = machine_of()
    weights = machine.weights(features_of(2))
    reading = machine.read(weights, KanervaConsolidation(machine, 1.0).empty())
    torch.testing.assert_close(reading.mean, weights @ machine.prior_mean)
    variance = machine.prior_variance * weights.square().sum(-1) + machine.noise_variance
    torch.testing.assert_close(reading.variance, variance.unsqueeze(-1).expand(2, WIDTH))


def test_what_was_written_a_billion_times_is_read_back_up_to_the_noise() -> None:
    machine, features = machine_of(), features_of(WIDTH)  # as many as keys have dimensions
    memory = written(machine, features)
    often = KanervaMemory(
        1e9 * memory.weight_products, 1e9 * memory.weighted_sums, 1_000_000_000 * memory.count
    )
    reading = machine.read(machine.weights(features), often)
    torch.testing.assert_close(reading.mean, features, rtol=0, atol=0.01)
    noise = machine.noise_variance.expand(WIDTH, WIDTH)
    torch.testing.assert_close(reading.variance, noise, rtol=1e-3, atol=0)


def test_single_precision_holds_after_fifty_thousand_observations() -> None:
    features = features_of(1000)
    double = machine_of()
    single = machine_of().float()
    batches = [features] * 50
    expected = double.read(double.weights(features), written(double, *batches))
    rough = [batch.float() for batch in batches]
    measured = single.read(single.weights(features.float()), written(single, *rough))
    assert measured.mean.dtype == torch.float32
    torch.testing.assert_close(measured.mean.double(), expected.mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(measured.variance.double(), expected.variance, rtol=1e-3, atol=0)


def recall_of() -> KanervaRecall:
    torch.manual_seed(0)
    return KanervaRecall(
        WIDTH,
        RunSettings(method="kanerva", kanerva=KanervaSettings(slots=SLOTS), model=MODEL),
    ).double()


def test_recollections_are_drawn_from_the_reading_of_the_support_mean() -> None:
    recall = recall_of()
    support = features_of(12, seed=5).view(2, 3, 2, WIDTH)
    memory = written(recall.machine, features_of(5))
    recollection = recall(
        SupportSet.of(support), memory, None, 60_000, torch.Generator().manual_seed(0)
    )
    reading = recall.machine.read(recall.machine.weights(support.mean(2)), memory)
    samples = recollection.samples
    torch.testing.assert_close(samples.mean(2), reading.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(samples.var(2), reading.variance, rtol=0.05, atol=0)
    prior: DiagonalGaussian = recall.network(support.mean(2))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(reading.mean, reading.variance.sqrt()),
        torch.distributions.Normal(prior.mean, prior.variance.sqrt()),
    ).sum(-1)
    torch.testing.assert_close(recollection.divergence, expected)


class WriteThenRead(nn.Module):
    """The machine's whole path from observations to a reading."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = machine_of()

    def forward(self, features: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
        reading = self.machine.read(self.machine.weights(asked), written(self.machine, features))
        return reading.mean, reading.log_variance


def test_gradients_of_writing_and_reading_agree_with_finite_differences() -> None:
    module = WriteThenRead()
    names = [name for name, _ in module.named_parameters()]
    values = tuple(value.detach().clone().requires_grad_() for value in module.parameters())
    features, asked = features_of(5), features_of(2, seed=6)

    def path(*parameters: Tensor) -> tuple[Tensor, Tensor]:
        outcome: tuple[Tensor, Tensor] = torch.func.functional_call(
            module, dict(zip(names, parameters, strict=True)), (features, asked)
        )
        return outcome

    assert torch.autograd.gradcheck(path, values)


def test_writing_teaches_the_addresses_even_where_reading_does_not() -> None:
    machine = machine_of()
    weights = machine.weights(features_of(2, seed=6)).detach()
    machine.read(weights, written(machine, features_of(5))).mean.sum().backward()
    assert machine.addresses.grad is not None
    assert machine.addresses.grad.abs().max() > 0


def test_the_old_memory_is_untouched_and_classes_and_steps_do_not_matter() -> None:
    machine = machine_of()
    consolidation = KanervaConsolidation(machine, 0.9)
    memory = written(machine, features_of(3))
    before = {name: value.clone() for name, value in memory.tensors().items()}
    features = features_of(4, seed=2)
    one = consolidation(memory, Observations(features, torch.arange(4)), 1)
    two = consolidation(memory, Observations(features, torch.zeros(4)), 7)
    torch.testing.assert_close(memory.tensors(), before, rtol=0, atol=0)
    torch.testing.assert_close(one.tensors(), two.tensors(), rtol=0, atol=0)


def test_the_parameters_are_stored_and_counted_once() -> None:
    model = FewShotModel(
        RunSettings(method="kanerva", model=ModelSettings(channels=4)), (1, 28, 28)
    )
    assert [name for name in model.state_dict() if name.endswith("addresses")] == [
        "recall.machine.addresses"
    ]


def test_the_memory_can_be_emptied_but_not_cut() -> None:
    settings = RunSettings(
        method="kanerva", model=ModelSettings(channels=4), kanerva=KanervaSettings(slots=SLOTS)
    )
    model = FewShotModel(settings, (1, 28, 28))
    with torch.no_grad():
        memory = remember(model.consolidation, torch.rand(5, model.num_features))
    assert memory is not None
    encoder = model.encoder.identity
    trained = made_in_memory(model, trained_memory(settings, encoder, memory, (), 0))
    assert (len(memory), memory.slot_classes) == (SLOTS, [])
    emptied = trained.with_slots(0).state
    assert emptied is not None
    assert len(emptied) == 0
    empty = model.empty_memory()
    assert empty is not None
    torch.testing.assert_close(emptied.tensors(), empty.tensors())
    with pytest.raises(
        SettingsError, match=r"memory_slots: a Kanerva machine spreads .* got 3; use"
    ):
        trained.with_slots(3)


@pytest.mark.parametrize("mask", ["none", "own", "task"])
def test_no_class_can_be_hidden(mask: str) -> None:
    memory = written(machine_of(), features_of(3))
    assert memory.slot_mask(torch.zeros(1, 2), mask) is None  # type: ignore[arg-type, func-returns-value]


def test_a_device_without_double_precision_is_refused() -> None:
    with pytest.raises(SettingsError, match="device: the method kanerva needs double precision"):
        KanervaConsolidation(machine_of(), 1.0).empty().to(torch.device("mps"))
