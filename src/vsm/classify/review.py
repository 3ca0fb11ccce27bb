"""What is odd in a pile of labeled images, by leaving out each image in turn.

Every class is a Gaussian whose mean has a posterior, given its images and the memory, in closed
form. So what all other images say of one of them costs no more than one prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.classify.inputs import Labels, as_labels
from vsm.errors import ClassifierError
from vsm.memory import GaussianReader, SupportSet
from vsm.runs.trained_model import TrainedModel

DUPLICATE = 0.98
"""Cosine of the features of two images that count as one, nearly."""
AT_ONCE = 2048  # images that are compared with all others at a time


class LabelIssue(NamedTuple):
    """A label that may be wrong.

    Attributes:
        image: its position.
        label: what it is said to be.
        suggestion: the most probable other label.
        probability: of its own label, given all other images.
        log_odds: of the suggestion against its own label, in nats. They order what is doubtful,
            since probabilities are all but 0 or 1.
    """

    image: int
    label: Any
    suggestion: Any
    probability: float
    log_odds: float


class Outlier(NamedTuple):
    """A image that is like no class; the score is log p(any class) − log p(nearest class)."""

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
    """What :func:`review` finds, the most striking first.

    Attributes:
        labels: the classes, sorted ``[N]``.
        probabilities: of every class for every image, given all other images ``[n, N]``.
        label_issues: labels that are less probable than another.
        outliers: all images, by their score.
        near_duplicates: pairs of images.
        confusable: pairs of classes, by how often they are taken for each other.
    """

    labels: npt.NDArray[Any]
    probabilities: npt.NDArray[np.float32]
    label_issues: list[LabelIssue]
    outliers: list[Outlier]
    near_duplicates: list[NearDuplicate]
    confusable: list[Confusable]


@torch.no_grad()
def review(
    trained: TrainedModel, features: Tensor, labels: Labels, duplicate: float = DUPLICATE
) -> Review:
    """Review labeled images by a model with a Gaussian memory.

    Args:
        trained: its memory says in which directions members of a class differ.
        features: as :meth:`TrainedModel.embed` gives them ``[n, D]``.
        labels: n of them.
        duplicate: cosine from which two images are near_duplicates.
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
    reader = memory.reader
    log_densities = leave_one_out(reader, rows, members)
    probabilities = log_densities.softmax(-1)
    scores = reader.marginal_scores(rows) - log_densities.amax(-1)
    return Review(
        names,
        probabilities.numpy(),
        _label_issues(log_densities, members, names),
        _outliers(scores, members, names),
        _near_duplicates(F.normalize(memory.normalize(features), dim=-1).cpu(), duplicate),
        _confusable(probabilities, members, names),
    )


def leave_one_out(reader: GaussianReader, rows: Tensor, class_ids: Tensor) -> Tensor:
    """Log density of every image in every class, of which it is no member: ``[n, N]``.

    A class of K images loses the one that is asked about, so that K − 1 are left; without any,
    the density is that of a class never met.

    Args:
        reader: of the memory.
        rows: projected ``[n, D]``.
        class_ids: ``[n]``, from 0 to N − 1, each of them at least once.
    """
    counts = torch.bincount(class_ids).to(rows)
    sums = torch.zeros(len(counts), rows.shape[1]).index_add(0, class_ids, rows)
    found = _densities(reader, sums / counts.unsqueeze(-1), counts, rows)
    left = counts[class_ids] - 1
    others = (sums[class_ids] - rows) / left.clamp_min(1).unsqueeze(-1)
    parts = zip(others.split(AT_ONCE), left.split(AT_ONCE), rows.split(AT_ONCE), strict=True)
    own = torch.cat([_densities(reader, *part, alone=True) for part in parts])
    own = torch.where(left > 0, own, reader.marginal_scores(rows))
    return found.scatter(1, class_ids.unsqueeze(-1), own.unsqueeze(-1))


def _densities(
    reader: GaussianReader, means: Tensor, counts: Tensor, rows: Tensor, alone: bool = False
) -> Tensor:
    """Log densities of ``rows [n, D]`` in classes of these means and counts ``[N]``: ``[n, N]``.

    ``alone``: each row is asked about in the class at its own place only, ``[n]``.
    """
    shape = (len(means), 1) if alone else (1, len(means))
    mean = means.view(*shape, -1)
    support = SupportSet(mean.unsqueeze(2), mean, counts.clamp_min(1).view(*shape, 1))
    found = reader.infer(support)
    if alone:
        return found.scores(rows.unsqueeze(1)).flatten()
    parts = [found.scores(part.unsqueeze(0))[0] for part in rows.split(AT_ONCE)]
    return torch.cat(parts)


def _label_issues(
    log_densities: Tensor, members: Tensor, names: npt.NDArray[Any]
) -> list[LabelIssue]:
    place = members.unsqueeze(-1)
    own = log_densities.gather(1, place).squeeze(-1)
    best, suggestion = log_densities.scatter(1, place, -torch.inf).max(-1)
    probability = log_densities.softmax(-1).gather(1, place).squeeze(-1)
    odds = best - own
    doubtful = (odds > 0).nonzero().flatten()
    order = doubtful[odds[doubtful].argsort(descending=True, stable=True)]
    return [
        LabelIssue(
            n,
            names[members[n]].item(),
            names[suggestion[n]].item(),
            probability[n].item(),
            odds[n].item(),
        )
        for n in order.tolist()
    ]


def _outliers(scores: Tensor, members: Tensor, names: npt.NDArray[Any]) -> list[Outlier]:
    order = scores.argsort(descending=True, stable=True).tolist()
    return [Outlier(n, names[members[n]].item(), scores[n].item()) for n in order]


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
    counts = torch.bincount(members).unsqueeze(-1)
    sums = torch.zeros(len(names), len(names)).index_add(0, members, probabilities)
    means = sums / counts
    both = ((means + means.mT) / 2).triu(1)
    order: Sequence[int] = both.flatten().argsort(descending=True, stable=True).tolist()
    pairs = [divmod(place, len(names)) for place in order[: 4 * len(names)]]
    return [
        Confusable(names[a].item(), names[b].item(), both[a, b].item()) for a, b in pairs if a < b
    ]
