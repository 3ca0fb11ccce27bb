"""How to read class statistics: chosen by the likelihood of few-shot episodes of other classes.

Where the encoder was trained on the remembered classes these look easier than they are, so the
episodes are of validation classes. Otherwise they are of remembered classes that are left out: the
statistics of each half of them are tried on the other half. "No memory" is always a candidate, and
is taken unless another is better by more than the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.evaluation.evaluator import fit_temperature
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
    """A way to read, and how it did.

    Attributes:
        read_settings: with the noise scale that suits it best.
        nll: negative log-likelihood of every episode, averaged over its queries, by K ``[E]``.
        accuracy: mean accuracy by K.
    """

    read_settings: ReadSettings
    nll: dict[int, Tensor]
    accuracy: dict[int, float]

    @cached_property
    def episode_nll(self) -> Tensor:
        """NLL of every episode, all K one after the other ``[S·E]``."""
        return torch.cat(list(self.nll.values()))

    @property
    def mean_nll(self) -> float:
        """What candidates are compared by."""
        return self.episode_nll.mean().item()

    def row(self) -> dict[str, Any]:
        """Return a row of the table, ready for JSON."""
        plain = {
            key: "inf" if v == math.inf else v for key, v in self.read_settings._asdict().items()
        }
        by_shot = {f"accuracy_{shot}_shot": value for shot, value in self.accuracy.items()}
        return {**plain, "nll": self.mean_nll, **by_shot}


@dataclass(frozen=True)
class Choice:
    """How class statistics are read, and why.

    Attributes:
        read_settings: what was chosen.
        episodes_of: whose classes decided.
        reason: in one line.
        table: the best candidates, best first, and no memory.
    """

    read_settings: ReadSettings
    episodes_of: str
    reason: str
    table: list[dict[str, Any]]

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
    """Choose what the settings leave open.

    Args:
        known: the classes that are remembered.
        validation: other classes, where the encoder was trained on the remembered ones.
        settings: what is set is taken as it is.
        seed: of the episodes and folds.
        center: of the features; unset: that of the remembered classes.
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
    return [
        Trial(
            fitted,
            others,
            {
                k: others.episodes(way, k, q, seed, count // len(pairs))
                for k, (way, q) in shapes.items()
            },
            center,
        )
        for fitted, others in pairs
    ]


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
    scorers = {one: _Scorer(trials, one) for one in normalizations}
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


class _Scorer:
    """Scores read_settingss of one normalization; one decomposition serves all with one ε."""

    def __init__(self, trials: Sequence[Trial], normalization: Normalization) -> None:
        self.trials = trials
        self.memories = [trial.memory(ReadSettings(normalization)) for trial in trials]
        self._epsilon: float | None = None
        self._parts: list[tuple[Decomposition, Projected]] = []

    def __call__(self, read_settings: ReadSettings) -> Candidate:
        """Score one; its noise scale is set to the best."""
        by_shot = [self._log_probabilities(read_settings, shot) for shot in self._shots()]
        labels = [_labels(log_p) for log_p in by_shot]
        scale = fit_temperature(
            torch.cat([log_p.flatten(0, 1) for log_p in by_shot]),
            torch.cat([one.flatten() for one in labels]),
            NOISE_SCALES,
            HALVINGS,
        )
        nll, accuracy = {}, {}
        for shot, log_p, label in zip(self._shots(), by_shot, labels, strict=True):
            scaled = F.log_softmax(log_p / scale, -1)
            nll[shot] = -scaled.gather(-1, label.unsqueeze(-1)).mean((1, 2)).double()
            accuracy[shot] = (log_p.argmax(-1) == label).double().mean().item()
        return Candidate(read_settings._replace(noise_scale=scale), nll, accuracy)

    def _shots(self) -> list[int]:
        """Return every K that there are episodes of."""
        return list(self.trials[0].episodes)

    def _log_probabilities(self, read_settings: ReadSettings, shot: int) -> Tensor:
        """Return those of all trials' episodes with K = ``shot``: ``[E, N·Q, N]``."""
        found = []
        for decomposition, projected in self._decomposed(read_settings.epsilon):
            reader = decomposition.reader(
                read_settings.beta,
                read_settings.rho,
                read_settings.addressing_scale,
                noise_scale=1.0,
            )
            support, queries = projected[shot]
            found.append(reader.infer(support).log_probabilities(queries).squeeze(-1))
        return torch.cat(found)

    def _decomposed(self, epsilon: float) -> "list[tuple[Decomposition, Projected]]":
        if epsilon != self._epsilon:
            pairs = zip(self.trials, self.memories, strict=True)
            self._parts = [_projected(trial, memory, epsilon) for trial, memory in pairs]
            self._epsilon = epsilon
        return self._parts


Projected = dict[int, tuple[SupportSet, Tensor]]
"""Support, and queries ``[E, N·Q, D]``, for every K."""


def _projected(
    trial: Trial, memory: GaussianMemory, epsilon: float
) -> tuple[Decomposition, Projected]:
    """Return a trial's decomposition, and its episodes in those coordinates."""
    decomposition = Decomposition.of(memory.content, memory.counts, memory.within, epsilon)
    rows = decomposition.reader(1.0, 0.0, 1.0, 1.0).project(memory.normalize(trial.others.features))
    return decomposition, {
        shot: (SupportSet.of(rows[support]), rows[queries].flatten(1, 2))
        for shot, (support, queries) in trial.episodes.items()
    }


def _labels(log_probabilities: Tensor) -> Tensor:
    """The true class of every query, as a position in its episode ``[E, N·Q]``."""
    count, queries, way = log_probabilities.shape
    return torch.arange(way).repeat_interleave(queries // way).expand(count, -1)


def _best(found: list[Candidate], episodes_of: str) -> Choice:
    """Choose the most likely candidate; no memory, unless that is worse by more than the noise."""
    ordered = sorted(found, key=lambda one: one.mean_nll)
    best = ordered[0]
    without = next((one for one in ordered if not one.read_settings.uses_memory), None)
    reason = f"most likely of {len(found)} candidates on episodes of {episodes_of}"
    if without is not None and best is not without:
        gain = estimate(without.episode_nll - best.episode_nll)
        told = f"{gain.mean:+.4f} ± {gain.ci95:.4f} nats per query against no memory"
        reason = f"{reason}, {told}"
        if gain.mean <= max(gain.ci95, LEAST_GAIN * without.mean_nll):
            best, reason = without, f"no memory: the best of {len(found)} candidates has {told}"
    rows = ordered[:ROWS_KEPT]
    if without is not None and without not in rows:
        rows = [*rows, without]
    return Choice(best.read_settings, episodes_of, reason, [one.row() for one in rows])
