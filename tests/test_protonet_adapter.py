"""The baseline protonet-adapter, against plain float64 loops and the baseline cosine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from vsm.baselines import BASELINES, BaseFeatures, ProtoNetAdapter, adapter
from vsm.baselines.adapter import Adapter, episode_loss, train_adapter
from vsm.errors import SettingsError
from vsm.seeding import generator, task_generators
from vsm.settings import BaselineSettings

Array = npt.NDArray[np.float64]


def classes_with_noise(sizes: Sequence[int], seed: int) -> Tensor:
    """Features ``[B, 16]``: classes differ in the first 6, the last 10 are nothing but noise."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for size in sizes:
        features = 0.5 * torch.randn(size, 16, generator=random)
        features[:, 6:] *= 6
        features[:, :6] += torch.randn(6, generator=random)
        rows.append(features)
    return torch.cat(rows).double()


def base_of(sizes: Sequence[int]) -> BaseFeatures:
    return BaseFeatures(classes_with_noise(sizes, 1), sizes)


def episodes(shot: int, num_tasks: int = 30) -> tuple[Tensor, Tensor]:
    """Support ``[T, 5, K, 16]`` and queries ``[T, 20, 16]`` of classes never trained on."""
    features = classes_with_noise([shot + 4] * 5 * num_tasks, 2)
    support, queries = features.view(num_tasks, 5, shot + 4, 16).split([shot, 4], 2)
    return support, queries.flatten(1, 2)


def build(base: BaseFeatures | None = None, **changes: Any) -> ProtoNetAdapter:
    known = base or base_of([20] * 30)
    return ProtoNetAdapter(BaselineSettings(**changes), lambda: known)


def noise_of(num_tasks: int, seed: int = 0) -> list[torch.Generator]:
    return task_generators(seed, "test", 0, range(num_tasks))


def accuracy(log_probabilities: Tensor) -> float:
    labels = torch.arange(5).repeat_interleave(4)
    return float((log_probabilities.argmax(-1) == labels).double().mean())


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("shot", [1, 5])
def test_without_training_it_is_cosine_on_features_of_length_one(
    shot: int, temperature: float
) -> None:
    support, queries = episodes(shot)
    untrained = build(adapter_steps=0, temperature=temperature)
    found = untrained.fit_predict(support, queries, noise_of(30))
    settings = BaselineSettings(temperature=0.1 * temperature)
    cosine = BASELINES["cosine"](settings, lambda: base_of([20] * 30))
    support = support / support.square().sum(-1, keepdim=True).sqrt()
    queries = queries / queries.square().sum(-1, keepdim=True).sqrt()
    torch.testing.assert_close(found, cosine.fit_predict(support, queries, noise_of(30)))


def unit(vector: Array) -> Array:
    result: Array = vector / np.sqrt((vector * vector).sum())
    return result


def loss_of_a_task(
    linear: Adapter, support: Tensor, queries: Tensor, num_queries: Sequence[int]
) -> float:
    """Mean cross-entropy of the first queries of each class, of ``[N, K, D]`` and ``[N, Q, D]``."""
    weights, biases = linear.weights.numpy(), linear.biases.numpy()

    def adapted(feature: Tensor) -> Array:
        return unit(weights @ unit(feature.numpy()) + biases)

    means = [unit(np.mean([adapted(image) for image in images], 0)) for images in support]
    losses = []
    for label, (images, count) in enumerate(zip(queries, num_queries, strict=True)):
        for image in images[:count]:
            exponentials = [np.exp((adapted(image) @ mean - 1) / 0.1) for mean in means]
            losses.append(-np.log(exponentials[label] / sum(exponentials)))
    return float(sum(losses) / len(losses))


@pytest.mark.parametrize("shot", [1, 3])
def test_the_loss_equals_plain_loops_whatever_pads_small_classes(shot: int) -> None:
    support, queries = episodes(shot, num_tasks=2)
    queries = queries.unflatten(1, (5, 4))
    random = torch.Generator().manual_seed(4)
    noise = torch.randn(17, 16, generator=random).double()
    linear = Adapter(torch.eye(16).double() + 0.3 * noise[:16], 0.1 * noise[16])
    counts = [[4, 1, 3, 4, 2], [4, 4, 4, 4, 4]]
    is_query = torch.arange(4) < torch.tensor(counts).unsqueeze(-1)
    found = episode_loss(linear, support, queries, is_query)
    expected = [loss_of_a_task(linear, *two) for two in zip(support, queries, counts, strict=True)]
    assert float(found) == pytest.approx(sum(expected) / 2, rel=1e-10)


