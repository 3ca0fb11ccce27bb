"""Supervised learning of a backbone: heads, turned copies, the loss and the one-cycle schedule.

Letters: B images of a batch, R turned copies, C training classes, D features.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.encoders import Backbone
from vsm.pretraining.mixup import Mixture, mixing
from vsm.seeding import Randomness, default_generator, integers
from vsm.settings import OneCycleSettings, PretrainSettings
from vsm.system.devices import ON_CPU, Placement, computing_in, send

QUARTER_TURNS = 4


class CosineClassifier(nn.Module):
    """Scores ``s · cos(x, w_c)`` of features x ``[B, D]`` for every class c, with a fixed s."""

    def __init__(self, num_features: int, num_classes: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_classes, num_features))
        nn.init.normal_(self.weight, std=num_features**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        """Score features ``[B, D]``: ``[B, C]``."""
        return self.scale * F.normalize(features, dim=1) @ F.normalize(self.weight, dim=1).T


class Batch(NamedTuple):
    """Images of one step.

    Attributes:
        images: normalized ``[B + R, C, H, W]``, or ``[R, C, H, W]`` where the first B of the R
            turned ones are the images themselves.
        labels: position of each image's class among the training classes ``[B]``.
        turns: quarter turns of the last R images ``[R]``.
        mixture: how the network is to mix the first B images, if it is.
        taught: what a teacher says of the classes of the first B, unmixed ``[B, C]``.
    """

    images: Tensor
    labels: Tensor
    turns: Tensor
    mixture: Mixture | None = None
    taught: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Move what the network reads."""
        images, labels, turns = (send(one, device) for one in self[:3])
        mixture = self.mixture
        if mixture is not None:
            mixture = mixture._replace(partners=send(mixture.partners, device))
        return self._replace(images=images, labels=labels, turns=turns, mixture=mixture)


class Scores(NamedTuple):
    """What the heads say of the B images' classes ``[B, C]`` and of the R turns ``[R, 4]``."""

    classes: Tensor
    turns: Tensor


