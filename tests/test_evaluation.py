"""Evaluation: cached features, identical episodes, memory left alone."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from memories import remember
from tiny import RecordedProgress, variant
from vsm.data import EpisodeSampler, ImageDataset
from vsm.encoders import evaluation_mode
from vsm.evaluation.evaluator import (
    ELEMENTS_AT_ONCE,
    batch_statistics,
    evaluate,
    evaluate_classifier,
)
from vsm.memory import Memory
from vsm.model import FewShotModel
from vsm.seeding import Randomness, derive_seed, normal
from vsm.settings import METHODS, Method, RunSettings


def build(settings: RunSettings, dataset: ImageDataset, method: Method = "vsm") -> FewShotModel:
    model = FewShotModel(variant(settings, method=method), dataset.image_shape)
    # Give batch norm running statistics that differ from a batch's own.
    model.embed(dataset.normalize(dataset.load(torch.arange(60))))
    return model


def memory_for(model: FewShotModel) -> Memory | None:
    content = torch.rand(5, model.num_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return remember(model.consolidation, content)


def copied(memory: Memory | None) -> dict[str, torch.Tensor]:
    return {} if memory is None else {k: v.clone() for k, v in memory.tensors().items()}


def test_cached_features_equal_embedding_every_episode_anew(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = build(tiny_settings, tiny_dataset, "protonet")
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    measured = evaluate(model, None, sampler, 7, seed=0)
    model.eval()
    rows = []
    for batch in sampler.evaluation_episodes(7, 0):
        for image_ids in batch.image_ids:
            images = tiny_dataset.normalize(tiny_dataset.load(image_ids.flatten()))
            features = model.embed(images).unflatten(0, (1, 3, 3))
            out = model(features[:, :, :1], features[:, :, 1:], None, torch.Generator())
            rows.append(out.log_probabilities[0, :, :, 0])
    log_probabilities = torch.stack(rows)  # [E, B, N]
    labels = torch.tensor([0, 0, 1, 1, 2, 2]).expand(7, -1)
    assert torch.equal(measured.correct, log_probabilities.argmax(-1) == labels)
    torch.testing.assert_close(
        measured.log_likelihood, log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    )
    torch.testing.assert_close(measured.confidence, log_probabilities.exp().amax(-1))
    [listed] = sampler.evaluation_episodes(7, 0)
    assert torch.equal(measured.class_ids, listed.class_ids)
    assert measured.confusions.shape == (7, 3, 3)
    predicted = log_probabilities.argmax(-1)
    for episode, true, answer in product(range(7), range(3), range(3)):
        own = predicted[episode, 2 * true : 2 * true + 2].tolist()
        assert measured.confusions[episode, true, answer] == own.count(answer)


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_is_deterministic_and_leaves_model_and_memory_alone(
    method: Method, tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = build(tiny_settings, tiny_dataset, method)
    memory = memory_for(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = copied(memory)
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    one = evaluate(model, memory, sampler, 60, seed=0)
    two = evaluate(model, memory, sampler, 60, seed=0)
    assert torch.equal(one.log_likelihood, two.log_likelihood)
    assert all(torch.equal(value, held[name]) for name, value in copied(memory).items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_a_longer_evaluation_begins_with_the_shorter_one(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = build(tiny_settings, tiny_dataset, "vpn")
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    long = evaluate(model, None, sampler, 110, seed=0)
    short = evaluate(model, None, sampler, 70, seed=0)
    assert torch.equal(long.log_likelihood[:70], short.log_likelihood)
    assert (len(short.correct), len(long.correct)) == (70, 110)


@pytest.mark.parametrize("at_once", [1, 7, 60, 1000])
def test_every_episode_has_noise_of_its_own_however_episodes_are_batched(
    at_once: int, tiny_dataset: ImageDataset
) -> None:
    """The oracle is a plain loop over single episodes, each with the generator of its place."""
    num_episodes, seed, way, queries = 130, 3, 3, 2  # more than a block of the sampler's list
    sampler = EpisodeSampler(tiny_dataset, "test", way, 1, queries)

    def guess(support: Tensor, asked: Tensor, random: Randomness) -> Tensor:
        assert len(support) <= at_once
        return normal(random, len(support), way * queries, way).log_softmax(-1)

    measured = evaluate_classifier(
        guess,
        lambda image_ids: image_ids.unsqueeze(-1).float(),
        sampler,
        num_episodes,
        seed,
        elements_per_task=ELEMENTS_AT_ONCE // at_once,
    )
    answers = measured.log_probabilities
    assert answers.shape == (num_episodes, way * queries, way)
    for place in range(num_episodes):
        random = torch.Generator().manual_seed(derive_seed(seed, "evaluation-noise", 0, place))
        alone = torch.randn(way * queries, way, generator=random).log_softmax(-1)
        torch.testing.assert_close(answers[place], alone, msg=f"episode {place}")
    assert len(answers.flatten(1).unique(dim=0)) == num_episodes


@pytest.mark.parametrize("at_once", [1, 7])
def test_a_model_answers_the_same_however_episodes_are_batched(
    at_once: int,
    tiny_settings: RunSettings,
    tiny_dataset: ImageDataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(tiny_settings, tiny_dataset)
    memory = memory_for(model)
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    together = evaluate(model, memory, sampler, 70, seed=0).log_probabilities
    per_task = 3**2 * 2 * model.num_prototype_samples
    monkeypatch.setattr("vsm.evaluation.evaluator.ELEMENTS_AT_ONCE", at_once * per_task)
    apart = evaluate(model, memory, sampler, 70, seed=0).log_probabilities
    torch.testing.assert_close(apart, together)


def test_progress_counts_exactly_the_episodes_asked_for(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vsm.evaluation.evaluator.ELEMENTS_AT_ONCE", 500
    )  # several parts to a block
    model = build(tiny_settings, tiny_dataset, "vpn")
    progress = RecordedProgress()
    progress.start("evaluate", 62)
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    evaluate(model, None, sampler, 62, seed=0, progress=progress)
    done = [count for _, count, _ in progress.shown]
    assert len(done) > 2
    assert all(before < after for before, after in pairwise(done))
    assert progress.shown[-1] == ("evaluate", 62, 62)


def test_accuracy_nll_and_interval_come_from_the_episodes(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = build(tiny_settings, tiny_dataset, "vpn")
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    result = evaluate(model, None, sampler, 40, seed=0)
    per_episode = result.correct.double().mean(1)
    assert result.accuracy.mean == pytest.approx(per_episode.mean().item())
    assert result.accuracy.ci95 == pytest.approx(
        1.96 * per_episode.std().item() / 40**0.5, rel=1e-3
    )
    assert result.nll == pytest.approx(-result.log_likelihood.mean().item(), rel=1e-5)


def test_transductive_batch_norm_uses_the_episodes_statistics_and_keeps_the_running_ones(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    model = build(tiny_settings, tiny_dataset, "protonet")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    inductive = evaluate(model, None, sampler, 5, seed=0)
    transductive = evaluate(model, None, sampler, 5, seed=0, batch_norm="transductive")
    assert not torch.allclose(inductive.log_likelihood, transductive.log_likelihood)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    images = tiny_dataset.normalize(tiny_dataset.load(torch.arange(9)))
    model.eval()
    with batch_statistics(model):
        inside = model.embed(images)
    model.train()
    torch.testing.assert_close(inside, model.embed(images))


def test_embedding_in_parts_equals_embedding_at_once(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(tiny_settings, tiny_dataset, "protonet")
    ids = torch.arange(50)
    whole = model.encoder.features(tiny_dataset, ids)
    monkeypatch.setattr("vsm.encoders.encoder.LARGEST_BATCH", 7)
    model.encoder.forget()
    progress = RecordedProgress()
    torch.testing.assert_close(model.encoder.features(tiny_dataset, ids, progress), whole)
    assert [done for _, done, _ in progress.shown] == [7, 14, 21, 28, 35, 42, 49, 50]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_evaluated_in_evaluation_mode_and_given_back_its_own(training: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).train(training)
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert all(module.training is training for module in model.modules())


def test_a_layer_that_trains_inside_a_model_that_does_not_is_evaluated_as_well() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).eval()
    model[1].train()
    with evaluation_mode(model):
        assert not model[1].training
