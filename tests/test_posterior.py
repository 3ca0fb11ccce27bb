"""The interface of memories that are read: one contract for class statistics and slots."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from vsm.memory import (
    GaussianMemory,
    Observations,
    Posterior,
    ReadSettings,
    SlotMemory,
    SupportSet,
)
from vsm.memory.named import KINDS, decode_tensors
from vsm.model import FewShotModel
from vsm.nn.layers import predictive
from vsm.seeding import generator
from vsm.settings import Inference, ModelSettings, RunSettings

WIDTH, WAY, SHOT, QUERIES = 6, 4, 3, 5


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def infer(inference: Inference) -> tuple[Posterior, Tensor]:
    """Return a posterior that has recalled eight classes, and projected queries."""
    settings = RunSettings(
        data="features:x", method="vsm", model=ModelSettings(inference=inference, residual=True)
    )
    model = FewShotModel(settings, (WIDTH,)).eval()
    rows, class_ids = values(40, WIDTH, seed=1), torch.arange(8).repeat_interleave(5)
    empty = model.empty_memory()
    assert empty is not None
    memory = model.consolidate(empty, Observations(rows, class_ids), 1)
    if inference == "gaussian":
        read_settings = ReadSettings("l2n", 1.0, 1.0, 0.5)
        memory = GaussianMemory.fit(rows, class_ids, rows.mean(0), read_settings)
    assert memory is not None
    support = model.project(values(1, WAY, SHOT, WIDTH, seed=2), memory)
    queries = model.project(values(1, QUERIES, WIDTH, seed=3), memory)
    with torch.no_grad():
        return model.infer(SupportSet.of(support), memory, generator(0, "test")), queries


INFERENCES: list[Inference] = ["gaussian", "conjugate", "network"]


@pytest.mark.parametrize("inference", INFERENCES)
@torch.no_grad()
def test_every_posterior_classifies_scores_and_explains(inference: Inference) -> None:
    posterior, queries = infer(inference)
    log_probabilities = posterior.log_probabilities(queries)
    samples = posterior.prototypes.shape[2]
    assert log_probabilities.shape == (1, QUERIES, WAY, samples)
    torch.testing.assert_close(log_probabilities.exp().sum(2), torch.ones(1, QUERIES, samples))
    torch.testing.assert_close(
        posterior.scores(queries).softmax(-1),
        predictive(log_probabilities).exp(),
        rtol=1e-4,
        atol=1e-5,
    )
    assert posterior.rejection_scores(queries, None).shape == (1, QUERIES, WAY)
    split = posterior.uncertainty(queries, generator(0, "uncertainty"))
    torch.testing.assert_close(split.aleatoric + split.epistemic, split.total)
    assert split.std.shape == (1, QUERIES, WAY)
    assert posterior.weights is not None
    assert posterior.weights.shape == (1, WAY, 8)


@pytest.mark.parametrize("inference", INFERENCES)
@torch.no_grad()
def test_linear_scores_of_normalized_features_give_the_same_probabilities(
    inference: Inference,
) -> None:
    posterior, queries = infer(inference)
    linear = posterior.linear()
    assert (linear is not None) == (inference == "gaussian")
    if linear is None:
        return
    weights, biases = linear
    features = torch.nn.functional.normalize(values(1, QUERIES, WIDTH, seed=3), dim=-1)
    found = torch.log_softmax(features @ weights.mT + biases, -1)
    torch.testing.assert_close(
        found, predictive(posterior.log_probabilities(queries)), rtol=1e-4, atol=1e-4
    )


def test_slots_and_statistics_are_siblings_that_tensors_tell_apart() -> None:
    assert not issubclass(GaussianMemory, SlotMemory)
    assert len(KINDS) == 3
    empty = SlotMemory.empty(WIDTH)
    assert type(decode_tensors(empty.tensors(), WIDTH)) is SlotMemory
    statistics = GaussianMemory.empty(torch.zeros(WIDTH), ReadSettings())
    assert type(decode_tensors(statistics.tensors(), WIDTH)) is GaussianMemory
    with pytest.raises(ValueError, match=r"expected float \[0, 7\]"):
        decode_tensors(empty.tensors(), WIDTH + 1)
    with pytest.raises(ValueError, match="no memory has the tensors content"):
        decode_tensors({"content": torch.zeros(1, WIDTH)})
    assert {field.name for field in fields(SlotMemory)} < {f.name for f in fields(GaussianMemory)}
