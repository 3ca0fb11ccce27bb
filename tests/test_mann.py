"""Least recently used access against plain loops in float64, and what a recollection depends on."""

import math

import pytest
import torch
from torch import Tensor

from vsm.errors import SettingsError
from vsm.memory import SupportSet
from vsm.memory.slots.mann import MannRecall, content_weights, least_used
from vsm.settings import MannSettings, RunSettings

TASKS, WAY, SHOT, WIDTH = 2, 3, 2, 5
SETTINGS = MannSettings(slots=7, width=4, reads=2, controller_units=6, usage_decay=0.8)


def build(settings: MannSettings = SETTINGS) -> MannRecall:
    torch.manual_seed(0)
    recall = MannRecall(WIDTH, RunSettings(method="mann", mann=settings)).double()
    with torch.no_grad():  # gates and keys that differ from head to head
        recall.gate.bias.copy_(torch.linspace(-1, 1, settings.reads))
        recall.keys.weight.mul_(4)
    return recall


def support_of(way: int = WAY, shot: int = SHOT, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(TASKS, way, shot, WIDTH, generator=random, dtype=torch.float64)


def in_turn(count: int) -> Tensor:
    return torch.arange(count).expand(TASKS, -1)


class LoopMemory:
    """One task's memory as the original's equations have it, one number at a time."""

    def __init__(self, settings: MannSettings) -> None:
        self.settings = settings
        self.content = [[0.0] * settings.width for _ in range(settings.slots)]
        self.read_weights = [[0.0] * settings.slots for _ in range(settings.reads)]
        self.usage = [0.0] * settings.slots

    def step(self, keys: list[list[float]], gates: list[float]) -> None:
        places = range(self.settings.slots)
        least = sorted(places, key=lambda i: (self.usage[i], i))[: self.settings.reads]
        write_weights = [
            [
                gate * self.read_weights[r][i] + (1 - gate) * (1.0 if i == least[r] else 0.0)
                for i in places
            ]
            for r, gate in enumerate(gates)
        ]
        for i in least:
            self.content[i] = [0.0] * self.settings.width
        for r, key in enumerate(keys):
            for i in places:
                self.content[i] = [
                    old + write_weights[r][i] * k
                    for old, k in zip(self.content[i], key, strict=True)
                ]
        self.read_weights = [self.attend(key) for key in keys]
        for i in places:
            self.usage[i] *= self.settings.usage_decay
            self.usage[i] += sum(w[i] for w in self.read_weights) + sum(w[i] for w in write_weights)

    def attend(self, key: list[float]) -> list[float]:
        cosines = [
            sum(a * b for a, b in zip(key, place, strict=True))
            / (math.dist(key, [0] * len(key)) * max(math.dist(place, [0] * len(place)), 1e-4))
            for place in self.content
        ]
        total = sum(math.exp(c) for c in cosines)
        return [math.exp(c) / total for c in cosines]


def test_every_step_equals_plain_loops() -> None:
    recall, support = build(), support_of()
    episode = recall.begin(TASKS, support)
    loops = [LoopMemory(SETTINGS) for _ in range(TASKS)]
    shown = torch.cat([support, support.flip(1)], -1).flatten(1, 2)  # [T, N·K, 2·D]
    for step in range(WAY * SHOT):
        episode = recall.show(episode, shown[:, step])
        keys = torch.tanh(recall.keys(episode.hidden)).view(TASKS, 2, 4)
        gates = torch.sigmoid(recall.gate(episode.hidden))
        for t, loop in enumerate(loops):
            loop.step(keys[t].tolist(), gates[t].tolist())
            for name in ("content", "read_weights", "usage"):
                expected = torch.tensor(getattr(loop, name), dtype=torch.float64)
                torch.testing.assert_close(getattr(episode, name)[t], expected)


def test_the_controller_is_fed_with_what_was_read_last() -> None:
    recall, support = build(), support_of()
    first = recall.show(recall.begin(TASKS, support), torch.cat([support[:, 0, 0]] * 2, -1))
    shown = torch.cat([support[:, 1, 0]] * 2, -1)
    read = (first.read_weights @ first.content).flatten(1)
    hidden, cell = recall.controller(torch.cat([shown, read], -1), (first.hidden, first.cell))
    second = recall.show(first, shown)
    torch.testing.assert_close(second.hidden, hidden)
    torch.testing.assert_close(second.cell, cell)


def test_a_recollection_maps_what_each_class_reads_after_the_whole_support() -> None:
    recall, support = build(), support_of()
    episode = recall.begin(TASKS, support)
    means = support.mean(2)
    for n in range(WAY):
        for k in range(SHOT):
            episode = recall.show(episode, torch.cat([support[:, n, k], means[:, n]], -1))
    recollection = recall.recollect(SupportSet.of(support), in_turn(WAY * SHOT))
    last = (episode.read_weights @ episode.content).flatten(1)
    for n in range(WAY):
        shown = torch.cat([means[:, n], means[:, n], last], -1)
        hidden, _ = recall.controller(shown, (episode.hidden, episode.cell))
        keys = torch.tanh(recall.keys(hidden)).view(TASKS, 2, 4)
        weights = content_weights(keys, episode.content)
        expected = recall.output((weights @ episode.content).flatten(1))
        torch.testing.assert_close(recollection.samples[:, n, 0], expected)
        torch.testing.assert_close(recollection.weights[:, n], weights.mean(1))
    assert (recollection.divergence == 0).all()


def test_the_least_used_places_are_chosen_and_the_first_of_equals() -> None:
    usage = torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert least_used(usage, 3).argmax(-1).tolist() == [[1, 3, 2], [0, 1, 2]]
    assert least_used(usage, 3).sum(-1).eq(1).all()


def test_read_weights_sum_to_one_even_where_places_are_empty() -> None:
    keys = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    weights = content_weights(keys, torch.zeros(2, 5, 4))
    torch.testing.assert_close(weights, torch.full((2, 3, 5), 0.2))


def test_permuting_classes_permutes_recollections_when_they_are_shown_in_the_same_order() -> None:
    recall, support = build(), support_of()
    permutation = torch.tensor([2, 0, 1])  # class n of the second batch is this class of the first
    order = torch.tensor([3, 0, 5, 1, 4, 2]).expand(TASKS, -1)
    where = permutation.argsort()
    moved = where[order // SHOT] * SHOT + order % SHOT
    one = recall.recollect(SupportSet.of(support), order)
    two = recall.recollect(SupportSet.of(support[:, permutation]), moved)
    torch.testing.assert_close(two.samples, one.samples[:, permutation])
    torch.testing.assert_close(two.weights, one.weights[:, permutation])


def test_the_order_is_drawn_for_each_task_and_every_image_is_shown_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recall, support = build(), support_of()
    orders: list[Tensor] = []

    def recollect(shown: SupportSet, order: Tensor) -> None:
        orders.append(order)

    monkeypatch.setattr(recall, "recollect", recollect)
    for seed in range(20):
        random = [torch.Generator().manual_seed(100 * seed + t) for t in range(TASKS)]
        recall(SupportSet.of(support), None, None, 1, random)
    drawn = torch.cat(orders)
    assert drawn.sort(-1).values.eq(torch.arange(WAY * SHOT)).all()
    assert len({tuple(order.tolist()) for order in drawn}) > 30


def test_a_class_recalls_in_the_context_of_its_rivals_and_nothing_of_earlier_episodes() -> None:
    recall, support = build(), support_of()
    order = in_turn(WAY * SHOT)
    one = recall.recollect(SupportSet.of(support), order).samples
    recall.recollect(SupportSet.of(support_of(seed=2)), order)
    assert torch.equal(recall.recollect(SupportSet.of(support), order).samples, one)
    changed = support.clone()
    changed[:, 2] += 1
    assert not torch.allclose(
        recall.recollect(SupportSet.of(changed), order).samples[:, 0], one[:, 0]
    )


def test_every_parameter_learns_with_finite_gradients_that_finite_differences_confirm() -> None:
    recall = build(MannSettings(slots=5, width=2, reads=2, controller_units=3))
    support = support_of(way=2, shot=2)

    def samples(*parameters: Tensor) -> Tensor:
        named = dict(zip(dict(recall.named_parameters()), parameters, strict=True))
        random = torch.Generator().manual_seed(0)
        arguments = (SupportSet.of(support), None, None, 1, random)
        recollection: Tensor = torch.func.functional_call(recall, named, arguments).samples
        return recollection

    parameters = tuple(value.detach().clone().requires_grad_() for value in recall.parameters())
    assert torch.autograd.gradcheck(samples, parameters)
    samples(*parameters).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in parameters)


@pytest.mark.parametrize(("way", "shot"), [(1, 1), (2, 3), (10, 2)])
def test_any_number_of_classes_and_shots_fits_even_more_than_there_are_places(
    way: int, shot: int
) -> None:
    recall = build()
    for scale in (0.0, 1.0, 1e4):
        support = (scale * support_of(way, shot)).requires_grad_()
        recollection = recall(
            SupportSet.of(support), None, None, 1, torch.Generator().manual_seed(0)
        )
        assert recollection.samples.shape == (TASKS, way, 1, WIDTH)
        recollection.samples.square().sum().backward()
        assert support.grad is not None
        assert support.grad.isfinite().all()


def test_more_heads_than_places_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"reads: must not exceed slots \(3\), got 4"):
        MannSettings(slots=3)
