"""One suite for every recall's contract, then the mathematics of each."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from memories import remember
from tiny import variant
from vsm.memory import MEMORIES, Consolidation, Recall, SlotMemory, SupportSet
from vsm.memory.slots.kanerva import KanervaRecall
from vsm.memory.slots.recall import (
    RoteRecall,
    SlotRecall,
    TransformedRecall,
    VariationalRecall,
    mixture_divergence,
)
from vsm.nn.distributions import DiagonalGaussian, GaussianMixture, pairwise_log_prob
from vsm.settings import (
    KanervaSettings,
    MannSettings,
    MemorySettings,
    ModelSettings,
    ObjectiveSettings,
    RunSettings,
)

TASKS, WAY, SHOT, SLOTS, WIDTH, SAMPLES = 2, 3, 2, 7, 5, 11
SLOT_KINDS = [
    ("rote", "soft", "bound"),
    ("transformed", "soft", "bound"),
    *(
        ("vsm", kind, kl)
        for kind in ("soft", "mixture", "gumbel")
        for kl in ("bound", "monte_carlo")
    ),
]
LONG_TERM_KINDS = [*SLOT_KINDS, ("kanerva", "soft", "bound")]
KINDS = [*LONG_TERM_KINDS, ("mann", "soft", "bound")]


Design = tuple[Recall, Consolidation | None]


def design_of(method: str, kind: str = "soft", kl: str = "bound", **memory: object) -> Design:
    settings = variant(
        RunSettings(),
        method=method,
        memory=replace(MemorySettings(recall=kind), **memory),  # type: ignore[arg-type]
        mann=MannSettings(slots=SLOTS, width=4, reads=2, controller_units=6),
        kanerva=KanervaSettings(slots=SLOTS),
        model=ModelSettings(
            inference="network", hidden_units=8, residual=False, initial_log_variance=0.0
        ),
        objective=ObjectiveSettings(kl=kl),  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    recall = MEMORIES[method](WIDTH, settings)  # type: ignore[index]
    consolidation = recall.consolidation()
    if isinstance(consolidation, torch.nn.Module):
        consolidation.double()
    return recall.double(), consolidation


def build(method: str, kind: str = "soft", kl: str = "bound", **memory: object) -> SlotRecall:
    recall, _ = design_of(method, kind, kl, **memory)
    assert isinstance(recall, SlotRecall)
    return recall


def named(kinds: list[tuple[str, str, str]]) -> list[object]:
    return [pytest.param(kind, id="-".join(kind)) for kind in kinds]


@pytest.fixture(params=named(KINDS))
def design(request: pytest.FixtureRequest) -> Design:
    return design_of(*request.param)


@pytest.fixture
def support() -> Tensor:
    shape = (TASKS, WAY, SHOT, WIDTH)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture
def content() -> Tensor:
    return torch.rand(SLOTS, WIDTH, generator=torch.Generator().manual_seed(2)).double()


@pytest.fixture
def memory(content: Tensor) -> SlotMemory:
    return slots_of(content)


def slots_of(content: Tensor) -> SlotMemory:
    ids = torch.arange(len(content))
    return SlotMemory(content, ids, ids + 1, ids)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_shapes_are_those_of_the_contract(design: Design, support: Tensor, content: Tensor) -> None:
    recall, consolidation = design
    recollection = recall(
        SupportSet.of(support), remember(consolidation, content), None, SAMPLES, generator()
    )
    drawn = isinstance(recall, VariationalRecall | KanervaRecall)
    assert recollection.samples.shape == (TASKS, WAY, SAMPLES if drawn else 1, WIDTH)
    assert recollection.weights.shape == (TASKS, WAY, SLOTS)
    assert recollection.divergence.shape == (TASKS, WAY)


def test_reading_never_writes(design: Design, support: Tensor, content: Tensor) -> None:
    recall, consolidation = design
    memory = remember(consolidation, content)
    before = {} if memory is None else {k: v.clone() for k, v in memory.tensors().items()}
    recall(SupportSet.of(support), memory, None, SAMPLES, generator())
    for name, value in before.items():
        assert memory is not None
        assert torch.equal(memory.tensors()[name], value), name


def test_the_same_generator_gives_the_same_recollection(
    design: Design, support: Tensor, content: Tensor
) -> None:
    recall, consolidation = design
    memory = remember(consolidation, content)
    one = recall(SupportSet.of(support), memory, None, SAMPLES, generator())
    two = recall(SupportSet.of(support), memory, None, SAMPLES, generator())
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_an_empty_memory_is_recalled_from(design: Design, support: Tensor) -> None:
    recall, consolidation = design
    memory = None if consolidation is None else consolidation.empty()
    recollection = recall.float()(
        SupportSet.of(support.float()), memory, None, SAMPLES, generator()
    )
    assert all(part.isfinite().all() for part in recollection)
    assert recollection.samples.shape[:2] == (TASKS, WAY)


@pytest.mark.parametrize("kind", named(SLOT_KINDS))
def test_an_empty_memory_equals_one_with_every_slot_hidden(
    kind: tuple[str, str, str], support: Tensor, memory: SlotMemory
) -> None:
    recall = build(*kind)
    hidden = torch.ones(TASKS, WAY, SLOTS, dtype=torch.bool)
    masked = recall(SupportSet.of(support), memory, hidden, SAMPLES, generator())
    empty = recall(SupportSet.of(support), memory.first(0), None, SAMPLES, generator())
    for recollection in (masked, empty):
        assert recollection.samples.isfinite().all()
        assert (recollection.divergence == 0).all()
        assert (recollection.weights == 0).all()


def test_gradients_stay_finite_with_hidden_rows_large_features_and_identical_slots(
    design: Design, support: Tensor, content: Tensor
) -> None:
    recall, consolidation = design
    hidden = torch.zeros(TASKS, WAY, SLOTS, dtype=torch.bool)
    hidden[0, 0] = True
    for case in (content, content * 1e4, content[:1].expand(SLOTS, -1), torch.zeros_like(content)):
        slots, shown = case.clone().requires_grad_(), support.clone().requires_grad_()
        memory = remember(consolidation, slots)
        recollection = recall(SupportSet.of(shown), memory, hidden, SAMPLES, generator())
        (recollection.samples.square().sum() + recollection.divergence.sum()).backward()
        assert shown.grad is not None
        assert shown.grad.isfinite().all()
        assert memory is None or slots.grad is not None
        assert slots.grad is None or slots.grad.isfinite().all()
        for parameter in recall.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()


def test_divergence_is_never_negative_beyond_sampling_error(
    design: Design, support: Tensor, content: Tensor
) -> None:
    recall, consolidation = design
    recollection = recall(
        SupportSet.of(support), remember(consolidation, content), None, 4000, generator()
    )
    assert (recollection.divergence >= -0.02).all()


@pytest.mark.parametrize("kind", named(LONG_TERM_KINDS))
def test_permuting_classes_permutes_weights_and_divergence(
    kind: tuple[str, str, str], support: Tensor, content: Tensor
) -> None:
    recall, consolidation = design_of(*kind)
    memory = remember(consolidation, content)
    monte_carlo = kind[2] == "monte_carlo" and kind[1] != "soft"
    samples = 20_000 if monte_carlo else SAMPLES  # an estimate agrees only up to its error
    order = torch.tensor([2, 0, 1])
    one = recall(SupportSet.of(support), memory, None, samples, generator())
    two = recall(SupportSet.of(support[:, order]), memory, None, samples, generator())
    torch.testing.assert_close(two.weights, one.weights[:, order])
    torch.testing.assert_close(two.divergence, one.divergence[:, order], rtol=0.1, atol=0.01)


def test_tasks_do_not_see_each_other(design: Design, support: Tensor, content: Tensor) -> None:
    recall, consolidation = design
    memory = remember(consolidation, content)
    both = recall(SupportSet.of(support), memory, None, SAMPLES, [generator(0), generator(1)])
    alone = recall(SupportSet.of(support[1:]), memory, None, SAMPLES, [generator(1)])
    for together, one in zip(both, alone, strict=True):
        torch.testing.assert_close(together[1:], one)


def test_what_is_logged_is_a_finite_number(
    design: Design, support: Tensor, content: Tensor
) -> None:
    recall, consolidation = design
    memory = remember(consolidation, content)
    recollection = recall(SupportSet.of(support), memory, None, SAMPLES, generator())
    logged = {name: value.item() for name, value in recall.diagnostics(recollection).items()}
    if consolidation is not None:
        assert memory is not None
        logged |= consolidation.diagnostics(memory)
        assert logged["slots"] == SLOTS
    assert all(math.isfinite(value) for value in logged.values())


def test_rote_recall_is_the_addressed_average(support: Tensor, memory: SlotMemory) -> None:
    recall = build("rote")
    assert isinstance(recall, RoteRecall)
    recollection = recall(SupportSet.of(support), memory, None, 1, generator())
    for t in range(TASKS):
        for n in range(WAY):
            expected = sum(recollection.weights[t, n, a] * memory.content[a] for a in range(SLOTS))
            torch.testing.assert_close(recollection.samples[t, n, 0], expected)


def test_rote_recall_of_nothing_is_the_support_mean(support: Tensor) -> None:
    support, nothing = support.float(), SlotMemory.empty(WIDTH)
    recollection = build("rote").float()(SupportSet.of(support), nothing, None, 1, generator())
    assert torch.equal(recollection.samples.squeeze(-2), support.mean(2))


def test_transformed_recall_transforms_the_rote_one(support: Tensor, memory: SlotMemory) -> None:
    recall = build("transformed")
    assert isinstance(recall, TransformedRecall)
    rote = build("rote")(SupportSet.of(support), memory, None, 1, generator())
    transformed = recall(SupportSet.of(support), memory, None, 1, generator())
    torch.testing.assert_close(transformed.samples, recall.transformation(rote.samples))


def slot_gaussians(recall: SlotRecall, content: Tensor) -> DiagonalGaussian:
    assert isinstance(recall, VariationalRecall)
    gaussian: DiagonalGaussian = recall.network(content)
    return gaussian


@pytest.mark.parametrize("kind", ["soft", "mixture"])
def test_samples_have_the_mean_and_variance_of_eq_8(
    kind: str, support: Tensor, memory: SlotMemory
) -> None:
    recall = build("vsm", kind)
    recollection = recall(SupportSet.of(support), memory, None, 60_000, generator())
    slots = slot_gaussians(recall, memory.content)
    for t in range(TASKS):
        for n in range(WAY):
            weights = recollection.weights[t, n]
            mean = sum(weights[a] * slots.mean[a] for a in range(SLOTS))
            second = sum(
                weights[a] * (slots.variance[a] + slots.mean[a] ** 2) for a in range(SLOTS)
            )
            assert isinstance(mean, Tensor)
            assert isinstance(second, Tensor)
            samples = recollection.samples[t, n]
            torch.testing.assert_close(samples.mean(0), mean, rtol=0, atol=0.03)
            torch.testing.assert_close(samples.var(0), second - mean**2, rtol=0.05, atol=0)


def test_soft_divergence_is_that_of_the_matched_gaussian_from_the_prior(
    support: Tensor, memory: SlotMemory
) -> None:
    recall = build("vsm", "soft")
    recollection = recall(SupportSet.of(support), memory, None, 1, generator())
    slots, prior = slot_gaussians(recall, memory.content), slot_gaussians(recall, support.mean(2))
    weights = recollection.weights[0, 1]
    mean = (weights.unsqueeze(-1) * slots.mean).sum(0)
    variance = (weights.unsqueeze(-1) * (slots.variance + slots.mean**2)).sum(0) - mean**2
    matched = torch.distributions.Normal(mean, variance.sqrt())
    target = torch.distributions.Normal(prior.mean[0, 1], prior.variance[0, 1].sqrt())
    expected = torch.distributions.kl_divergence(matched, target).sum()
    torch.testing.assert_close(recollection.divergence[0, 1], expected)


@pytest.mark.parametrize("kind", ["mixture", "gumbel"])
def test_monte_carlo_divergence_lies_below_the_bound_and_agrees_for_one_slot(
    kind: str, support: Tensor, memory: SlotMemory
) -> None:
    bound = build("vsm", kind, "bound")(SupportSet.of(support), memory, None, 20_000, generator())
    estimate = build("vsm", kind, "monte_carlo")(
        SupportSet.of(support), memory, None, 20_000, generator()
    )
    assert (bound.divergence >= estimate.divergence - 0.02).all()
    one_slot = memory.first(1)
    bound = build("vsm", kind, "bound")(SupportSet.of(support), one_slot, None, 20_000, generator())
    estimate = build("vsm", kind, "monte_carlo")(
        SupportSet.of(support), one_slot, None, 20_000, generator()
    )
    torch.testing.assert_close(estimate.divergence, bound.divergence, rtol=0.05, atol=0.02)


def test_monte_carlo_divergence_equals_a_direct_estimate(
    support: Tensor, memory: SlotMemory
) -> None:
    recall = build("vsm", "mixture", "monte_carlo")
    recollection = recall(SupportSet.of(support), memory, None, 300, generator())
    slots, prior = slot_gaussians(recall, memory.content), slot_gaussians(recall, support.mean(2))
    density = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(recollection.weights[1, 2]),
        torch.distributions.Independent(
            torch.distributions.Normal(slots.mean, slots.variance.sqrt()),
            1,
        ),
    )
    target = DiagonalGaussian(prior.mean[1, 2], prior.log_variance[1, 2])
    samples = recollection.samples[1, 2]
    expected = (density.log_prob(samples) - target.log_prob(samples)).mean()
    torch.testing.assert_close(recollection.divergence[1, 2], expected)


def test_ancestral_samples_come_from_slots_as_often_as_their_weights_say(
    support: Tensor, memory: SlotMemory
) -> None:
    recall = build("vsm", "mixture", addressing_scale=2.0)
    assert isinstance(recall, VariationalRecall)
    far_apart = DiagonalGaussian(
        100.0 * torch.arange(SLOTS).view(-1, 1).expand(-1, WIDTH).double(),
        torch.full((SLOTS, WIDTH), -8.0).double(),
    )
    weights = recall.addressing(support.mean(2), memory.content, None)
    drawn, chosen = recall._ancestral(weights, far_apart, 20_000, generator())
    slots = (drawn.sample(1, generator())[0, 0, :, 0, 0] / 100).round().long()
    assert torch.equal(slots, chosen[0, 0])
    frequency = torch.bincount(slots, minlength=SLOTS) / 20_000
    torch.testing.assert_close(frequency.double(), weights[0, 0], rtol=0, atol=0.015)


def test_soft_recall_teaches_the_addressing_and_ancestral_choice_does_not(
    support: Tensor, memory: SlotMemory
) -> None:
    def scale_gradient(kind: str) -> Tensor | None:
        recall = build("vsm", kind)
        recall(SupportSet.of(support), memory, None, SAMPLES, generator()).samples.sum().backward()
        return recall.addressing.log_scale.grad

    soft, mixture, gumbel = (scale_gradient(kind) for kind in ("soft", "mixture", "gumbel"))
    assert soft is not None
    assert soft != 0
    assert gumbel is not None
    assert gumbel != 0
    assert mixture is None


def test_cold_gumbel_recall_approaches_the_ancestral_one(
    support: Tensor, memory: SlotMemory
) -> None:
    cold = build("vsm", "gumbel", gumbel_temperature=0.05, addressing_scale=2.0)
    ancestral = build("vsm", "mixture", addressing_scale=2.0)
    one = cold(SupportSet.of(support), memory, None, 40_000, generator(1)).samples
    two = ancestral(SupportSet.of(support), memory, None, 40_000, generator(2)).samples
    torch.testing.assert_close(one.mean(2), two.mean(2), rtol=0, atol=0.03)
    torch.testing.assert_close(one.var(2), two.var(2), rtol=0.06, atol=0)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros for normal numbers, so that samples are means; uniform ones in double precision."""
    zeros = partial(torch.zeros, dtype=torch.float64)
    monkeypatch.setattr("vsm.nn.distributions.normal", lambda _, *shape: zeros(shape))
    monkeypatch.setattr("vsm.memory.slots.recall.uniform", doubles)


