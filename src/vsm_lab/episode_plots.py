"""Plots of episodes, runs and the Gaussian memory. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from vsm.data import EpisodeSampler, ImageDataset
from vsm.evaluation.intervals import Estimate
from vsm.memory import GaussianMemory, SupportSet
from vsm.runs.memory_map import principal_plane
from vsm.runs.trained_model import Measurement, ModelOnData
from vsm_lab.measures import ShownEpisode
from vsm_lab.plots import (
    RIGHT,
    WRONG,
    color_of,
    hide_spines,
    show_image,
)

SIZES_SHOWN = (0, 4, 16, 64, 256)


def episode_sheet(episode: ShownEpisode, dataset: ImageDataset) -> Figure:
    """Show the support images, and below each its queries with the probability of every class."""
    way, queries = episode.query_ids.shape
    figure = Figure(figsize=(1.55 * way, 1.35 + 1.45 * queries), layout="constrained")
    grid = figure.add_gridspec(1 + 2 * queries, way, height_ratios=[1.2] + [1.0, 0.4] * queries)
    for n in range(way):
        axes = figure.add_subplot(grid[0, n])
        show_image(axes, dataset, int(episode.support_ids[n, 0]), color_of(n))
        axes.set_title(f"class {n + 1}", fontsize=9, color=color_of(n), weight="bold")
        for q in range(queries):
            probabilities = episode.probabilities[n, q]
            predicted = int(probabilities.argmax())
            axes = figure.add_subplot(grid[1 + 2 * q, n])
            show_image(axes, dataset, int(episode.query_ids[n, q]))
            mark, color = ("✓", RIGHT) if predicted == n else ("✗", WRONG)
            title = f"{mark} class {predicted + 1}  {probabilities[predicted]:.0%}"
            axes.set_title(title, fontsize=8, color=color)
            bars = figure.add_subplot(grid[2 + 2 * q, n])
            colors = [*map(color_of, range(way))]
            bars.bar(range(1, way + 1), probabilities.tolist(), color=colors)
            bars.set_ylim(0, 1)
            bars.set_yticks([])
            bars.set_xticks(range(1, way + 1) if way <= 5 else [])
            bars.tick_params(labelsize=6, length=0, pad=1)
            hide_spines(bars, "top", "right", "left")
    return figure


def recall_sheet(
    episode: ShownEpisode,
    dataset: ImageDataset,
    slot_class_ids: Sequence[int],
    num_recalled: int = 6,
) -> Figure:
    """Show each new class beside the remembered classes it recalled most, with their λ."""
    if episode.weights is None:
        raise ValueError("episode: recall can only be shown for a method with memory")
    way = len(episode.class_names)
    num_recalled = min(num_recalled, episode.weights.shape[-1])
    figure = Figure(figsize=(1.25 * (num_recalled + 1.6), 1.5 * way), layout="constrained")
    grid = figure.add_gridspec(way, num_recalled + 2, width_ratios=[1, 0.25] + [1] * num_recalled)
    for n in range(way):
        axes = figure.add_subplot(grid[n, 0])
        show_image(axes, dataset, int(episode.support_ids[n, 0]))
        axes.set_title("new" if n == 0 else "", fontsize=9, weight="bold")
        for rank, slot in enumerate(episode.weights[n].topk(num_recalled).indices.tolist()):
            axes, class_id = figure.add_subplot(grid[n, rank + 2]), slot_class_ids[slot]
            show_image(axes, dataset, int(dataset.image_ids(class_id)[0]))
            axes.set_title(f"λ = {episode.weights[n, slot]:.2f}", fontsize=9)
            name = dataset.class_names[class_id].replace("/", "\n")
            axes.set_xlabel(name, fontsize=6, color="#666666")
    return figure


def prototype_clouds(episodes: dict[str, ShownEpisode]) -> Figure:
    """Project prototype samples and queries of one episode to the plane, one panel per method.

    Each panel has its own two principal axes of the prototype samples and queries, so shapes can
    be compared and coordinates cannot.
    """
    figure = Figure(figsize=(5.2 * len(episodes), 4.6), layout="constrained")
    for position, (title, episode) in enumerate(episodes.items()):
        axes = figure.add_subplot(1, len(episodes), position + 1)
        prototypes, features = episode.prototypes, episode.query_features
        center, plane, _ = principal_plane(
            torch.cat([prototypes.flatten(0, 1), features.flatten(0, 1)])
        )
        for n in range(len(prototypes)):
            color = color_of(n)
            points, queries = (((x[n] - center) @ plane).numpy() for x in (prototypes, features))
            axes.scatter(points[:, 0], points[:, 1], s=7, alpha=0.35, color=color, linewidths=0)
            x, y = queries.T
            axes.scatter(x, y, s=30, marker="x", color=color, label=f"class {n + 1}")
            _add_ellipse(axes, points, color)
        axes.set_title(title, fontsize=11)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_aspect("equal", adjustable="datalim")
        if position == 0:
            axes.legend(
                fontsize=8, frameon=False, title="× queries, · prototype samples", loc="best"
            )
    return figure


def _add_ellipse(axes: Axes, points: Any, color: str) -> None:
    """Draw the two-standard-deviation ellipse of points ``[L, 2]``."""
    if len(points) < 3:
        return
    values, vectors = np.linalg.eigh(np.cov(points.T))
    angle = float(np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1])))
    width, height = 4 * np.sqrt(np.maximum(values[::-1], 1e-12))
    axes.add_patch(
        Ellipse(points.mean(0), width, height, angle=angle, fill=False, edgecolor=color, lw=1.6)
    )


def learning_curves(metrics: dict[str, list[dict[str, Any]]]) -> Figure:
    """Plot the training loss and the validation accuracy of every run against the step."""
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for position, (name, rows) in enumerate(metrics.items()):
        color = color_of(position)
        steps = [row["step"] for row in rows if "cross_entropy" in row]
        values = [row["cross_entropy"] for row in rows if "cross_entropy" in row]
        smoothed = [median(values[max(0, at - 4) : at + 5]) for at in range(len(values))]
        loss.plot(steps, values, color=color, alpha=0.25, lw=0.8)
        loss.plot(steps, smoothed, color=color, label=name, lw=1.8)
        validated = [row for row in rows if "validation" in row]
        accuracy.errorbar(
            [row["step"] for row in validated],
            [100 * row["validation"]["accuracy"] for row in validated],
            [100 * row["validation"]["ci95"] for row in validated],
            color=color,
            label=name,
            capsize=2,
            marker="o",
            ms=3,
        )
    loss.set_ylabel("training cross entropy (nats)")
    loss.set_yscale("log")
    accuracy.set_ylabel("validation accuracy (%)")
    for axes in (loss, accuracy):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="best")
    return figure


def reliability_diagram(measured: Sequence[Measurement], names: Sequence[str]) -> Figure:
    """Plot accuracy against confidence in bins, and how many predictions each bin holds."""
    figure = Figure(figsize=(3.7 * len(measured), 3.8), layout="constrained")
    for position, (one, name) in enumerate(zip(measured, names, strict=True)):
        table = one.evaluation.reliability
        filled = table.fraction > 0
        width = 1 / len(table.fraction)
        centers = (torch.arange(len(table.fraction)) + 0.5) * width
        axes = figure.add_subplot(1, len(measured), position + 1)
        axes.plot([0, 1], [0, 1], color="#888888", lw=1, ls="--")
        share = 0.25 * table.fraction / table.fraction.max()
        for x, y, color, alpha, label in (
            (centers[filled], table.accuracy[filled], color_of(position), 0.85, "accuracy"),
            (centers, share, "#333333", 0.35, "share of predictions"),
        ):
            axes.bar(x.tolist(), y.tolist(), 0.92 * width, color=color, alpha=alpha, label=label)
        axes.set_title(f"{name}: ECE {table.expected_calibration_error:.1%}", fontsize=10)
        axes.set_xlabel("confidence")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        if position == 0:
            axes.set_ylabel("accuracy")
            axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


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


def moved_prototypes(subject: ModelOnData, sampler: EpisodeSampler) -> Figure:
    """Draw one episode on the two directions along which its prototypes moved most."""
    assert subject.trained.state is not None
    memory = subject.trained.state.statistics
    assert memory is not None
    [batch] = sampler.evaluation_episodes(1, 0)
    with torch.no_grad():
        features = subject.trained.encoder.features(subject.dataset, batch.image_ids)
        support, queries = memory.project(features).split([sampler.shot, sampler.queries], 2)
        posterior = memory.reader.to(support.device).infer(SupportSet.of(support))
    mean, ratios = posterior.gaussian.mean, memory.reader.ratios
    between = (ratios / (1 + ratios) * mean[0].var(0)).topk(2).indices
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    for n in range(sampler.way):
        color = color_of(n)
        ends = (posterior.support_mean, mean, posterior.prior_mean)
        start, end, prior = (tuple(part[0, n, between].tolist()) for part in ends)
        across, up = queries[0, n][:, between].T
        axes.scatter(across, up, s=8, alpha=0.3, color=color)
        axes.plot(*start, "o", mfc="none", color=color)
        axes.plot(*prior, "x", color=color)
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->"})
        axes.plot(*end, "*", ms=11, color=color, label=f"class {n + 1}")
    axes.set(xlabel=f"direction {between[0] + 1}", ylabel=f"direction {between[1] + 1}")
    axes.legend(fontsize=8, title="★ prototype, ○ examples, × recalled", loc="best")
    axes.grid(alpha=0.3)
    return figure


def memory_figures(
    measured: Measurement, dataset: ImageDataset, shots: Sequence[int]
) -> dict[str, Figure]:
    """Plot a Gaussian memory: its directions, how it moves prototypes, and what its size adds."""
    subject, protocol = ModelOnData(measured.trained, dataset), measured.protocol
    assert measured.trained.state is not None
    memory = measured.trained.state.statistics
    assert memory is not None
    sizes = [*(size for size in SIZES_SHOWN if size < len(memory)), len(memory)]
    accuracies = {
        shot: [
            subject.first_slots(size).measure(replace(protocol, shot=shot)).evaluation.accuracy
            for size in sizes
        ]
        for shot in shots
    }
    return {
        "directions": directions(memory),
        "moved": moved_prototypes(subject, protocol.sampler(dataset)),
        "rising": rising_accuracy(sizes, accuracies),
    }


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
