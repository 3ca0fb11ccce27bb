"""The forward pass: limits in which methods coincide, symmetries, and robustness."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from memories import remember
from tiny import variant
from vsm.memory import MEMORIES, Memory, SlotMemory
from vsm.model import FewShotModel, Prediction, objective
from vsm.nn.layers import GaussianNetwork, MemoryConditionedNetwork, predictive
from vsm.settings import (
    METHODS,
    KanervaSettings,
    MannSettings,
    MemorySettings,
    Method,
    ModelSettings,
    RunSettings,
    SamplingSettings,
)

TASKS, WAY, SHOT, QUERIES, SLOTS = 2, 3, 2, 4, 9
IMAGE = (1, 28, 28)
WIDTH = 16  # four channels on a 2×2 grid
LONG_TERM = [method for method in METHODS if RunSettings(method=method).uses_memory]


def build(method: Method, residual: bool = False, **memory: object) -> FewShotModel:
    settings = variant(
        RunSettings(),
        method=method,
        model=ModelSettings(
            inference="network",
            channels=4,
            hidden_units=8,
            residual=residual,
            initial_log_variance=0.0,
        ),
        memory=replace(MemorySettings(), **memory),  # type: ignore[arg-type]
        mann=MannSettings(slots=12, width=4, reads=2, controller_units=6),
        kanerva=KanervaSettings(slots=SLOTS),
        sampling=SamplingSettings(6, 5, 6, 5),
    )
    return FewShotModel(settings, IMAGE).double()


def features(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return scale * torch.rand(*shape, WIDTH, generator=random).double()


def memory_of(model: FewShotModel, num_slots: int = SLOTS, scale: float = 1.0) -> Memory | None:
    return remember(model.consolidation, features(num_slots, seed=3, scale=scale))


def forward(
    model: FewShotModel, memory: Memory | None = None, scale: float = 1.0, seed: int = 0
) -> Prediction:
    prediction: Prediction = model(
        features(TASKS, WAY, SHOT, seed=1, scale=scale),
        features(TASKS, WAY, QUERIES, seed=2, scale=scale),
        memory_of(model, SLOTS, scale) if memory is None else memory,
        torch.Generator().manual_seed(seed),
    )
    return prediction


@pytest.mark.parametrize("method", METHODS)
def test_probabilities_are_normalized(method: Method) -> None:
    probabilities = predictive(forward(build(method)).log_probabilities).exp()
    assert probabilities.shape == (TASKS, WAY * QUERIES, WAY)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(TASKS, WAY * QUERIES).double())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_slots", [0, 1, SLOTS])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_losses_and_gradients_stay_finite(method: Method, num_slots: int, scale: float) -> None:
    model = build(method)
    prediction = forward(model, memory_of(model, num_slots, scale), scale)
    queries = features(TASKS, WAY, QUERIES, seed=2, scale=scale)
    prior = model.prior(queries) if method != "protonet" else None
    terms = objective(prediction, prior, model.settings.objective)
    assert terms.total.isfinite()
    if terms.total.requires_grad:
        terms.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_without_weights_on_the_memory_vsm_is_the_variational_prototype_network() -> None:
    vsm, vpn = build("vsm"), build("vpn")
    assert isinstance(vsm.inference, MemoryConditionedNetwork)
    assert isinstance(vpn.inference, GaussianNetwork)
    vsm.inference.first_memory.weight.data.zero_()
    vpn.inference.first.load_state_dict(vsm.inference.first_support.state_dict())
    vpn.inference.head.load_state_dict(vsm.inference.head.state_dict())
    components = forward(vsm).posterior.mixture
    single = forward(vpn).posterior.mixture
    assert components is not None
    assert single is not None
    for attribute in ("mean", "log_variance"):
        torch.testing.assert_close(
            getattr(components.components, attribute),
            getattr(single.components, attribute).expand(TASKS, WAY, 6, WIDTH),
        )


@pytest.mark.parametrize("method", ["vpn", *MEMORIES])
def test_with_identity_inference_and_no_variance_every_method_is_protonet(method: Method) -> None:
    model = build(method, residual=True)  # residual networks start as the identity
    assert isinstance(model.inference, GaussianNetwork | MemoryConditionedNetwork)
    with torch.no_grad():
        model.inference.head.output.bias[model.num_features :] = -1e9
    expected = predictive(forward(build("protonet")).log_probabilities)
    # The bound on log-variance leaves a standard deviation of exp(-5) for the samples.
    measured = predictive(forward(model).log_probabilities)
    torch.testing.assert_close(measured, expected, rtol=0, atol=0.05)


def test_protonet_classifies_by_the_mean_of_the_support() -> None:
    prediction = forward(build("protonet"))
    support = features(TASKS, WAY, SHOT, seed=1)
    torch.testing.assert_close(prediction.posterior.prototypes.squeeze(2), support.mean(2))


@pytest.mark.parametrize("method", LONG_TERM)
def test_memory_changes_the_prediction_and_is_not_changed_by_it(method: Method) -> None:
    model = build(method)
    memory = memory_of(model)
    assert memory is not None
    before = {name: value.clone() for name, value in memory.tensors().items()}
    one = forward(model, memory).log_probabilities
    assert all(torch.equal(value, before[name]) for name, value in memory.tensors().items())
    other = remember(model.consolidation, features(SLOTS, seed=3).flip(-1))
    assert not torch.allclose(one, forward(model, other).log_probabilities)


@pytest.mark.parametrize("method", MEMORIES)
def test_queries_never_reach_the_recollection(method: Method) -> None:
    model = build(method)
    memory, support = memory_of(model), features(TASKS, WAY, SHOT, seed=1)
    one, two = (
        model(
            support,
            features(TASKS, WAY, QUERIES, seed=seed),
            memory,
            torch.Generator().manual_seed(0),
        ).posterior.recollection
        for seed in (2, 5)
    )
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_a_memory_to_store_if_and_only_if_the_settings_say_so(method: Method) -> None:
    model = build(method)
    assert (model.empty_memory() is not None) == model.settings.uses_memory
    assert (model.recall is not None) == (method in MEMORIES)


@pytest.mark.parametrize("method", ["rote", "transformed", "vsm"])
def test_the_order_of_slots_does_not_matter(method: Method) -> None:
    model = build(method)
    memory = memory_of(model)
    assert isinstance(memory, SlotMemory)
    shuffled = memory.keep(torch.randperm(SLOTS, generator=torch.Generator().manual_seed(5)))
    torch.testing.assert_close(
        forward(model, memory).log_probabilities, forward(model, shuffled).log_probabilities
    )


def test_a_memory_method_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory: the method vsm needs one"):
        build("vsm")(features(1, 2, 1, seed=0), features(1, 2, 1, seed=0), None, torch.Generator())


def test_splitting_the_first_layer_equals_concatenating_its_inputs() -> None:
    network = MemoryConditionedNetwork(
        WIDTH, ModelSettings(inference="network", hidden_units=8, residual=False)
    ).double()
    samples, support = features(TASKS, WAY, 6, seed=0), features(TASKS, WAY, seed=1)
    joined = torch.cat([samples, support.unsqueeze(2).expand(-1, -1, 6, -1)], -1)
    weight = torch.cat([network.first_memory.weight, network.first_support.weight], 1)
    first = torch.nn.functional.linear(joined, weight, network.first_support.bias)
    expected = network.head(first, support.unsqueeze(2))
    measured = network(samples, support)
    torch.testing.assert_close(measured.mean, expected.mean)
    torch.testing.assert_close(measured.log_variance, expected.log_variance)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, two = build("vsm"), build("vsm")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = FewShotModel(replace(one.settings, seed=1), IMAGE).double()
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    build("vsm")
    assert torch.equal(torch.rand(3), expected)


def test_mirrored_images_have_the_same_features_if_both_are_averaged() -> None:
    plain = build("protonet").eval()
    model = FewShotModel(
        replace(plain.settings, model=replace(plain.settings.model, mirror=True)), IMAGE
    )
    model.double().eval().load_state_dict(plain.state_dict())
    images = torch.rand(3, *IMAGE, generator=torch.Generator().manual_seed(0)).double()
    turned = images.flip(-1)
    torch.testing.assert_close(model.embed(images), model.embed(turned))
    expected = (plain.embed(images) + plain.embed(turned)) / 2
    torch.testing.assert_close(model.embed(images), expected)
    assert not torch.allclose(plain.embed(images), plain.embed(turned))


@pytest.mark.parametrize("mirror", [False, True])
def test_features_of_moved_images_are_averaged(mirror: bool) -> None:
    plain = build("protonet").eval()
    settings = replace(plain.settings.model, mirror=mirror, shift=2)
    model = FewShotModel(replace(plain.settings, model=settings), IMAGE)
    model.double().eval().load_state_dict(plain.state_dict())
    images = torch.rand(3, *IMAGE, generator=torch.Generator().manual_seed(0)).double()
    _, height, width = IMAGE
    expected = []
    for down, right in ((0, 0), (2, 0), (-2, 0), (0, 2), (0, -2)):
        moved = torch.empty_like(images)
        for row in range(height):
            for column in range(width):
                source = min(max(row - down, 0), height - 1), min(max(column - right, 0), width - 1)
                moved[..., row, column] = images[..., *source]
        expected += [plain.embed(moved)] + ([plain.embed(moved.flip(-1))] if mirror else [])
    torch.testing.assert_close(model.embed(images), torch.stack(expected).mean(0))
    assert not torch.allclose(plain.embed(images), model.embed(images))


def test_normalized_features_have_length_one() -> None:
    settings = RunSettings(model=ModelSettings(channels=4, normalize_features=True))
    model = FewShotModel(settings, IMAGE)
    lengths = model.embed(torch.rand(5, *IMAGE)).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(5))