def doubles(random: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=random, dtype=torch.float64)


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_gumbel_weights_are_the_softmax_of_the_noisy_log_weights_over_the_temperature(
    temperature: float, support: Tensor, memory: SlotMemory
) -> None:
    recall = build("vsm", "gumbel", gumbel_temperature=temperature, addressing_scale=2.0)
    recollection = recall(SupportSet.of(support), memory, None, SAMPLES, generator(5))
    means = slot_gaussians(recall, memory.content).mean.tolist()
    uniforms = doubles(generator(5), TASKS, WAY, SAMPLES, SLOTS).tolist()
    weights = recollection.weights.tolist()
    for t in range(TASKS):
        for n in range(WAY):
            for j in range(SAMPLES):
                scores = []
                for a in range(SLOTS):
                    gumbel = -math.log(-math.log(uniforms[t][n][j][a]))
                    scores.append(math.exp((math.log(weights[t][n][a]) + gumbel) / temperature))
                expected = [
                    sum(scores[a] * means[a][d] for a in range(SLOTS)) / sum(scores)
                    for d in range(WIDTH)
                ]
                assert recollection.samples[t, n, j].tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("without_noise")
def test_cold_gumbel_recall_chooses_slots_as_often_as_their_weights_say(
    support: Tensor, memory: SlotMemory
) -> None:
    count = 40_000
    recall = build("vsm", "gumbel", gumbel_temperature=1e-4, addressing_scale=3.0)
    recollection = recall(SupportSet.of(support), memory, None, count, generator())
    means = slot_gaussians(recall, memory.content).mean
    random = torch.Generator().manual_seed(1)
    for t in range(TASKS):
        for n in range(WAY):
            weights = recollection.weights[t, n]
            nearest = torch.cdist(recollection.samples[t, n], means).argmin(-1)
            frequency = torch.bincount(nearest, minlength=SLOTS).double() / count
            error = (weights * (1 - weights) / count).sqrt()  # of a frequency, one std
            assert ((frequency - weights).abs() < 4 * error).all()
            # The noise is not symmetric: negated, it would choose by other chances.
            negated = torch.rand(count, SLOTS, generator=random).double().log().neg().log()
            other = torch.bincount((weights.log() + negated).argmax(-1), minlength=SLOTS) / count
            assert ((other - weights).abs() > 8 * error).any()


