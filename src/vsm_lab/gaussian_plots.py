"""Pictures of the Gaussian memory: its directions, prototypes that it moves, what classes add."""

from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vsm.data import EpisodeSampler
from vsm.evaluation.statistics import Estimate
from vsm.memory import GaussianMemory, GaussianPosterior, SupportSet
from vsm.runs.measurement import ModelOnData
from vsm_lab.plots import color_of


def directions(memory: GaussianMemory) -> Figure:
    """Draw how much classes differ along each learned direction, and how far examples count."""
    ratios = memory.reader.ratios
    numbers = range(1, len(ratios) + 1)
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(numbers, ratios)
    left.set(ylabel="variance between ÷ within classes", xlabel="direction")
    for shot in (1, 5, 25):
        right.plot(
            numbers, shot * ratios / (shot * ratios + 1), label=f"{shot} example{'s' * (shot > 1)}"
        )
    right.set(ylabel="weight of the examples", xlabel="direction", ylim=(0, 1))
    right.legend(loc="best")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def moved_prototypes(
    posterior: GaussianPosterior, queries: Tensor, names: Sequence[str], ratios: Tensor
) -> Figure:
    """Draw one task on the two directions along which its prototypes moved most.

    Args:
        posterior: of one task with N classes.
        queries: projected ``[N, Q, D]``.
        names: of the classes.
        ratios: e of the directions ``[D]``.
    """
    mean = posterior.gaussian.mean
    between = (ratios / (1 + ratios) * mean[0].var(0)).topk(2).indices
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    for n, name in enumerate(names):
        color = color_of(n)
        ends = (posterior.support_mean, mean, posterior.prior_mean)
        start, end, prior = (tuple(part[0, n, between].tolist()) for part in ends)
        across, up = queries[n][:, between].T
        axes.scatter(across, up, s=8, alpha=0.3, color=color)
        axes.plot(*start, "o", mfc="none", color=color)
        axes.plot(*prior, "x", color=color)
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->"})
        axes.plot(*end, "*", ms=11, color=color, label=name)
    axes.set(xlabel=f"direction {between[0] + 1}", ylabel=f"direction {between[1] + 1}")
    axes.legend(fontsize=8, title="★ prototype, ○ examples, × recalled", loc="best")
    axes.grid(alpha=0.3)
    return figure


@torch.no_grad()
def episode_of(subject: ModelOnData, sampler: EpisodeSampler) -> tuple[GaussianPosterior, Tensor]:
    """Infer the first episode of a sampler; return it with its projected queries ``[N, Q, D]``."""
    assert subject.trained.state is not None
    memory = subject.trained.state.statistics
    assert memory is not None
    [batch] = sampler.evaluation_episodes(1, 0)
    features = subject.trained.encoder.features(subject.dataset, batch.image_ids)
    features = memory.project(features)
    support, queries = features.split([sampler.shot, sampler.queries], 2)
    return memory.reader.to(support.device).infer(SupportSet.of(support)), queries[0]


def rising_accuracy(sizes: Sequence[int], by_shot: Mapping[int, Sequence[Estimate]]) -> Figure:
    """Draw accuracy against the number of remembered classes, with intervals."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for shot, found in by_shot.items():
        means = [100 * one.mean for one in found]
        axes.errorbar(
            sizes, means, [100 * one.ci95 for one in found], fmt="o-", label=f"{shot}-shot"
        )
    axes.set(xlabel="classes remembered", ylabel="accuracy, %", xscale="symlog")
    axes.legend(loc="best")
    axes.grid(alpha=0.3)
    return figure
