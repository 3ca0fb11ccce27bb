"""Transductive inference: the unlabeled images of a task help to find its prototypes.

An unlabeled image is of class n with weight w_n, or of no class of the task with weight w_0. How
well it fits a class is its rejection score s_n, a log ratio of densities, against the threshold t
that most images of a class stay below. Images that the labeled examples alone put above all
thresholds are of no class, so that many alike cannot draw a prototype to them; for the others

    r_in ∝ w_n · exp(t_n − s_n(h_i; m_n)),    r_i0 ∝ w_0.

Prototypes and weights maximize, by expectation-maximization from the posterior N(m⁰_n, v_n) of the
labeled examples,

    −½ Σ_n Σ_d c·(m_n − m⁰_n)²/v_n + ω·Σ_i log(w_0 + Σ_n w_n·exp(t_n − s_n(h_i; m_n))) + ω·a·Σ log w

with s_n = ½ Σ_d c·(h_i − m_n)² − …, quadratic in the prototype. So every step is in closed form:

    m_n = (m⁰_n / v_n + ω·Σ_i r_in·h_i) / (1 / v_n + ω·Σ_i r_in),    w_n ∝ Σ_i r_in + a.

An unlabeled image counts as ω examples. Variances stay those of the labeled examples, which keeps
answers calibrated. docs/design/transductive.md derives it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsm.memory.posterior import Posterior, QuadraticScores

STEPS = 6
"""Of expectation-maximization. More would follow outliers further."""
COVERAGE = 0.8
"""Share of a class's own images that the thresholds keep from the background."""
FEW = 4.0
"""Images that the prior adds to each class however few unlabeled ones there are."""
NUMBERS_AT_ONCE = 4_000_000  # of responsibilities; bounds memory


@dataclass(frozen=True)
class Transduction:
    """How unlabeled images are used; chosen on classes that the model was not trained on."""

    weight: float = 0.2
    """ω, how many examples an unlabeled image counts for; 0 uses none."""
    prior: float = 1.0
    """How strongly classes are expected to be equally frequent, in units of the images there are:
    a is this times U / N, and a few."""
    temperatures: Mapping[int, float] = field(default_factory=lambda: {1: 1.1, 5: 1.1})
    """T of the probabilities by examples per class."""

    def temperature(self, shot: float) -> float:
        """Return T for a number of examples per class."""
        return at_shot(self.temperatures, shot)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        temperatures = {str(shot): value for shot, value in self.temperatures.items()}
        return {"weight": self.weight, "prior": self.prior, "temperatures": temperatures}

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> "Transduction":
        """Restore it from :meth:`as_dict`, or raise a ``ValueError``."""
        weight, prior = stored["weight"], stored["prior"]
        for number in (weight, prior):
            if type(number) not in (int, float) or not 0 <= number < math.inf:
                raise ValueError(f"expected weights of at least 0, got {number!r:.40}")
        temperatures = read_temperatures(stored["temperatures"])
        if not temperatures:
            raise ValueError("expected temperatures of unlabeled images")
        return Transduction(weight, prior, temperatures)


class Assigned(NamedTuple):
    """What unlabeled images were assigned to."""

    counts: Tensor  # images of each class [T, N]
    background: Tensor  # images of no class [T]


def at_shot(temperatures: Mapping[int, float], shot: float) -> float:
    """Return a temperature for a number of examples per class.

    Between two known ones log T is linear in log K; beyond the last it is that of the last.
    """
    shots = sorted(temperatures)
    for fewer, more in pairwise(shots):
        if fewer < shot < more:
            share = math.log(shot / fewer) / math.log(more / fewer)
            low, high = (math.log(temperatures[known]) for known in (fewer, more))
            return math.exp(low + share * (high - low))
    return temperatures[min(shots, key=lambda known: abs(known - shot))]


def read_temperatures(stored: Mapping[str, Any]) -> dict[int, float]:
    """Restore temperatures by shot from JSON, or raise a ``ValueError``."""
    temperatures = {int(shot): value for shot, value in stored.items()}
    for shot, value in temperatures.items():
        if type(value) not in (int, float) or not 0 < value < math.inf or shot < 1:
            raise ValueError(f"expected temperatures above 0 of at least 1 shot, got {value!r:.40}")
    return temperatures