def test_hidden_slots_never_enter_gumbel_recall(support: Tensor, memory: SlotMemory) -> None:
    hidden = torch.zeros(TASKS, WAY, SLOTS, dtype=torch.bool)
    hidden[..., 3] = True
    support, content = support.float(), memory.content.float()  # where log 0 is not far away
    changed = content.clone()
    recall = build("vsm", "gumbel", center_addressing=False, gumbel_temperature=20.0).float()
    one = recall(SupportSet.of(support), slots_of(content), hidden, SAMPLES, generator())
    changed[3] = 77.0
    two = recall(SupportSet.of(support), slots_of(changed), hidden, SAMPLES, generator())
    torch.testing.assert_close(one.samples, two.samples)


@pytest.mark.parametrize("part", ["samples", "divergence"])
@pytest.mark.parametrize("learns", ["support", "content", "scale", "network"])
def test_gradients_of_soft_recall_are_those_of_finite_differences(
    learns: str, part: str, support: Tensor, memory: SlotMemory
) -> None:
    """Nothing of Eq. 8 or of KL_m is a constant: not λ, not the variances, not the prior."""
    recall = build("vsm", "soft", addressing_scale=3.0)
    assert isinstance(recall, VariationalRecall)
    learned = {
        "support": support,
        "content": memory.content,
        "scale": recall.addressing.log_scale.detach(),
        "network": recall.network.head.output.bias.detach(),
    }
    names = {"scale": "addressing.log_scale", "network": "network.head.output.bias"}

    def of(value: Tensor) -> Tensor:
        given = {**learned, learns: value}
        parameters = {name: given[which] for which, name in names.items()}
        shown, slots = SupportSet.of(given["support"]), slots_of(given["content"])
        recollection = torch.func.functional_call(
            recall, parameters, (shown, slots, None, 2, generator())
        )
        wanted: Tensor = getattr(recollection, part)
        return wanted

    assert torch.autograd.gradcheck(of, learned[learns].clone().requires_grad_(), atol=1e-7)


