"""How to read class statistics: chosen by the likelihood of few-shot episodes of other classes.

Where the encoder was trained on the remembered classes these look easier than they are, so the
episodes are of validation classes. Otherwise they are of remembered classes that are left out: the
statistics of each half of them are tried on the other half. "No memory" is always a candidate, and
is taken unless another is better by more than the noise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.evaluation.evaluator import fit_temperature, query_labels, scale_by_temperature
from vsm.evaluation.intervals import estimate
from vsm.memory import GaussianMemory, ReadSettings, SupportSet
from vsm.memory.reader import Decomposition
from vsm.seeding import generator, uniform
from vsm.settings import GaussianSettings, Normalization

SHOTS = (1, 5)
EPISODES, MOST_WAY, MOST_QUERIES = 200, 5, 15
EPSILONS = (1.0, 3.0, 10.0, 30.0, math.inf)
BETAS = (0.3, 1.0, 3.0, 10.0)
RHOS, SCALES = (0.25, 0.5, 0.75), (5.0, 10.0, 20.0)
NORMALIZATIONS: tuple[Normalization, ...] = ("l2n", "cl2n")
FINALISTS = 3  # triples of normalization, ε and β that ρ is tried with
NOISE_SCALES, HALVINGS = (0.05, 1000.0), 16
LEAST_GAIN = 0.01  # of the likelihood without memory; the best of many candidates is lucky
ROWS_KEPT = 12  # of the table

Projected = dict[int, tuple[SupportSet, Tensor]]
"""Support, and queries ``[E, N·Q, D]``, for every K."""


class ClassFeatures(NamedTuple):
    """Features ``[P, D]``, class after class, and how many rows each of the C classes has."""

    features: Tensor
    sizes: Sequence[int]

    @property
    def class_ids(self) -> Tensor:
        """Positions of the classes, row by row ``[P]``."""
        return torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))

    def only(self, classes: Sequence[int]) -> "ClassFeatures":
        """Return the classes at these positions, in this order."""
        parts = self.features.split(list(self.sizes))
        chosen = [parts[one] for one in classes]
        empty = self.features[:0]
        return ClassFeatures(torch.cat([empty, *chosen]), [len(part) for part in chosen])

    @property
    def center(self) -> Tensor:
        """Mean of the rows, each scaled to length one ``[D]``."""
        return F.normalize(self.features, dim=-1).mean(0)

    def folds(self, count: int, seed: int) -> "list[tuple[ClassFeatures, ClassFeatures]]":
        """Deal the classes to equal parts; return all but each part, and that part."""
        order = uniform(generator(seed, "halves"), len(self.sizes)).argsort().tolist()
        ends = [part * len(order) // count for part in range(count + 1)]
        return [
            (self.only(sorted(order[:start] + order[end:])), self.only(sorted(order[start:end])))
            for start, end in reversed(list(pairwise(ends)))
        ]

    def usable(self, shot: int) -> Tensor:
        """Return the positions of classes that have a query besides K support images."""
        return (torch.tensor(self.sizes) > shot).nonzero().flatten()

    def episodes(
        self, way: int, shot: int, queries: int, seed: int, count: int = EPISODES
    ) -> tuple[Tensor, Tensor]:
        """Draw the rows of support ``[E, N, K]`` and queries ``[E, N, Q]``."""
        sizes, usable = torch.tensor(self.sizes), self.usable(shot)
        random = generator(seed, "choice-episodes", shot)
        order = uniform(random, count, len(usable)).argsort(1)[:, :way]
        classes = usable[order]  # [E, N]
        chances = uniform(random, count, way, int(sizes[usable].max()))
        places = torch.arange(chances.shape[-1])
        chances = chances.masked_fill(places >= sizes[classes].unsqueeze(-1), 2.0)
        members = chances.argsort(-1)[..., : shot + queries]
        rows = (sizes.cumsum(0) - sizes)[classes].unsqueeze(-1) + members
        support, asked = rows.split([shot, queries], -1)
        return support, asked


@dataclass(frozen=True)
class Trial:
    """Statistics of some classes, and episodes of others: ``(support, queries)`` for every K."""

    known: ClassFeatures
    others: ClassFeatures
    episodes: dict[int, tuple[Tensor, Tensor]]
    center: Tensor | None = None  # that of the known classes, if it is not given

    def memory(self, read_settings: ReadSettings) -> GaussianMemory:
        """Return the statistics of the known classes."""
        center = self.known.center if self.center is None else self.center
        return GaussianMemory.fit(self.known.features, self.known.class_ids, center, read_settings)


@dataclass(frozen=True)
class Candidate:
    """A way to read, and how it did."""

    read_settings: ReadSettings  # with the noise scale that suits it best
    nll: Tensor  # mean over the queries of every episode, all K one after the other [S·E]
    accuracy: dict[int, float]  # mean by K

    @property
    def mean_nll(self) -> float:
        """What candidates are compared by."""
        return self.nll.mean().item()

    def row(self) -> dict[str, Any]:
        """Return a row of the table, ready for JSON."""
        by_shot = {f"accuracy_{shot}_shot": value for shot, value in self.accuracy.items()}
        return {**self.read_settings.as_dict(), "nll": self.mean_nll, **by_shot}


@dataclass(frozen=True)
class Choice:
    """How class statistics are read, and why."""

    read_settings: ReadSettings
    episodes_of: str  # whose classes decided
    reason: str  # in one line
    table: list[dict[str, Any]]  # the best candidates, best first, and no memory

    def as_dict(self) -> dict[str, Any]:
        """Return what is stored with the memory, ready for JSON."""
        return {"episodes_of": self.episodes_of, "reason": self.reason, "table": self.table}


def choose_read_settings(
    known: ClassFeatures,
    validation: ClassFeatures | None,
    settings: GaussianSettings,
    seed: int = 0,
    center: Tensor | None = None,
) -> Choice:
    """Choose what the settings leave open for reading the ``known`` classes.

    ``validation`` are other classes, where the encoder was trained on the known ones. ``seed`` is
    of episodes and folds. The ``center`` of features, if unset, is that of the known classes.
    """
    left_out = "remembered classes that were left out, one half of them at a time"
    episodes_of = left_out if validation is None else "validation classes"
    trials = held_out_trials(known, validation, SHOTS, seed, center)
    if not trials:
        read_settings = _as_set(settings, ReadSettings())
        return Choice(read_settings, episodes_of, "too few classes or images to try anything", [])
    return _best(_candidates(trials, settings), episodes_of)


def held_out_trials(
    known: ClassFeatures,
    validation: ClassFeatures | None,
    shots: Sequence[int],
    seed: int,
    center: Tensor | None = None,
    most_way: int = MOST_WAY,
    count: int = EPISODES,
    folds: int = 2,
) -> list[Trial]:
    """Set up statistics of known classes, and episodes of classes that are none of them.

    Without validation classes, each of ``folds`` parts of the known ones is tried with the others.
    Every K that all trials have enough classes and images for has episodes; without any there is no
    trial.
    """
    pairs = known.folds(folds, seed) if validation is None else [(known, validation)]
    shapes = {shot: shape for shot in shots if (shape := _shape(pairs, shot, most_way)) is not None}
    if not shapes:
        return []
    trials = []
    for fitted, others in pairs:
        episodes = {
            shot: others.episodes(way, shot, queries, seed, count // len(pairs))
            for shot, (way, queries) in shapes.items()
        }
        trials.append(Trial(fitted, others, episodes, center))
    return trials


def _shape(
    pairs: Sequence[tuple[ClassFeatures, ClassFeatures]], shot: int, most_way: int
) -> tuple[int, int] | None:
    """Return N and Q of episodes that all trials can have; None where there are none."""
    usable = [others.usable(shot) for _, others in pairs]
    way = min(most_way, *(len(one) for one in usable))
    if way < 2:
        return None
    sizes = [others.sizes[c] for (_, others), one in zip(pairs, usable, strict=True) for c in one]
    return way, min(MOST_QUERIES, min(sizes) - shot)


def _as_set(settings: GaussianSettings, otherwise: ReadSettings) -> ReadSettings:
    """Return ``otherwise`` with what the settings say."""
    given = {
        name: getattr(settings, name) for name in ReadSettings._fields if name != "noise_scale"
    }
    return otherwise._replace(**{name: v for name, v in given.items() if v is not None})


def _candidates(trials: Sequence[Trial], settings: GaussianSettings) -> list[Candidate]:
    """Try ε and β without recall, then ρ and the addressing scale with the best of them."""
    normalizations = NORMALIZATIONS if settings.normalization is None else [settings.normalization]
    epsilons = EPSILONS if settings.epsilon is None else [settings.epsilon]
    betas = BETAS if settings.beta is None else [settings.beta]
    scorers = {one: _scorer(trials, one) for one in normalizations}
    found = []
    for normalization, score in scorers.items():
        none = _as_set(settings, ReadSettings(normalization))
        tried = [none, *(none._replace(epsilon=e, beta=b) for e, b in product(epsilons, betas))]
        found += [score(read_settings) for read_settings in dict.fromkeys(tried)]
    if settings.rho is not None:
        return found
    best = sorted(found, key=lambda one: one.mean_nll)[:FINALISTS]
    scales = SCALES if settings.addressing_scale is None else [settings.addressing_scale]
    return found + [
        scorers[one.read_settings.normalization](
            one.read_settings._replace(rho=rho, addressing_scale=scale, noise_scale=1.0)
        )
        for one in best
        if one.read_settings.uses_memory
        for rho, scale in product(RHOS, scales)
    ]


def _scorer(
    trials: Sequence[Trial], normalization: Normalization
) -> Callable[[ReadSettings], Candidate]:
    """Return what scores read settings of one normalization, best in the order of their ε."""
    memories = [trial.memory(ReadSettings(normalization)) for trial in trials]

    @lru_cache(maxsize=1)
    def decomposed(epsilon: float) -> list[tuple[Decomposition, Projected]]:
        """Return each trial's decomposition, and its episodes in those coordinates."""
        found = []
        for trial, memory in zip(trials, memories, strict=True):
            one = Decomposition.of(memory.content, memory.counts, memory.within, epsilon)
            features = memory.normalize(trial.others.features)
            rows = one.reader(1.0, 0.0, 1.0, 1.0).project(features)
            episodes = {
                shot: (SupportSet.of(rows[support]), rows[queries].flatten(1, 2))
                for shot, (support, queries) in trial.episodes.items()
            }
            found.append((one, episodes))
        return found

    def score(read_settings: ReadSettings) -> Candidate:
        """Score one; its noise scale is set to the best."""
        answers: dict[int, list[Tensor]] = {shot: [] for shot in trials[0].episodes}
        for decomposition, episodes in decomposed(read_settings.epsilon):
            reader = decomposition.reader(*read_settings[2:5], noise_scale=1.0)
            for shot, (support, queries) in episodes.items():
                answers[shot].append(reader.infer(support).log_probabilities(queries).squeeze(-1))
        by_shot = {shot: torch.cat(found) for shot, found in answers.items()}  # [E, N·Q, N]
        labels = [query_labels(log_p) for log_p in by_shot.values()]
        scale = fit_temperature(
            torch.cat([log_p.flatten(0, 1) for log_p in by_shot.values()]),
            torch.cat([one.flatten() for one in labels]),
            NOISE_SCALES,
            HALVINGS,
        )
        nll, accuracy = [], {}
        for (shot, log_p), label in zip(by_shot.items(), labels, strict=True):
            scaled = scale_by_temperature(log_p, scale)
            nll.append(-scaled.gather(-1, label.unsqueeze(-1)).mean((1, 2)).double())
            accuracy[shot] = (log_p.argmax(-1) == label).double().mean().item()
        return Candidate(read_settings._replace(noise_scale=scale), torch.cat(nll), accuracy)

    return score


def _best(found: list[Candidate], episodes_of: str) -> Choice:
    """Choose the most likely candidate; no memory, unless that is worse by more than the noise."""
    ordered = sorted(found, key=lambda one: one.mean_nll)
    best = ordered[0]
    without = next((one for one in ordered if not one.read_settings.uses_memory), None)
    reason = f"most likely of {len(found)} candidates on episodes of {episodes_of}"
    if without is not None and best is not without:
        gain = estimate(without.nll - best.nll)
        told = f"{gain.mean:+.4f} ± {gain.ci95:.4f} nats per query against no memory"
        reason = f"{reason}, {told}"
        if gain.mean <= max(gain.ci95, LEAST_GAIN * without.mean_nll):
            best, reason = without, f"no memory: the best of {len(found)} candidates has {told}"
    rows = ordered[:ROWS_KEPT]
    if without is not None and without not in rows:
        rows = [*rows, without]
    return Choice(best.read_settings, episodes_of, reason, [one.row() for one in rows])
