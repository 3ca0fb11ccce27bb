"""Which labels may be wrong, and which images to label next, by a Gaussian memory.

A review leaves out each image in turn. Every class is a Gaussian whose mean has a posterior, given
its images and the memory, in closed form. So leaving out one image costs no more than one
prediction.

A label is worth most where it explains many images that no class explains yet. Every unlabeled
image u is explained by the class in which it is most likely, with the score max_n s(u | n), and
would be explained by a labeled image x with s(u | x), the score in a class of which x is the only
example; both are predictive densities in closed form. So the images X to label maximize

    Σ_u max(max_n s(u | n), max_{x ∈ X} s(u | x))

It is submodular, and greedy choice comes within 1 − 1/e of the maximum (Nemhauser et al. 1978). An
image that stands for many is chosen before an odd one, images of classes without examples before
those of known ones, and never two that are nearly the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.classify.fitted import FittedClasses, Labels, as_labels
from vsm.errors import ClassifierError
from vsm.memory import GaussianMemory, GaussianReader, Memory, Posterior, SupportSet
from vsm.runs.trained_model import TrainedModel
from vsm.seeding import generator

DUPLICATE = 0.98
"""Cosine of the features from which two images are near duplicates."""
AT_ONCE = 2048  # images that are compared with all others at a time
MOST_EXPLAINED = 4096
"""Images that are explained; of more, so many are drawn."""
CANDIDATES_AT_ONCE, STALE_AT_ONCE = 512, 64
SURE = 0.8  # probability from which one class is named alone


class LabelIssue(NamedTuple):
    """A label that may be wrong; ordered by the odds, as probabilities are nearly 0 or 1."""

    image: int  # its position
    label: Any  # the label given
    suggestion: Any  # the most probable other label
    probability: float  # of its own label, given all other images
    log_odds: float  # of the suggestion against its own label, in nats


class Outlier(NamedTuple):
    """An image that is like no class; the score is log p(any class) − log p(nearest class)."""

    image: int
    label: Any
    score: float


class NearDuplicate(NamedTuple):
    """Two images with nearly the same features."""

    first: int
    second: int
    cosine: float


class Confusable(NamedTuple):
    """Two classes, and the mean probability that images of one are given for the other."""

    first: Any
    second: Any
    probability: float


@dataclass(frozen=True)
class Review:
    """What :func:`review` finds, the most striking first."""

    labels: npt.NDArray[Any]  # the classes, sorted [N]
    probabilities: npt.NDArray[np.float32]  # of classes, given all other images [n, N]
    label_issues: list[LabelIssue]  # labels that are less probable than another
    outliers: list[Outlier]  # all images, by their score
    near_duplicates: list[NearDuplicate]  # pairs of images
    confusable: list[Confusable]  # pairs of classes, by how often they are taken for each other


@torch.no_grad()
def review(
    trained: TrainedModel, features: Tensor, labels: Labels, duplicate: float = DUPLICATE
) -> Review:
    """Review labeled images by a model with a Gaussian memory.

    The memory says in which directions members of a class differ. ``features [n, D]`` are as
    :meth:`TrainedModel.embed` gives them.
    """
    memory = _require_gaussian(trained.state, trained.name, "reviewing needs")
    given = as_labels(labels, len(features))
    names, class_ids = np.unique(given, return_inverse=True)
    if len(names) < 2:
        raise ClassifierError("labels: a review needs images of two classes at least, got one")
    members = torch.from_numpy(class_ids)
    rows = memory.project(features).cpu()
    log_densities = leave_one_out(memory.reader, rows, members)
    probabilities = log_densities.softmax(-1)
    scores = memory.reader.marginal_scores(rows) - log_densities.amax(-1)
    order = scores.argsort(descending=True, stable=True).tolist()
    return Review(
        names,
        probabilities.numpy(),
        _label_issues(log_densities, probabilities, members, names),
        [Outlier(n, given[n].item(), scores[n].item()) for n in order],
        _near_duplicates(F.normalize(memory.normalize(features), dim=-1).cpu(), duplicate),
        _confusable(probabilities, members, names),
    )


def leave_one_out(reader: GaussianReader, rows: Tensor, class_ids: Tensor) -> Tensor:
    """Log density of every image in every class, given all other images: ``[n, N]``.

    In its own class of K images there are K − 1 others; without any, the density is that of a
    class never met. ``rows [n, D]`` are projected; each of the N ``class_ids [n]`` occurs.
    """

    def infer(means: Tensor, counts: Tensor) -> Posterior:  # [T, N, D], [T, N]
        return reader.infer(SupportSet(means.unsqueeze(2), means, counts.unsqueeze(-1)))

    counts = torch.bincount(class_ids).to(rows)
    sums = torch.zeros(len(counts), rows.shape[1]).index_add(0, class_ids, rows)
    classes = infer((sums / counts.unsqueeze(-1)).unsqueeze(0), counts.unsqueeze(0))
    scores = torch.cat([classes.scores(part.unsqueeze(0))[0] for part in rows.split(AT_ONCE)])
    others = (counts[class_ids] - 1).unsqueeze(-1)  # [n, 1]
    at_least_one = others.clamp_min(1)
    means = (sums[class_ids] - rows) / at_least_one
    parts = zip(*(one.unsqueeze(1).split(AT_ONCE) for one in (means, rows)), strict=True)
    own = torch.cat(
        [
            infer(mean, count).scores(row).flatten()
            for (mean, row), count in zip(parts, at_least_one.split(AT_ONCE), strict=True)
        ]
    )
    own = torch.where(others.squeeze(-1) > 0, own, reader.marginal_scores(rows))
    return scores.scatter(1, class_ids.unsqueeze(-1), own.unsqueeze(-1))


def _label_issues(
    log_densities: Tensor, probabilities: Tensor, members: Tensor, names: npt.NDArray[Any]
) -> list[LabelIssue]:
    place = members.unsqueeze(-1)
    best, suggestion = log_densities.scatter(1, place, -torch.inf).max(-1)
    odds = best - log_densities.gather(1, place).squeeze(-1)
    rows = zip(
        names[members.numpy()].tolist(),
        names[suggestion.numpy()].tolist(),
        probabilities.gather(1, place).squeeze(-1).tolist(),
        odds.tolist(),
        strict=True,
    )
    issues = [LabelIssue(n, *row) for n, row in enumerate(rows) if row[-1] > 0]
    return sorted(issues, key=lambda one: -one.log_odds)


def _near_duplicates(units: Tensor, duplicate: float) -> list[NearDuplicate]:
    found: list[NearDuplicate] = []
    for start in range(0, len(units), AT_ONCE):
        cosines = units[start : start + AT_ONCE] @ units.mT
        for row, column in (cosines >= duplicate).nonzero().tolist():
            if start + row < column:
                found.append(NearDuplicate(start + row, column, cosines[row, column].item()))
    return sorted(found, key=lambda one: -one.cosine)


def _confusable(
    probabilities: Tensor, members: Tensor, names: npt.NDArray[Any]
) -> list[Confusable]:
    """Return pairs of classes by the mean probability of each other, both ways."""
    sums = torch.zeros(len(names), len(names)).index_add(0, members, probabilities)
    means = sums / torch.bincount(members).unsqueeze(-1)
    both = ((means + means.mT) / 2).triu(1)
    order = both.flatten().argsort(descending=True, stable=True)[: 4 * len(names)].tolist()
    pairs = [divmod(place, len(names)) for place in order]
    return [
        Confusable(names[a].item(), names[b].item(), both[a, b].item()) for a, b in pairs if a < b
    ]


class Suggestion(NamedTuple):
    """An image whose label would help."""

    image: int  #: its position
    classes: tuple[Any, ...]  #: the most probable labels, two if there are
    probabilities: tuple[float, ...]  #: theirs
    novelty: float  #: probability of a class never met, if that counts as one more class
    stands_for: int  #: images that it explains better than all classes and earlier suggestions
    images: int  #: so many were looked at
    gain: float  #: by how much it explains them better, in nats

    @property
    def is_novel(self) -> bool:
        """Whether it is more likely of a class never met than of all classes together."""
        return self.novelty > 0.5

    @property
    def reason(self) -> str:
        """One line for people."""
        names = [repr(label) for label in self.classes]
        chances = [f"{probability:.0%}" for probability in self.probabilities]
        if self.is_novel:
            what = f"unlike all classes so far ({self.novelty:.0%}), nearest {names[0]}"
        elif len(names) == 1:
            what = f"probably {names[0]}"
        elif self.probabilities[0] >= SURE:
            what = f"probably {names[0]} ({chances[0]})"
        else:
            what = f"{' or '.join(names)} ({' / '.join(chances)})"
        return f"{what}; stands for {self.stands_for:,} of {self.images:,} images"


def suggest(
    fitted: FittedClasses, features: Tensor, number: int, temperature: float
) -> list[Suggestion]:
    """Choose ``number`` of the images with ``features [n, D]`` to label, the most useful first.

    Unlabeled images that were fitted make the guesses better. They do not change the choice, which
    looks at all images as it is; docs/design/transductive.md has what was tried.
    """
    if number < 1:
        raise ClassifierError(f"number: expected at least 1, got {number}")
    if not len(features):
        raise ClassifierError("images: there are no images to choose from, got none")
    state = None if fitted.recalled is None else fitted.recalled.memory
    memory = _require_gaussian(state, fitted.trained.name, "suggestions need")
    with torch.inference_mode():
        reader = memory.reader.to(features.device)
        rows = fitted.project(features)
        explained = rows
        if len(rows) > MOST_EXPLAINED:
            drawn = torch.randperm(len(rows), generator=generator(fitted.seed, "suggest"))
            explained = rows[drawn[:MOST_EXPLAINED].sort().values.to(rows.device)]
        chosen = greedy_max_coverage(
            lambda places: one_shot_scores(reader, rows[places.to(rows.device)], explained).cpu(),
            fitted.inductive.scores(explained.unsqueeze(0))[0].amax(-1).cpu(),
            len(rows),
            number,
        )
        places = torch.tensor([place for place, *_ in chosen], device=features.device)
        classes = fitted.inductive.scores(rows[places].unsqueeze(0))[0].logsumexp(-1)
        novelty = (reader.marginal_scores(rows[places]) - classes).sigmoid().tolist()
    probabilities = torch.from_numpy(fitted.probabilities(features[places], temperature))
    best = probabilities.topk(min(2, probabilities.shape[-1]), dim=-1)
    labels = fitted.examples.labels
    return [
        Suggestion(
            place,
            tuple(labels[n] for n in best.indices[row].tolist()),
            tuple(best.values[row].tolist()),
            novelty[row],
            stands_for,
            len(explained),
            gain,
        )
        for row, (place, stands_for, gain) in enumerate(chosen)
    ]


def one_shot_scores(reader: GaussianReader, candidates: Tensor, rows: Tensor) -> Tensor:
    """Score ``rows [m, D]`` in classes that have one example each, ``candidates [k, D]``.

    All are projected. It is a log density for a softmax over classes: ``[k, m]``.
    """
    found = reader.infer(SupportSet.of(candidates.view(1, len(candidates), 1, -1)))
    return found.scores(rows.unsqueeze(0))[0].mT


def greedy_max_coverage(
    scores: Callable[[Tensor], Tensor], explained: Tensor, count: int, number: int
) -> list[tuple[int, int, float]]:
    """Choose candidates one after the other by how much better they explain m images.

    Return the position of each, how many images it explains better, and by how much.

    Gains only fall as others are chosen. So those of before are bounds, and only candidates whose
    bound is the largest are looked at again (Minoux 1978), which changes no choice.

    ``scores`` maps candidates ``[k]`` to the scores ``[k, m]``; ``explained [m]`` are those without
    any. Of ``count`` candidates ``number`` are chosen.
    """

    def gains(places: Tensor) -> Tensor:
        return (scores(places) - explained).clamp_min(0).sum(-1)

    bounds = torch.cat([gains(part) for part in torch.arange(count).split(CANDIDATES_AT_ONCE)])
    chosen: list[tuple[int, int, float]] = []
    fresh = torch.ones(count, dtype=torch.bool)
    for _ in range(min(number, count)):
        while True:
            order = bounds.sort(descending=True, stable=True).indices[:STALE_AT_ONCE]
            if fresh[order[0]]:
                break
            stale = order[~fresh[order]]
            bounds[stale] = torch.minimum(bounds[stale], gains(stale))
            fresh[stale] = True
        place = order[:1]
        [row] = scores(place)
        chosen.append((int(place), int((row > explained).sum()), bounds[place].item()))
        explained = torch.maximum(explained, row)
        taken = [place for place, *_ in chosen]
        bounds[taken] = -1.0  # below all gains
        fresh[:] = False
        fresh[taken] = True
    return chosen


def _require_gaussian(memory: Memory | None, name: str, what: str) -> GaussianMemory:
    statistics = None if memory is None else memory.statistics
    if statistics is None:
        raise ClassifierError(
            f"model: {name} has no Gaussian memory, which {what}; learn one with vsm memory learn"
        )
    return statistics
