"""Scores of seeds on identical episodes, summed up as the result file has them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vsm.seeding import generator
from vsm.statistics import Estimate, class_bootstrap, crossed_estimate, estimate, spearman

BEFORE = ("nll", "ece")
AFTER = ("temperature", "tempered_nll", "tempered_ece")


def interval(found: Estimate) -> dict[str, float | None]:
    """Return a mean and its interval; JSON has no word for what is not a number."""
    return {"mean": found.mean, "ci95": _number(found.ci95)}


def summary(
    seeds: Sequence[int], scores: Sequence[dict[str, Any]], shares: Tensor
) -> dict[str, Any]:
    """Sum up a row: means over seeds, and each seed by itself.

    Args:
        seeds: S training seeds.
        scores: of each, what was measured besides.
        shares: of right answers by seed, episode and class ``[S, E, N]``.
    """
    names = BEFORE + (AFTER if scores[0]["temperature"] is not None else ())
    accuracies = shares.mean(-1)  # [S, E]
    return {
        **interval(crossed_estimate(accuracies)),
        **{name: sum(one[name] for one in scores) / len(scores) for name in names},
        "seeds": [
            {"seed": seed, **interval(estimate(values)), **{name: one[name] for name in names}}
            for seed, values, one in zip(seeds, accuracies, scores, strict=True)
        ],
    }


def difference(
    seeds: Sequence[int], values: Tensor, class_ids: Tensor, bootstrap_seed: int
) -> dict[str, Any]:
    """Sum up a paired difference, with intervals over episodes and over classes.

    Args:
        seeds: S training seeds.
        values: differences by seed, episode and class ``[S, E, N]``.
        class_ids: ``[E, N]``.
        bootstrap_seed: of the resampled classes, which are the same for all differences.
    """

    def over_classes(by_class: Tensor) -> float | None:
        random = generator(bootstrap_seed, "class-bootstrap")
        return _number(class_bootstrap(by_class, class_ids, random).ci95)

    return {
        **interval(crossed_estimate(values.mean(-1))),
        "ci95_classes": over_classes(values.mean(0)),
        "seeds": [
            {"seed": seed, **interval(estimate(one.mean(-1))), "ci95_classes": over_classes(one)}
            for seed, one in zip(seeds, values, strict=True)
        ],
    }


def gains(
    values: Tensor, class_ids: Tensor, nearness: dict[int, float], names: Sequence[str]
) -> dict[str, Any]:
    """Set what each class gains beside its nearness to the memory, nearest first.

    Args:
        values: differences by episode and class ``[E, N]``.
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
