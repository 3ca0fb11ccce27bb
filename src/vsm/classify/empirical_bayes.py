"""A memory over features that some encoder made, learned without a training loop.

The model is that of conjugate inference (docs/design/inference.md). Its few numbers are estimated
from labeled rows: the noise s² of a row about its class by the pooled variance within classes; the
variance σ² of a class about what the others remember of it by the method of moments; the scale of
the addressing and the temperature by the likelihood of classes whose own slots are hidden.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.data import EpisodeSampler, FeatureDataset
from vsm.errors import ClassifierError
from vsm.evaluation.rejection import SHOTS, Thresholds, calibrate
from vsm.memory import Observations, SlotMemory
from vsm.memory.conjugate import ConjugateInference
from vsm.memory.variational import VariationalRecall
from vsm.model import FewShotModel
from vsm.nn.prototype_classifier import predictive
from vsm.probability import DiagonalGaussian, unbounded_log_variance
from vsm.probability.mixture import weighted_moments
from vsm.seeding import generator
from vsm.settings import MemorySettings, ModelSettings, RunSettings

EPISODES, MOST_WAY, MOST_QUERIES = 60, 5, 5
SCALES = (3.0, 10.0, 30.0, 100.0, 300.0)
TEMPERATURES = tuple(2.0**power for power in range(-12, 5))
LOG_VARIANCES = (-9.9, 9.9)
LEAST_SHARE = 0.05  # of the squared error that is left to σ² at the least


class HeldOut(NamedTuple):
    """Episodes whose classes are hidden from the memory, as new classes are."""

    support: Tensor  # [E, N, K, D]
    queries: Tensor  # [E, N, Q, D]
    slot_mask: Tensor | None  # boolean [E, N, A]
    class_ids: Tensor  # [E, N]


@torch.no_grad()
def learn_feature_model(
    features: Tensor, class_ids: Tensor, encoder_name: str, normalize: bool, seed: int
) -> tuple[FewShotModel, SlotMemory, Thresholds]:
    """Estimate a model, its memory, and when it should not answer, from labeled rows.

    Args:
        features: ``[n, D]``.
        class_ids: int64 ``[n]``, from 0.
        encoder_name: names the data.
        normalize: scale rows to length one first.
        seed: of the held-out episodes.
    """
    settings = RunSettings(
        data=f"features:{encoder_name}",
        method="vsm",
        # ψ is the identity and stays it, so its hidden layers are as small as can be.
        model=ModelSettings(inference="conjugate", hidden_units=1, normalize_features=normalize),
        memory=MemorySettings(learn_addressing_scale=False),
        seed=seed,
    )
    model = FewShotModel(settings, (features.shape[1],)).eval()
    rows = model.embed(features)
    memory = model.consolidate(model.empty_memory(), Observations(rows, class_ids), 0)
    assert isinstance(memory, SlotMemory)
    memory = memory.detach()
    held_out = _held_out(rows, class_ids, memory, seed, shot=1)
    noise = _within_classes(rows, class_ids)
    best = (math.inf, 0.0, 0.0)
    for scale in SCALES:
        _set(model, memory, held_out, noise, scale)
        best = min(best, (*_best_temperature(model, memory, held_out), scale))
    _, temperature, scale = best
    _set(model, memory, held_out, noise, scale)
    model.classifier.log_temperature.fill_(math.log(temperature))

    def episodes(shot: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        return [_held_out(rows, class_ids, memory, seed, shot)[:3]]

    sizes = torch.bincount(class_ids)
    shots = [shot for shot in SHOTS if (sizes > shot).sum() >= 3]  # three classes leave a query
    return model, memory, calibrate(model, memory, episodes, shots, seed)


def _held_out(rows: Tensor, class_ids: Tensor, memory: SlotMemory, seed: int, shot: int) -> HeldOut:
    """Draw episodes of classes that have at least one row more than their support."""
    order = class_ids.argsort(stable=True)
    sizes = np.bincount(class_ids.numpy())
    usable = np.flatnonzero(sizes > shot)
    if len(usable) < 3:
        raise ClassifierError(
            "learn_memory: needs at least 3 classes with at least 2 rows each, got "
            f"{len(usable)}; give more classes"
        )
    dataset = FeatureDataset(
        name="labeled features",
        features=rows[order].numpy(),
        class_names=tuple(map(str, range(len(sizes)))),
        class_starts=np.concatenate([[0], np.cumsum(sizes)]),
        splits={"train": usable},
    )
    way = max(2, min(MOST_WAY, len(usable) // 2))
    queries = min(MOST_QUERIES, int(sizes[usable].min()) - shot)
    sampler = EpisodeSampler(dataset, "train", way, shot, queries)
    drawn = sampler.draw(EPISODES, generator(seed, "held-out"))
    support, asked = dataset.load(drawn.image_ids).split([shot, queries], 2)
    return HeldOut(support, asked, memory.slot_mask(drawn.class_ids, "task"), drawn.class_ids)


def _within_classes(rows: Tensor, class_ids: Tensor) -> Tensor:
    """Return the unbiased pooled variance within classes, s² ``[D]``."""
    sizes = torch.bincount(class_ids)
    sums = torch.zeros(len(sizes), rows.shape[1], dtype=torch.float64)
    means = sums.index_add_(0, class_ids, rows.double()) / sizes.clamp_min(1).unsqueeze(-1)
    squares = (rows.double() - means[class_ids]).square().sum(0)
    freedom = int((sizes - 1).clamp_min(0).sum())
    return (squares / freedom).float()


def _about_recollection(
    model: FewShotModel, memory: SlotMemory, held_out: HeldOut, noise: Tensor, scale: float
) -> Tensor:
    """Return σ² ``[D]``, the variance of a class about a slot that it recalls, by moments.

    The squared error of the recollection Σ λ_a M_a of a class mean is, in expectation, σ², and the
    variance of the recalled slots, and the noise s²/n of the mean of n rows itself.
    """
    recall = model.recall
    assert isinstance(recall, VariationalRecall)
    recall.addressing.log_scale.fill_(math.log(scale))
    weights = recall.addressing(held_out.support.mean(2), memory.content, held_out.slot_mask)
    slots = DiagonalGaussian(memory.content, torch.zeros_like(memory.content))
    recalled = weighted_moments(weights, slots)
    place = torch.zeros(int(memory.class_ids.max()) + 1, dtype=torch.int64)
    place[memory.class_ids] = torch.arange(len(memory))
    slot = place[held_out.class_ids]  # [E, N]
    squared = (memory.content[slot] - recalled.mean).square()
    explained = recalled.variance_of_means + noise / memory.counts[slot].unsqueeze(-1)
    left = (squared - explained).mean((0, 1))
    return torch.maximum(left, LEAST_SHARE * squared.mean((0, 1)))


def _set(
    model: FewShotModel, memory: SlotMemory, held_out: HeldOut, noise: Tensor, scale: float
) -> None:
    """Give the model the scale of its addressing, s², and the σ² that follows from both."""
    assert isinstance(model.recall, VariationalRecall)
    assert isinstance(model.inference, ConjugateInference)
    about = _about_recollection(model, memory, held_out, noise, scale)
    model.inference.noise.unbounded.copy_(_unbounded(noise))
    model.recall.network.head.output.bias[model.num_features :] = _unbounded(about)


def _unbounded(variance: Tensor) -> Tensor:
    """Return what the bound of log-variances maps to ``variance``."""
    bounded = variance.clamp_min(1e-30).log().clamp(*LOG_VARIANCES)
    return torch.tensor([unbounded_log_variance(value) for value in bounded.tolist()])


def _best_temperature(
    model: FewShotModel, memory: SlotMemory, held_out: HeldOut
) -> tuple[float, float]:
    """Return the lowest mean negative log-likelihood of held-out queries, and its temperature."""
    model.classifier.log_temperature.fill_(0.0)
    random = generator(model.settings.seed, "held-out-noise")
    log_probabilities = model(
        held_out.support, held_out.queries, memory, random, held_out.slot_mask
    ).log_probabilities  # [E, N·Q, N, L]
    way, queries = held_out.queries.shape[1:3]
    labels = torch.arange(way).repeat_interleave(queries)
    scores = []
    for temperature in TEMPERATURES:
        scaled = predictive(F.log_softmax(log_probabilities / temperature, dim=-2))
        likelihood = scaled[:, torch.arange(len(labels)), labels].mean()
        scores.append((-likelihood.item(), temperature))
    return min(scores)