def test_mixture_of_equal_slots_is_that_slot(support: Tensor, memory: SlotMemory) -> None:
    recall = build("vsm", "soft")
    same = slots_of(memory.content[:1].expand(SLOTS, -1))
    slots = slot_gaussians(recall, memory.content[:1])
    moments = GaussianMixture(slots).moments()
    recollection = recall(SupportSet.of(support), same, None, 30_000, generator())
    torch.testing.assert_close(
        recollection.samples.mean(2), moments.mean.expand(TASKS, WAY, -1), rtol=0, atol=0.03
    )


def test_the_divergence_teaches_the_addressing_in_the_right_direction() -> None:
    """In one dimension the divergence and its gradient are integrals over a fine grid."""
    logits = torch.tensor([0.2, -0.3, 0.5], dtype=torch.float64, requires_grad=True)
    slots = DiagonalGaussian(
        torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.tensor([[0.0], [-1.0], [0.5]]).double()
    )
    prior = DiagonalGaussian(torch.zeros(1, 1, 1).double(), torch.zeros(1, 1, 1).double())

    grid = torch.linspace(-15, 18, 40_001, dtype=torch.float64).view(-1, 1)
    log_q = torch.logsumexp(pairwise_log_prob(grid, slots) + logits.log_softmax(-1), -1)
    integrand = log_q.exp() * (log_q - prior.log_prob(grid.view(1, 1, -1, 1)).flatten())
    exact = torch.trapezoid(integrand, grid.flatten())
    [exact_gradient] = torch.autograd.grad(exact, logits)

    weights = logits.softmax(-1).view(1, 1, 3)
    chosen = torch.multinomial(
        weights.detach()[0], 200_000, replacement=True, generator=generator()
    ).unsqueeze(0)
    noise = torch.randn(1, 1, 200_000, 1, generator=generator(1)).double()
    drawn = DiagonalGaussian(slots.mean[chosen], slots.log_variance[chosen])
    samples = drawn.mean + drawn.variance.sqrt() * noise
    estimate = mixture_divergence(weights, slots, prior, samples, chosen)
    torch.testing.assert_close(estimate.squeeze(), exact, rtol=0.02, atol=0)
    [gradient] = torch.autograd.grad(estimate.sum(), logits)
    torch.testing.assert_close(gradient, exact_gradient, rtol=0.03, atol=0.01)
    assert exact_gradient.abs().min() > 0.05  # large enough for the comparison to mean something