def transduce(
    posterior: Posterior,
    unlabeled: Tensor,
    slots: Tensor | None,
    limits: Tensor | None,
    settings: Transduction,
    steps: int = STEPS,
) -> tuple[Posterior, Assigned]:
    """Return the posterior with ``unlabeled [T, U, D]`` images too, and what they were assigned to.

    Args:
        posterior: of the labeled examples.
        unlabeled: projected features; their order does not matter.
        slots: as in :meth:`.Posterior.rejection_scores`.
        limits: the thresholds t ``[N]`` at :data:`COVERAGE`. None: none is measured, so there is no
            background, and every image is of some class.
        settings: how they are used.
        steps: of expectation-maximization.
    """
    count = unlabeled.shape[1]
    if not count or not settings.weight:
        nobody = posterior.mean.new_zeros(posterior.mean.shape[:2])
        return posterior, Assigned(nobody, nobody[:, 0])
    model = posterior.quadratic_scores(unlabeled, slots)
    start, evidence = posterior.mean, model.evidence
    tasks, way, _ = start.shape
    if limits is not None and not limits.isfinite().all():
        limits = None  # of too few scores
    thresholds = start.new_zeros(way + 1)
    if limits is None:
        thresholds[way] = -torch.inf  # no background
    else:
        thresholds[:way] = limits.to(start)
    expected = settings.prior * count / way + FEW  # a
    mean, shares = start, start.new_zeros(tasks, way + 1)  # log w, up to a constant
    if limits is not None:
        model = _without_outliers(model, start, unlabeled, limits)
    for _ in range(steps):
        counts, sums = _assign(model, mean, unlabeled, shares + thresholds)
        more = settings.weight * counts[:, :way].unsqueeze(-1)
        mean = (evidence * start + settings.weight * sums) / (evidence + more)
        shares = (counts + expected).log()
    weights = shares[:, :way].log_softmax(-1) + math.log(way)
    return posterior.moved(mean, weights), Assigned(counts[:, :way], counts[:, way])


def _fits(
    model: QuadraticScores, mean: Tensor, unlabeled: Tensor, offsets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of the images ``[T, U, D]``, and offset − s_n of each class ``[T, N, U]``.

    Classes come before images, since a softmax over the last of few classes is slow.
    """
    tasks, way, _ = mean.shape
    directions = model.scale * mean  # [T, N, D]
    biases = (offsets - 0.5 * (directions * mean).sum(-1)).unsqueeze(-1)  # [T, N, 1]
    at_once = max(1, NUMBERS_AT_ONCE // (tasks * way))
    parts = (unlabeled.split(at_once, 1), model.constant.split(at_once, 1))
    for rows, constants in zip(*parts, strict=True):
        yield rows, torch.baddbmm(biases, directions, rows.mT) - constants.mT


def _without_outliers(
    model: QuadraticScores, mean: Tensor, unlabeled: Tensor, limits: Tensor
) -> QuadraticScores:
    """Let images whose scores are above all thresholds be infinitely far from every class."""
    found = _fits(model, mean, unlabeled, limits.to(mean))
    outlier = torch.cat([(fits < 0).all(1) for _, fits in found], -1)  # [T, U]
    return model._replace(constant=model.constant.masked_fill(outlier.unsqueeze(-1), torch.inf))


def _assign(
    model: QuadraticScores, mean: Tensor, unlabeled: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many images each class and the background have ``[T, N + 1]``, and their sums.

    ``offsets [T, N + 1]`` are log w + t. Sums are of the classes alone ``[T, N, D]``.
    Responsibilities are computed and added up in parts.
    """
    way = mean.shape[1]
    other = offsets[:, way:].unsqueeze(-1)  # [T, 1, 1]
    counts, sums = torch.zeros_like(offsets), torch.zeros_like(mean)
    for rows, fits in _fits(model, mean, unlabeled, offsets[:, :way]):
        likely = torch.cat([fits, other.expand(-1, -1, fits.shape[-1])], 1).softmax(1)
        counts += likely.sum(-1)
        sums += likely[:, :way] @ rows
    return counts, sums
