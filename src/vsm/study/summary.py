"""Scores of seeds on identical episodes, summed up as the result file has them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vsm.evaluation.statistics import (
    Estimate,
    class_bootstrap,
    crossed_estimate,
    estimate,
    spearman,
)
from vsm.seeding import generator

BEFORE = ("nll", "ece")
AFTER = ("temperature", "calibrated_nll", "calibrated_ece")


def interval(found: Estimate) -> dict[str, float | None]:
    """Return a mean and its interval; JSON has no word for what is not a number."""
    return {"mean": found.mean, "ci95": _number(found.ci95)}


def accuracies(confusions: Tensor) -> Tensor:
    """Return the accuracy of every seed in every episode ``[S, E]`` of ``[S, E, N, N]``."""
    return confusions.diagonal(dim1=-2, dim2=-1).mean(-1)


def summary(
    seeds: Sequence[int], scores: Sequence[dict[str, Any]], confusions: Tensor
) -> dict[str, Any]:
    """Sum up a row: means over seeds, and each seed by itself.

    Args:
        seeds: S training seeds.
        scores: of each, what was measured besides.
        confusions: share of a class's queries that were answered by another ``[S, E, N, N]``.
    """
    names = BEFORE + (AFTER if scores[0]["temperature"] is not None else ())
    by_seed = accuracies(confusions)
    return {
        **interval(crossed_estimate(by_seed)),
        **{name: sum(one[name] for one in scores) / len(scores) for name in names},
        "seeds": [
            {"seed": seed, **interval(estimate(values)), **{name: one[name] for name in names}}
            for seed, values, one in zip(seeds, by_seed, scores, strict=True)
        ],
    }


def difference(
    seeds: Sequence[int], more: Tensor, class_ids: Tensor, bootstrap_seed: int
) -> dict[str, Any]:
    """Sum up how much more accurate one row is, with intervals over episodes and over classes.

    Args:
        seeds: S training seeds.
        more: confusions of that row less those of another ``[S, E, N, N]``.
        class_ids: ``[E, N]``.
        bootstrap_seed: of the resampled classes, which are the same for all differences.
    """

    def over_classes(pairs: Tensor) -> float | None:
        random = generator(bootstrap_seed, "class-bootstrap")
        return _number(class_bootstrap(-pairs, class_ids, random).ci95)  # fewer errors are a gain

    by_seed = accuracies(more)
    return {
        **interval(crossed_estimate(by_seed)),
        "ci95_classes": over_classes(more.mean(0)),
        "seeds": [
            {"seed": seed, **interval(estimate(values)), "ci95_classes": over_classes(pairs)}
            for seed, values, pairs in zip(seeds, by_seed, more, strict=True)
        ],
    }


def gains(
    values: Tensor, class_ids: Tensor, nearness: dict[int, float], names: Sequence[str]
) -> dict[str, Any]:
    """Set what each class gains beside its nearness to the memory, nearest first.

    Args:
        values: gain by episode and class ``[E, N]``.
        class_ids: ``[E, N]``.
        nearness: by class id.
        names: by class id.
    """
    classes, member = class_ids.flatten().unique(return_inverse=True)
    gain = torch.bincount(member, values.flatten()) / torch.bincount(member)
    near = torch.tensor([nearness[c] for c in classes.tolist()], dtype=torch.float64)
    listed = zip(classes.tolist(), near.tolist(), gain.tolist(), strict=True)
    return {
        "spearman": _number(spearman(near, gain)),
        "classes": [
            {"class": names[class_id], "nearness": nearness_of_it, "gain": gain_of_it}
            for class_id, nearness_of_it, gain_of_it in sorted(listed, key=lambda one: -one[1])
        ],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
