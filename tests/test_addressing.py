"""Eq. 9 against plain loops, and its corner cases."""

import math

import pytest
import torch
from torch import Tensor

from vsm.memory.slots.recall import Addressing, entropy, masked_softmax
from vsm.settings import MemorySettings

TASKS, WAY, SLOTS, WIDTH = 2, 3, 6, 4


@pytest.fixture
def support_mean() -> Tensor:
    return torch.rand(TASKS, WAY, WIDTH, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture
def content() -> Tensor:
    return torch.rand(SLOTS, WIDTH, generator=torch.Generator().manual_seed(2)).double()


def loop_weights(
    support_mean: Tensor, content: Tensor, similarity: str, scale: float, centered: bool
) -> Tensor:
    weights = torch.zeros(TASKS, WAY, len(content), dtype=torch.float64)
    width = content.shape[1]
    center = [content[:, d].mean().item() if centered else 0.0 for d in range(width)]
    for t in range(TASKS):
        for n in range(WAY):
            h = [support_mean[t, n, d].item() - center[d] for d in range(width)]
            scores = []
            for slot in content:
                m = [slot[d].item() - center[d] for d in range(width)]
                dot = sum(x * y for x, y in zip(h, m, strict=True))
                if similarity == "cosine":
                    dot /= math.hypot(*h) * math.hypot(*m)
                scores.append(math.exp(scale * dot))
            weights[t, n] = torch.tensor(scores) / sum(scores)
    return weights


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("centered", [True, False])
def test_weights_equal_plain_loops(
    support_mean: Tensor, content: Tensor, similarity: str, centered: bool
) -> None:
    settings = MemorySettings(
        addressing=similarity,  # type: ignore[arg-type]
        addressing_scale=7.0,
        center_addressing=centered,
    )
    weights = Addressing(settings).double()(support_mean, content, None)
    expected = loop_weights(support_mean, content, similarity, 7.0, centered)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(TASKS, WAY).double())


def test_permuting_slots_permutes_weights(support_mean: Tensor, content: Tensor) -> None:
    addressing = Addressing(MemorySettings()).double()
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))
    weights = addressing(support_mean, content, None)
    torch.testing.assert_close(addressing(support_mean, content[order], None), weights[..., order])


def test_hidden_slots_get_no_weight_and_the_rest_sums_to_one(
    support_mean: Tensor, content: Tensor
) -> None:
    hidden = torch.zeros(TASKS, WAY, SLOTS, dtype=torch.bool)
    hidden[0, 1, 2:5] = True
    weights = Addressing(MemorySettings()).double()(support_mean, content, hidden)
    assert (weights[0, 1, 2:5] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(TASKS, WAY).double())


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_addressing_is_as_if_hidden_slots_were_not_there(
    support_mean: Tensor, content: Tensor, similarity: str
) -> None:
    """Also not through the center: weights are those of plain loops over the other slots."""
    settings = MemorySettings(addressing=similarity, addressing_scale=7.0)  # type: ignore[arg-type]
    addressing = Addressing(settings).double()
    content = content + 3.0  # a large common part
    hidden = torch.rand(TASKS, WAY, SLOTS, generator=torch.Generator().manual_seed(3)) < 0.4
    hidden[..., :2] = False  # a slot alone is its own center
    weights = addressing(support_mean, content, hidden)
    for t in range(TASKS):
        for n in range(WAY):
            seen = ~hidden[t, n]
            alone = loop_weights(support_mean, content[seen], similarity, 7.0, centered=True)
            torch.testing.assert_close(weights[t, n, seen], alone[t, n], rtol=1e-6, atol=1e-9)
            assert not weights[t, n, ~seen].any()
    everywhere = torch.zeros_like(hidden)
    everywhere[..., 2] = True
    far = content.clone()
    far[2] = 50.0
    torch.testing.assert_close(
        addressing(support_mean, far, everywhere), addressing(support_mean, content, everywhere)
    )


def test_a_row_with_every_slot_hidden_is_zero_and_has_finite_gradients(
    support_mean: Tensor, content: Tensor
) -> None:
    hidden = torch.zeros(TASKS, WAY, SLOTS, dtype=torch.bool)
    hidden[1] = True
    content.requires_grad_()
    weights = Addressing(MemorySettings()).double()(support_mean, content, hidden)
    assert (weights[1] == 0).all()
    weights.square().sum().backward()
    assert content.grad is not None
    assert content.grad.isfinite().all()


def test_an_empty_memory_gives_no_weights(support_mean: Tensor) -> None:
    weights = Addressing(MemorySettings()).double()(
        support_mean, torch.zeros(0, WIDTH).double(), None
    )
    assert weights.shape == (TASKS, WAY, 0)


def test_a_single_slot_gets_all_the_weight(support_mean: Tensor, content: Tensor) -> None:
    weights = Addressing(MemorySettings()).double()(support_mean, content[:1], None)
    assert (weights == 1).all()


def test_the_scale_learns_unless_it_is_fixed(support_mean: Tensor, content: Tensor) -> None:
    learning = Addressing(MemorySettings()).double()
    learning(support_mean, content, None).square().sum().backward()
    assert learning.log_scale.grad is not None
    assert learning.log_scale.grad != 0
    assert not Addressing(MemorySettings(learn_addressing_scale=False)).log_scale.requires_grad


def test_the_uniform_control_addresses_all_visible_slots_alike(
    support_mean: Tensor, content: Tensor
) -> None:
    hidden = torch.zeros(TASKS, WAY, SLOTS, dtype=torch.bool)
    hidden[:, 0, :2] = True
    weights = Addressing(MemorySettings(control="uniform"))(support_mean, content, hidden)
    torch.testing.assert_close(weights[:, 0, 2:], torch.full((TASKS, 4), 1 / 4).double())
    torch.testing.assert_close(weights[:, 1:], torch.full((TASKS, WAY - 1, 6), 1 / 6).double())
    assert (weights[:, 0, :2] == 0).all()


def test_the_permuted_control_gives_every_slot_the_weight_of_another(
    support_mean: Tensor, content: Tensor
) -> None:
    weights = Addressing(MemorySettings())(support_mean, content, None)
    permuted = Addressing(MemorySettings(control="permuted"))(support_mean, content, None)
    for slot in range(SLOTS):
        torch.testing.assert_close(permuted[..., (slot + 3) % SLOTS], weights[..., slot])
    hidden = torch.zeros(TASKS, WAY, SLOTS, dtype=torch.bool)
    hidden[..., 1] = True
    masked = Addressing(MemorySettings(control="permuted"))(support_mean, content, hidden)
    assert (masked[..., 1] == 0).all()
    torch.testing.assert_close(masked.sum(-1), torch.ones(TASKS, WAY).double())


def test_masked_softmax_passes_finite_difference_checks() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    hidden = torch.tensor([[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert torch.autograd.gradcheck(
        lambda x: masked_softmax(x.masked_fill(hidden, -torch.inf)), logits
    )


def test_entropy_is_log_of_the_number_of_equally_weighted_slots() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(entropy(weights), torch.tensor([math.log(4), 0.0]))