@pytest.mark.parametrize("shot", [1, 5])
def test_training_steps_equal_adam_written_out_on_the_drawn_episodes(shot: int) -> None:
    base = base_of([9, 20, 12, 6, 30, 25])
    settings = BaselineSettings(adapter_steps=3, adapter_learning_rate=0.01)
    found = train_adapter(base.features, base.class_sizes, shot, settings)
    classes = adapter._usable_classes(base.class_sizes, shot)
    values = torch.cat([torch.eye(16), torch.zeros(1, 16)]).double()  # A above b
    first, second = torch.zeros_like(values), torch.zeros_like(values)
    for step, share in enumerate([1.0, 0.75, 0.25]):  # (1 + cos(π·step/3)) / 2
        random = generator(0, "protonet-adapter", shot, step)
        rows, is_query = adapter._draw(*classes, shot, random)
        support, queries = base.features[rows[..., :shot]], base.features[rows[..., shot:]]
        values.requires_grad_()
        loss = episode_loss(Adapter(values[:16], values[16]), support, queries, is_query)
        (gradient,) = torch.autograd.grad(loss, values)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        size = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        values = values.detach() - 0.01 * share * first / (1 - 0.9 ** (step + 1)) / size
    torch.testing.assert_close(found.weights, values[:16])
    torch.testing.assert_close(found.biases, values[16])


def test_drawn_episodes_hold_distinct_classes_and_images_of_these_classes() -> None:
    sizes = [4, 3, 30, 5, 18, 9, 4, 40]
    class_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    seen = set()
    for step in range(40):
        rows, is_query = adapter._draw(*adapter._usable_classes(sizes, 3), 3, generator(step))
        assert rows.shape == (8, 5, 18)
        for task, real in zip(rows, is_query, strict=True):
            labels = [set(class_of[images].tolist()) for images in task]
            assert all(len(one) == 1 for one in labels)
            chosen = [one.pop() for one in labels]
            assert len(set(chosen)) == 5
            for label, images, queries in zip(chosen, task, real, strict=True):
                assert int(queries.sum()) == min(15, sizes[label] - 3)
                used = [*images[:3].tolist(), *images[3:][queries].tolist()]
                assert len(set(used)) == len(used)
                seen.update(used)
    assert seen == set((class_of != 1).nonzero().flatten().tolist())  # 3 images leave no query


@pytest.mark.parametrize("shot", [1, 5])
def test_training_finds_the_directions_that_tell_new_classes_apart(shot: int) -> None:
    support, queries = episodes(shot, num_tasks=100)
    before = build(adapter_steps=0).fit_predict(support, queries, noise_of(100))
    quick = build(adapter_steps=200, adapter_learning_rate=0.01)  # few features: far to go for each
    after = quick.fit_predict(support, queries, noise_of(100))
    assert accuracy(before) > 0.2
    assert accuracy(after) > accuracy(before) + 0.15


def test_answers_depend_on_no_other_randomness_and_on_no_split_into_batches() -> None:
    support, queries = episodes(5)
    found = build(adapter_steps=20).fit_predict(support, queries, noise_of(30))
    torch.manual_seed(77)
    with torch.no_grad():
        again = build(adapter_steps=20)
        parts = [
            again.fit_predict(support[part], queries[part], noise_of(count, seed=8))
            for part, count in ((slice(0, 1), 1), (slice(1, 12), 11), (slice(12, 30), 18))
        ]
    torch.testing.assert_close(torch.cat(parts), found)
    assert not found.requires_grad


def test_an_adapter_is_trained_once_for_every_shot(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def counted(rows: Tensor, sizes: Sequence[int], shot: int, given: BaselineSettings) -> Adapter:
        trained.append(shot)
        return train_adapter(rows, sizes, shot, given)

    monkeypatch.setattr("vsm.baselines.train_adapter", counted)
    baseline = build(adapter_steps=2)
    for shot in (1, 5, 1, 5, 1):
        baseline.fit_predict(*episodes(shot, num_tasks=2), noise_of(2))
    assert trained == [1, 5]
    assert not torch.equal(baseline._adapters[1].weights, baseline._adapters[5].weights)


def test_features_of_single_precision_give_results_of_single_precision() -> None:
    double = base_of([20] * 6)
    single = build(BaseFeatures(double.features.float(), double.class_sizes), adapter_steps=5)
    support, queries = episodes(1, num_tasks=2)
    expected = build(double, adapter_steps=5).fit_predict(support, queries, noise_of(2))
    found = single.fit_predict(support.float(), queries.float(), noise_of(2))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-3)


def test_two_classes_with_a_query_each_are_enough() -> None:
    base = base_of([6, 6, 5])
    found = build(base, adapter_steps=3).fit_predict(*episodes(5, num_tasks=2), noise_of(2))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("steps", [0, 3])
def test_too_few_classes_that_can_train_are_named(steps: int) -> None:
    baseline = build(base_of([6, 5, 5]), adapter_steps=steps)
    expected = (
        "protonet-adapter: training with 5 support images per class needs 2 training classes of "
        "6 images or more, but 1 of 3 have so many; lower the shot or choose another baseline"
    )
    with pytest.raises(SettingsError, match=expected):
        baseline.fit_predict(*episodes(5, num_tasks=2), noise_of(2))


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(SettingsError, match="adapter_steps: must not be negative, got -1"):
        BaselineSettings(adapter_steps=-1)
    with pytest.raises(SettingsError, match="adapter_learning_rate: must be greater than 0"):
        BaselineSettings(adapter_learning_rate=0.0)
