"""Logistic regression on the support set, multinomial, of many tasks at once, by L-BFGS.

Every task minimizes ``1/S · [ Σ_i −log softmax(W x_i + b)_{y_i} + ‖W‖² / (2C) ]`` over its own S
samples, which is the objective of scikit-learn's ``LogisticRegression``. Tasks share matrix
products, but the steps of a task do not depend on the others of its batch.

A point is W with b as its last column, ``[T, N, D + 1]``. Classes come before samples, because thin
products and the softmax are several times as fast in that layout.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.settings import BaselineSettings

HISTORY = 10  # pairs of step and change of gradient that L-BFGS remembers
DECREASE = 0.1  # share of the decrease promised by the slope that a step must bring
MAX_HALVINGS = 40
ROUNDING = 10  # of an objective, in units of its dtype's precision


class LinearClassifiers(NamedTuple):
    """One linear classifier per task."""

    weights: Tensor  # W [T, N, D]
    biases: Tensor  # b [T, N]

    def log_probabilities(self, inputs: Tensor) -> Tensor:
        """Classify ``[T, B, D]``: ``[T, B, N]``."""
        return F.log_softmax(inputs @ self.weights.mT + self.biases.unsqueeze(1), -1)


def fit_logistic_regression(samples: Tensor, settings: BaselineSettings) -> LinearClassifiers:
    """Fit one classifier per task to samples ``[T, N, M, D]``, whose position names their class.

    Samples are centered, written in a basis of their span and, if large, divided by their root
    mean square. Each is a change of variables that the fit undoes: the minimum is that of the
    samples given. It ends when no entry of any gradient of the objective above exceeds the
    tolerance (where the root mean square of the samples exceeds 1, in units of it).
    """
    _, num_classes, count, num_features = samples.shape
    labels = torch.arange(num_classes, device=samples.device).repeat_interleave(count)  # [S]
    samples = samples.flatten(1, 2)
    center = samples.mean(1, keepdim=True)  # b is free to make up for it
    coordinates, basis = samples - center, None
    if len(labels) < num_features:
        # In a basis [T, S, D] of a space that holds all samples, they are [T, S, S]. The penalty
        # leaves no weight outside that space, so the smaller problem has the same answer.
        basis, triangle = (part.mT for part in torch.linalg.qr(coordinates.mT))
        coordinates = triangle.contiguous()
    scale = coordinates.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1)  # [T, 1, 1]
    targets = F.one_hot(labels, num_classes).mT.to(samples)  # [N, S]
    decay = 1 / (settings.inverse_penalty * len(labels) * scale.square())
    problem = _Problem(coordinates / scale, targets, decay)
    weights, biases = _minimize(problem, settings.tolerance, settings.max_iterations)
    weights = weights / scale
    if basis is not None:
        weights = weights @ basis
    return LinearClassifiers(weights, biases - (weights @ center.mT).squeeze(-1))


class _Problem(NamedTuple):
    """The objective and its gradient."""

    samples: Tensor  # [T, S, D]
    targets: Tensor  # one-hot [N, S]
    decay: Tensor  # weight of ‖W‖² / 2, [T, 1, 1]

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective ``[T, 1, 1]`` and its gradient ``[T, N, D + 1]``."""
        weights, biases = point[..., :-1], point[..., -1:]
        count = self.targets.shape[1]
        scores = F.log_softmax(weights @ self.samples.mT + biases, 1)  # [T, N, S]
        cross_entropy = -(scores * self.targets).sum((1, 2), keepdim=True) / count
        residuals = scores.exp_().sub_(self.targets).div_(count)
        slopes = residuals @ self.samples + self.decay * weights
        gradient = torch.cat([slopes, residuals.sum(2, keepdim=True)], 2)
        return cross_entropy + self.decay / 2 * _dot(weights, weights), gradient


def _minimize(problem: _Problem, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor]:
    """Return W ``[T, N, D]`` and b ``[T, N]``."""
    num_tasks, _, num_features = problem.samples.shape
    point = problem.samples.new_zeros(num_tasks, len(problem.targets), num_features + 1)
    value, gradient = problem(point)
    history: list[Pair] = []
    for step in range(max_iterations + 1):
        unfinished = gradient.abs().amax((1, 2), keepdim=True) > tolerance  # [T, 1, 1]
        if not unfinished.any():
            break
        if step == max_iterations:
            warnings.warn(
                f"logistic regression: {int(unfinished.sum())} of {num_tasks} tasks had not "
                f"converged after {max_iterations} steps; raise baseline.max_iterations or "
                "baseline.tolerance",
                RuntimeWarning,
                stacklevel=2,
            )
            break
        direction = torch.where(unfinished, -_inverse_hessian_times(gradient, history), 0.0)
        moved, value, moved_gradient = _search(problem, point, value, gradient, direction)
        taken, change = moved - point, moved_gradient - gradient
        product = _dot(taken, change)  # zero for tasks that have converged
        history.append((taken, change, (1 / product).where(product > 0, 0.0)))
        del history[:-HISTORY]
        point, gradient = moved, moved_gradient
    return point[..., :-1], point[..., -1]


Pair = tuple[Tensor, Tensor, Tensor]
"""A step, that of the gradient ``[T, N, D + 1]``, and 1 / their product or 0 ``[T, 1, 1]``."""


def _inverse_hessian_times(gradient: Tensor, history: list[Pair]) -> Tensor:
    """Two-loop recursion of L-BFGS; before any step, the gradient at length 1 or less."""
    if not history:
        return gradient / _dot(gradient, gradient).sqrt().clamp_min(1)
    result = gradient.clone()
    parts = []
    for step, change, inverse in reversed(history):
        part = inverse * _dot(step, result)
        result -= part * change
        parts.append(part)
    step, change, inverse = history[-1]
    result *= (_dot(step, change) / _dot(change, change)).where(inverse > 0, 0.0)
    for (step, change, inverse), part in zip(history, reversed(parts), strict=True):
        result += step * (part - inverse * _dot(change, result))
    return result


def _search(
    problem: _Problem, point: Tensor, value: Tensor, gradient: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halve each task's step until it is good enough.

    It is if the objective falls by a share of what the slope predicts or, where rounding hides that
    fall, if the slope has become flat enough (Hager and Zhang 2005).
    """
    slope = _dot(gradient, direction)
    noise = ROUNDING * torch.finfo(value.dtype).eps * value
    length = torch.ones_like(value)
    for _ in range(MAX_HALVINGS):
        moved = point + length * direction
        moved_value, moved_gradient = problem(moved)
        falls = moved_value <= value + DECREASE * length * slope
        flattens = _dot(moved_gradient, direction) <= (2 * DECREASE - 1) * slope
        enough = falls | (flattens & (moved_value <= value + noise))
        if enough.all():
            break
        length = torch.where(enough, length, length / 2)
    return moved, moved_value, moved_gradient


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of every task: ``[T, 1, 1]``."""
    return (a * b).sum((1, 2), keepdim=True)
