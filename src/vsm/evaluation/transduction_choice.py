"""How unlabeled images are used: chosen on tasks of classes that the memory does not hold.

All candidates classify the same tasks, whose queries are dealt to the classes in many ways. Chosen
is the most likely one in the usual ways, of those that do no harm: in none of all ways is it less
accurate than inductive inference by more than the noise. Inductive inference stays, unless another
is more likely by more than the noise.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from vsm.data.episodes import ClassPools, Proportions
from vsm.errors import ClassifierError
from vsm.evaluation.evaluator import fit_temperature, scale_by_temperature
from vsm.evaluation.intervals import NORMAL_QUANTILE, estimate
from vsm.evaluation.memory_choice import ClassFeatures
from vsm.memory import Memory, SupportSet, Transduction, transduce
from vsm.model import FewShotModel
from vsm.nn.layers import predictive
from vsm.seeding import generator

SHOTS, MOST_WAY, EPISODES, QUERIES = (1, 5), 5, 100, 15
WEIGHTS, PRIORS = (0.1, 0.2, 0.3, 0.45, 0.7), (0.3, 1.0, 3.0)
TEMPERATURES, HALVINGS = (0.25, 10.0), 16
ONE_SIDED = 1.645  # normal quantile, 95%
FEWEST = 20  # images that a task can ask about


class QuerySet(NamedTuple):
    """A way of dealing queries to classes."""

    proportions: Proportions
    number: int  # of queries of the N classes together
    outliers: float = 0.0
    is_usual: bool = False  # candidates are compared by the usual ones, and must not harm in others
    alike: bool = False  # the outliers are of one class


class Trial(NamedTuple):
    """A memory, and the images of classes that it does not hold."""

    memory: Memory | None
    others: ClassFeatures


class Outcome(NamedTuple):
    """How a candidate did in E tasks."""

    log_probabilities: Tensor  # [E, B, N]
    labels: Tensor  # [E, B]

    @property
    def accuracy(self) -> Tensor:
        """``[E]``, in double precision."""
        return (self.log_probabilities.argmax(-1) == self.labels).double().mean(1)

    def nll(self, temperature: float) -> Tensor:
        """Mean negative log-likelihood of each task ``[E]``."""
        scaled = scale_by_temperature(self.log_probabilities, temperature)  # [E, B, N]
        return -scaled.gather(-1, self.labels.unsqueeze(-1)).mean((1, 2)).double()


def query_sets(way: int, shot: int, classes: Sequence[ClassFeatures]) -> list[QuerySet]:
    """Return the ways of dealing queries that all ``classes`` allow."""
    free = min(min(one.sizes) for one in classes) - shot  # images of the smallest class
    count = way * min(QUERIES, max(1, free // 2))  # so that one class can have twice its share
    alone = (1.0, *[0.0] * (way - 1))
    two = (1.0, 1.0, *[0.0] * (way - 2))
    found = [
        QuerySet(kind, count, share, share < 0.5)
        for share in (0.0, 0.3, 0.6)
        for kind in ("balanced", 2.0)
    ]
    found += [QuerySet(2.0, few) for few in (3, 20)]
    found += [
        QuerySet(0.5, count),
        QuerySet(alone, min(count, free)),
        QuerySet(two, min(count, 2 * free)),
    ]
    same = min(count, *(min(one.sizes) for one in classes))
    found.append(QuerySet(2.0, count, same / (count + same), alike=True))
    # At least so many images are of classes that are not in a task.
    others = min(sum(sorted(one.sizes)[: len(one.sizes) - way]) for one in classes)
    return [one for one in found if one.number * one.outliers / (1 - one.outliers) <= others]


def choose_transduction(
    model: FewShotModel, trials: Sequence[Trial], limits: dict[int, float], seed: int
) -> Transduction | None:
    """Choose how ``model`` uses unlabeled images; None where its inference gives no way to.

    ``limits`` are the thresholds of tasks of N classes by the number of examples. Where ``trials``
    have too few classes or images, the defaults are taken.
    """
    trials = [Trial(memory, _large_classes(others)) for memory, others in trials]
    sizes = [size for trial in trials for size in trial.others.sizes]
    way = min(MOST_WAY, *(len(trial.others.sizes) for trial in trials))
    shots = [shot for shot in SHOTS if shot in limits and (min(sizes) - shot) * way >= FEWEST]
    if not shots or way < 2:
        return Transduction()
    inductive = Transduction(weight=0.0)
    tried = [inductive, *(Transduction(*pair) for pair in product(WEIGHTS, PRIORS))]
    harmless = torch.ones(len(tried), dtype=torch.bool)
    usual: dict[int, list[list[Outcome]]] = {}
    for shot in shots:
        usual[shot] = []
        kinds = query_sets(way, shot, [trial.others for trial in trials])
        for kind in kinds:
            try:
                outcomes = outcomes_of(model, trials, limits[shot], (way, shot), kind, tried, seed)
            except ClassifierError:  # there are no quadratic scores
                return None
            gains = [estimate(one.accuracy - outcomes[0].accuracy) for one in outcomes]
            upper = [gain.mean + ONE_SIDED / NORMAL_QUANTILE * gain.ci95 for gain in gains]
            harmless &= torch.tensor(upper) >= 0
            if kind.is_usual:
                usual[shot].append(outcomes)
    return _most_likely(tried, usual, harmless)


def _large_classes(others: ClassFeatures) -> ClassFeatures:
    """Leave out classes of few images, which would limit all tasks, if enough others are left."""
    large = others.usable(SHOTS[-1] + FEWEST // MOST_WAY).tolist()
    return others.only(large) if len(large) > MOST_WAY else others


def _most_likely(
    tried: Sequence[Transduction], usual: dict[int, list[list[Outcome]]], harmless: Tensor
) -> Transduction:
    """Choose the most likely of the harmless candidates, of which the first is inductive."""
    found = []
    for number, one in enumerate(tried):
        temperatures, nll = {}, []
        for shot, kinds in usual.items():
            parts = [outcomes[number] for outcomes in kinds]
            answers = torch.cat([part.log_probabilities.flatten(0, 1) for part in parts])
            labels = torch.cat([part.labels.flatten() for part in parts])
            temperatures[shot] = fit_temperature(answers, labels, TEMPERATURES, HALVINGS)
            nll += [part.nll(temperatures[shot]) for part in parts]
        if not one.weight:  # whose temperature is that of the model; the fitted one is for fairness
            temperatures = dict.fromkeys(usual, 1.0)
        found.append((Transduction(one.weight, one.prior, temperatures), torch.cat(nll)))
    (inductive, without), *others = found
    kept = [one for one, fine in zip(others, harmless[1:].tolist(), strict=True) if fine]
    if not kept:
        return inductive
    chosen, best_nll = min(kept, key=lambda one: one[1].mean().item())
    gain = estimate(without - best_nll)
    return chosen if gain.mean > gain.ci95 else inductive


def outcomes_of(
    model: FewShotModel,
    trials: Sequence[Trial],
    limit: float,
    shape: tuple[int, int],
    kind: QuerySet,
    tried: Sequence[Transduction],
    seed: int,
    episodes: int = EPISODES,
) -> list[Outcome]:
    """Classify tasks of N classes with K examples, ``shape``, by every candidate.

    ``limit`` is the threshold of such tasks; temperatures are not applied.
    """
    parts: list[list[Outcome]] = [[] for _ in tried]
    for memory, others in trials:
        (support_rows, query_rows), labels = _draw(
            others, shape, kind, seed, episodes // len(trials)
        )
        features = model.project(others.features.to(model.device), memory)
        support, queries = (features[rows.to(model.device)] for rows in (support_rows, query_rows))
        random = generator(seed, "transduction-noise", *shape)
        with torch.no_grad():
            posterior = model.infer(SupportSet.of(support), memory, random)
            slots = None if memory is None else memory.rejection_slots
            limits = queries.new_full((shape[0],), limit)
            own = queries[:, : labels.shape[1]]
            for found, one in zip(parts, tried, strict=True):
                after, _ = transduce(posterior, queries, slots, limits, one)
                found.append(Outcome(predictive(after.log_probabilities(own)).cpu(), labels))
    return [Outcome(*(torch.cat(values) for values in zip(*one, strict=True))) for one in parts]


def _draw(
    others: ClassFeatures, shape: tuple[int, int], kind: QuerySet, seed: int, count: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Draw the rows of support ``[E, N, K]`` and queries ``[E, B + O]``, and labels ``[E, B]``."""
    way, shot = shape
    support, _ = others.episodes(way, shot, 1, seed, count)
    sizes = torch.tensor(others.sizes)
    starts = sizes.cumsum(0) - sizes
    classes = torch.bucketize(support[..., 0].contiguous(), starts, right=True) - 1
    random = generator(seed, "transduction-choice", *shape, str(kind))
    pools = ClassPools(starts, sizes, classes, support)
    dealt = (kind.number, kind.proportions, kind.outliers)
    queries, labels = pools.draw(*dealt, random, kind.alike)
    return (support, queries), labels