class SupervisedNetwork(nn.Module):
    """A backbone, a classifier of all training classes and, if asked for, a head for rotations."""

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        settings: PretrainSettings,
        placement: Placement = ON_CPU,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.precision = placement.precision
        width = backbone.num_features
        self.classifier: nn.Module
        with default_generator(settings.seed, "heads"):
            if settings.classifier == "cosine":
                self.classifier = CosineClassifier(width, num_classes, settings.cosine_scale)
            else:
                self.classifier = nn.Linear(width, num_classes)
            if settings.rotation.form != "none":
                self.rotation_head = nn.Linear(width, QUARTER_TURNS)
        self.to(placement.device)

    def forward(self, batch: Batch, random: Randomness) -> Scores:
        """Score classes and turns; ``random`` is the source of what the backbone drops."""
        with mixing(self.backbone, batch.mixture):
            features = self._features(batch.images, random)
        classes = self.classifier(features[: len(batch.labels)])
        if not len(batch.turns):
            return Scores(classes, features.new_empty(0, QUARTER_TURNS))
        return Scores(classes, self.rotation_head(features[-len(batch.turns) :]))

    @torch.no_grad()
    def classify(self, batch: Batch) -> Tensor:
        """Score the classes of the first B images, unmixed, without learning: ``[B, C]``."""
        scores: Tensor = self.classifier(self._features(batch.images[: len(batch.labels)]))
        return scores

    def _features(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        with computing_in(self.precision, images.device):
            features: Tensor = self.backbone(images, random)
        return features.to(images.dtype)


def with_turned_copies(pixels: Tensor, form: str, random: Randomness) -> tuple[Tensor, Tensor]:
    """Add copies turned counter-clockwise by quarter turns, for self-supervision.

    Args:
        pixels: square images ``[B, C, H, H]``.
        form: ``none``; ``self``, no copy but every image turned by 0°, 90°, 180° or 270° at random;
            ``one`` copy of each, turned so; ``all``, where the images themselves are the copies
            turned by 0°.
        random: source of the turns.

    Returns:
        Images, channels-last, of which the first B are those to classify; the turns of the last R.
    """
    if form == "none":
        return pixels, torch.empty(0, dtype=torch.int64)
    if form == "all":
        copies = [torch.rot90(pixels, turn, (2, 3)) for turn in range(QUARTER_TURNS)]
        turns = torch.arange(QUARTER_TURNS).repeat_interleave(len(pixels))
    else:
        turns = integers(random, QUARTER_TURNS, len(pixels))
        turned = torch.empty_like(pixels)
        for turn in range(QUARTER_TURNS):
            turned[turns == turn] = torch.rot90(pixels[turns == turn], turn, (2, 3))
        copies = [turned] if form == "self" else [pixels, turned]
    return torch.cat(copies).contiguous(memory_format=torch.channels_last), turns


class LossTerms(NamedTuple):
    """The loss and its parts, each a scalar; zero where there is no rotation or no teacher."""

    total: Tensor
    cross_entropy: Tensor
    rotation: Tensor
    distillation: Tensor


def supervised_loss(scores: Scores, batch: Batch, settings: PretrainSettings) -> LossTerms:
    """Cross-entropy of the classes plus the weighted cross-entropy of the rotations.

    With ε the label smoothing, an image's target is ``1 - ε + ε / C`` for its class and ``ε / C``
    for the others. Rotations are not smoothed. A teacher's probabilities are targets as well, with
    weight α: ``(1 - α) · cross-entropy + α · T² · KL(teacher ‖ network)``, both at temperature T.
    A mixed image has the targets of both; copies are never mixed.
    """
    weight, temperature = settings.distillation.weight, settings.distillation.temperature

    def cross_entropy_of(labels: Tensor) -> Tensor:
        smoothing = settings.label_smoothing
        return F.cross_entropy(scores.classes, labels, label_smoothing=smoothing)

    def divergence_from(taught: Tensor) -> Tensor:
        mine, theirs = (F.log_softmax(one / temperature, 1) for one in (scores.classes, taught))
        return temperature**2 * F.kl_div(mine, theirs, reduction="batchmean", log_target=True)

    total = cross_entropy = shared(cross_entropy_of, batch.labels, batch.mixture)
    rotation = distillation = cross_entropy.new_zeros(())
    if batch.taught is not None:
        distillation = shared(divergence_from, batch.taught, batch.mixture)
        total = (1 - weight) * cross_entropy + weight * distillation
    if len(batch.turns):
        mixture = batch.mixture if settings.rotation.form == "self" else None
        rotation = shared(partial(F.cross_entropy, scores.turns), batch.turns, mixture)
        total = total + settings.rotation.weight * rotation
    return LossTerms(total, cross_entropy, rotation, distillation)


def shared(measure: Callable[[Tensor], Tensor], targets: Tensor, mixture: Mixture | None) -> Tensor:
    """Measure by the targets of the B images, or by λ of theirs and 1 - λ of their partners'."""
    measured = measure(targets)
    if mixture is None:
        return measured
    return torch.lerp(measure(targets[mixture.partners]), measured, mixture.share)


def one_cycle(settings: OneCycleSettings, step: int, num_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 1 (Smith & Topin 2018, with cosines).

    It rises from the highest divided by ``initial_divisor`` over ``warmup_share`` of the steps, and
    falls until the last to the first divided by ``final_divisor``. A function of the step alone, so
    that a resumed run needs no state of it.
    """
    highest = settings.learning_rate
    first = highest / settings.initial_divisor
    last = first / settings.final_divisor
    position, end = step - 1, num_steps - 1
    peak = max(0.0, settings.warmup_share * num_steps - 1)
    if position < peak:
        return _cosine_between(first, highest, position / peak)
    fallen = (position - peak) / (end - peak) if end > peak else 0.0
    return _cosine_between(highest, last, fallen)


def _cosine_between(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))
