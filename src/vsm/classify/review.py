"""Find wrong labels, outliers and near duplicates, by leaving out each image in turn.

Every class is a Gaussian whose mean has a posterior, given its images and the memory, in closed
form. So leaving out one image costs no more than one prediction.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.classify.fitted import Labels, as_labels
from vsm.errors import ClassifierError
from vsm.memory import GaussianReader, Posterior, SupportSet
from vsm.runs.trained_model import TrainedModel

DUPLICATE = 0.98
"""Cosine of the features from which two images are near duplicates."""
AT_ONCE = 2048  # images that are compared with all others at a time


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
    memory = None if trained.state is None else trained.state.statistics
    if memory is None:
        raise ClassifierError(
            f"model: {trained.name} has no Gaussian memory, which reviewing needs; learn one with "
            "vsm memory learn"
        )
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
