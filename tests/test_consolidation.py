"""Eqs. 11-13, appending and capacity, against plain loops in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vsm.memory import Observations, SlotConsolidation, SlotMemory
from vsm.settings import MemorySettings

WIDTH = 4


def memory_of(*class_ids: int, seed: int = 0) -> SlotMemory:
    random = torch.Generator().manual_seed(seed)
    count = len(class_ids)
    return SlotMemory(
        torch.rand(count, WIDTH, generator=random, dtype=torch.float64),
        torch.tensor(class_ids, dtype=torch.int64),
        torch.arange(1, count + 1),
        torch.zeros(count, dtype=torch.int64),
    )


def observe(*class_ids: int, seed: int = 1) -> Observations:
    random = torch.Generator().manual_seed(seed)
    features = torch.rand(len(class_ids), WIDTH, generator=random, dtype=torch.float64)
    return Observations(features, torch.tensor(class_ids))


def build(**settings: object) -> SlotConsolidation:
    torch.manual_seed(0)
    return SlotConsolidation(WIDTH, replace(MemorySettings(), **settings)).double()  # type: ignore[arg-type]


def loop_update(
    module: SlotConsolidation, old: Tensor, samples: list[Tensor], retention: float
) -> Tensor:
    """Eqs. 11-13 for one class, one scalar at a time."""
    nodes = [old, *samples]
    exponentials = []
    for node in nodes:
        score = sum(
            module.attention_memory[d].item() * old[d].item()
            + module.attention_sample[d].item() * node[d].item()
            for d in range(WIDTH)
        )
        scale = module.attention_scale
        exponentials.append(math.exp(scale * (score if score > 0 else 0.2 * score)))
    total = sum(exponentials)
    new = [
        sum(e / total * node[d].item() for e, node in zip(exponentials, nodes, strict=True))
        for d in range(WIDTH)
    ]
    return torch.tensor(
        [retention * old[d].item() + (1 - retention) * new[d] for d in range(WIDTH)],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_seen_classes_are_updated_as_plain_loops_do(scale: float) -> None:
    memory, seen = memory_of(7, 3, 5), observe(5, 7, 5, 7, 7)
    module = build(retention=0.7, attention_scale=scale)
    module.attention_sample.data *= 10  # make the attention uneven
    updated = module(memory, seen, step=9)
    for slot, class_id in ((0, 7), (2, 5)):
        samples = [f for f, c in zip(*seen, strict=True) if c == class_id]
        expected = loop_update(module, memory.content[slot], samples, 0.7)
        torch.testing.assert_close(updated.content[slot], expected)
    assert torch.equal(updated.content[1], memory.content[1])
    assert updated.counts.tolist() == [1 + 3, 2, 3 + 2]
    assert updated.last_update.tolist() == [9, 0, 9]


def test_the_old_memory_is_untouched() -> None:
    memory = memory_of(7, 3)
    before = memory.content.clone()
    build()(memory, observe(7, 8), step=1)
    assert torch.equal(memory.content, before)
    assert memory.class_ids.tolist() == [7, 3]


def test_unseen_classes_append_the_mean_of_all_their_samples() -> None:
    memory, seen = memory_of(7), observe(4, 7, 4, 2)
    updated = build()(memory, seen, step=3)
    assert updated.class_ids.tolist() == [7, 2, 4]
    torch.testing.assert_close(updated.content[1], seen.features[3])
    torch.testing.assert_close(updated.content[2], (seen.features[0] + seen.features[2]) / 2)
    assert updated.counts.tolist()[1:] == [1, 2]
    assert updated.last_update.tolist() == [3, 3, 3]


def test_memory_grows_from_empty() -> None:
    updated = build()(SlotMemory.empty(WIDTH), observe(4, 2, 4), step=1)
    assert updated.class_ids.tolist() == [2, 4]


def test_attention_weights_sum_to_one_for_every_class() -> None:
    module = build()
    old = torch.rand(2, WIDTH).double()
    nodes = torch.cat([old, torch.rand(5, WIDTH).double()])
    segment = torch.tensor([0, 1, 0, 0, 1, 1, 1])
    weights = module.attention_weights(old, nodes, segment)
    for c in range(2):
        assert weights[segment == c].sum().item() == pytest.approx(1)


def test_the_order_of_samples_does_not_matter() -> None:
    memory, seen = memory_of(7, 3), observe(3, 7, 3, 9, 7)
    order = torch.tensor([4, 2, 0, 3, 1])
    shuffled = Observations(seen.features[order], seen.class_ids[order])
    one, two = build()(memory, seen, 1), build()(memory, shuffled, 1)
    torch.testing.assert_close(one.content, two.content)
    assert torch.equal(one.class_ids, two.class_ids)


def test_the_mean_update_replaces_attention_by_the_plain_mean() -> None:
    memory, seen = memory_of(7), observe(7, 7)
    updated = build(update="mean", retention=0.6)(memory, seen, 1)
    expected = 0.6 * memory.content[0] + 0.4 * seen.features.mean(0)
    torch.testing.assert_close(updated.content[0], expected)


@pytest.mark.parametrize("retention", [0.0, 1.0])
def test_retention_keeps_all_or_nothing_at_its_ends(retention: float) -> None:
    memory, seen = memory_of(7), observe(7, 7)
    module = build(retention=retention)
    updated = module(memory, seen, 1)
    expected = loop_update(module, memory.content[0], list(seen.features), retention)
    torch.testing.assert_close(updated.content[0], expected)
    assert torch.equal(updated.content[0], memory.content[0]) == (retention == 1.0)


def test_softmax_activation_makes_the_new_content_a_probability_vector() -> None:
    updated = build(update_activation="softmax", retention=0.0)(memory_of(7), observe(7, 7), 1)
    assert updated.content[0].sum().item() == pytest.approx(1)


def test_both_halves_of_the_attention_vector_receive_gradient_that_finite_differences_confirm() -> (
    None
):
    memory, seen = memory_of(7, 3), observe(3, 7, 3, 7)
    # Scores on both sides of the bend, or the memory's half would cancel in the softmax.
    seen = Observations(
        seen.features * torch.tensor([[1.0], [-3.0], [-2.0], [2.0]]), seen.class_ids
    )
    module = build()

    def content(half_memory: Tensor, half_sample: Tensor) -> Tensor:
        changed: SlotMemory = torch.func.functional_call(
            module,
            {"attention_memory": half_memory, "attention_sample": half_sample},
            (memory, seen, 1),
        )
        return changed.content

    halves = (
        module.attention_memory.detach().clone().requires_grad_(),
        module.attention_sample.detach().clone().requires_grad_(),
    )
    assert torch.autograd.gradcheck(content, halves)
    content(*halves).square().sum().backward()
    assert all(half.grad is not None and half.grad.abs().max() > 0 for half in halves)


@pytest.mark.parametrize(("scale", "learns"), [(1.0, False), (30.0, True)])
def test_attention_learns_to_pass_over_noise_if_its_logits_have_a_scale(
    scale: float, learns: bool
) -> None:
    """One of five samples is noise, known by its first feature; all are of length one, as usual.

    The rest of the class tells what the slot should be. Without a scale, two hundred steps of Adam
    leave the noise the weight that it has in the mean.
    """
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    module = SlotConsolidation(32, MemorySettings(attention_scale=scale))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    classes = torch.arange(10).repeat(5)
    shares = []
    for _ in range(200):
        patterns = torch.randn(10, 32, generator=random)
        samples = patterns.repeat(5, 1) + 0.3 * torch.randn(50, 32, generator=random)
        samples[:10] = torch.randn(10, 32, generator=random)
        samples[:, 0] = patterns[:, 0] = 0.0
        samples[:10, 0] = 6.0
        samples, target = (torch.nn.functional.normalize(one, dim=1) for one in (samples, patterns))
        nodes, segment = torch.cat([target, samples]), torch.cat([torch.arange(10), classes])
        weights = module.attention_weights(target, nodes, segment)
        new = torch.zeros(10, 32).index_add(0, segment, weights.unsqueeze(1) * nodes)
        loss = (new - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shares.append(weights[10:20].mean().item())  # 1 / 6 in the mean of slot and samples
    assert shares[0] == pytest.approx(1 / 6, abs=0.03)
    last = sum(shares[-20:]) / 20
    assert last < 0.1 if learns else last > 0.14


def test_identical_and_huge_features_stay_finite() -> None:
    memory = memory_of(7, 3)
    for scale in (0.0, 1e4):
        seen = Observations(torch.full((4, WIDTH), scale).double(), torch.tensor([7, 3, 7, 1]))
        assert build()(memory, seen, 1).content.isfinite().all()


def test_capacity_ignores_new_classes_when_full() -> None:
    module = build(capacity=2)
    memory = module(SlotMemory.empty(WIDTH), observe(5, 1, 9), step=1)
    assert memory.class_ids.tolist() == [1, 5]
    assert module(memory, observe(9, 5), step=2).class_ids.tolist() == [1, 5]


def test_masks_hide_nothing_the_own_slot_or_the_whole_task() -> None:
    memory = memory_of(7, 3, 5, 8)
    batch = torch.tensor([[3, 8], [1, 7]])
    assert memory.slot_mask(batch, "none") is None
    own, task = memory.slot_mask(batch, "own"), memory.slot_mask(batch, "task")
    assert own is not None
    assert task is not None
    assert own[0].tolist() == [[False, True, False, False], [False, False, False, True]]
    assert task[0].tolist() == [[False, True, False, True]] * 2
    assert task[1].tolist() == [[True, False, False, False]] * 2
