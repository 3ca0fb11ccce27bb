"""Supervised learning of a backbone: network, teacher, loss, optimizer and one-cycle schedule.

Letters: B images of a batch, C training classes, D features.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.data import ImageDataset
from vsm.encoders import Backbone
from vsm.errors import RunError, SettingsError
from vsm.model import FewShotModel
from vsm.runs.directory import PretrainingDirectory
from vsm.seeding import Randomness, default_generator, generator
from vsm.settings import ModelSettings, OneCycleSettings, PretrainSettings, RunSettings, own_code
from vsm.system.devices import FUSED_DEVICES, ON_CPU, Placement, computing_in
from vsm.system.tensor_files import load_tensors, load_weights, strip_prefix

VALIDATION_TEMPERATURE = 0.1  # of the cosines; accuracy does not depend on it


class SupervisedNetwork(nn.Module):
    """A backbone and a linear classifier of all training classes."""

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
        with default_generator(settings.seed, "heads"):
            self.classifier = nn.Linear(backbone.num_features, num_classes)
        self.to(placement.device)

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:
        """Score the classes of ``images [B, …]``: ``[B, C]``; ``random`` drives dropout."""
        with computing_in(self.precision, images.device):
            features: Tensor = self.backbone(images, random)
        scores: Tensor = self.classifier(features.to(images.dtype))
        return scores


def load_teacher(
    settings: PretrainSettings,
    dataset: ImageDataset,
    num_classes: int,
    placement: Placement = ON_CPU,
) -> SupervisedNetwork | None:
    """Return the network of the pre-training that teaches, as its last step left it, if any."""
    if settings.distillation.teacher is None:
        return None
    run = PretrainingDirectory(Path(settings.distillation.teacher))
    taught = run.settings()
    if taught.data != settings.data:
        raise SettingsError(
            f"distillation.teacher: {run.path} learned the classes of {taught.data}, not of "
            f"{settings.data}; give one of the same data"
        )
    if own_code(taught.backbone) not in (None, settings.backbone):
        raise SettingsError(
            f"distillation.teacher: {run.path} names code that is not part of vsm, "
            f"{taught.backbone}; if you trust it, teach the same with --backbone {taught.backbone}"
        )
    tensors, saved = load_tensors(run.resume)
    ends = [row["step"] for row in run.read_validations() if row["epoch"] == taught.epochs]
    if saved["step"] not in ends:
        raise RunError(
            f"distillation.teacher: {run.path} is not at its end; finish it with vsm pretrain "
            f"--output {run.path} --resume"
        )
    validator = FewShotModel(validator_settings(taught), dataset.image_shape)
    teacher = SupervisedNetwork(validator.require_backbone(), num_classes, taught, placement)
    load_weights(teacher, strip_prefix(tensors, "model"), run.resume)
    return teacher.eval().requires_grad_(False)


def pretraining_step(
    network: SupervisedNetwork,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    learning_rate: float,
    settings: PretrainSettings,
    step: int,
    teacher: SupervisedNetwork | None = None,
) -> dict[str, float]:
    """Do one step, which changes network and optimizer; return values to log.

    ``images [B, C, H, W]`` are normalized; ``labels [B]`` count the training classes.
    """
    with torch.no_grad():
        taught = None if teacher is None else teacher(images)
    network.train()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    scores = network(images, generator(settings.seed, "noise", step))
    terms = supervised_loss(scores, labels, settings, taught)
    optimizer.zero_grad(set_to_none=True)
    terms.total.backward()
    optimizer.step()
    measured = {
        "loss": terms.total.item(),
        "cross_entropy": terms.cross_entropy.item(),
        "accuracy": (scores.argmax(1) == labels).float().mean().item(),
        "learning_rate": learning_rate,
    }
    if terms.distillation is not None:
        measured["distillation_loss"] = terms.distillation.item()
    return measured


class LossTerms(NamedTuple):
    """The loss and its parts, each a scalar; no distillation without a teacher."""

    total: Tensor
    cross_entropy: Tensor
    distillation: Tensor | None


def supervised_loss(
    scores: Tensor, labels: Tensor, settings: PretrainSettings, taught: Tensor | None = None
) -> LossTerms:
    """Smoothed cross-entropy of ``scores [B, C]``, and the divergence from a teacher's.

    With ε the label smoothing, an image's target is ``1 - ε + ε / C`` for its class and ``ε / C``
    for the others. With the teacher's scores ``taught [B, C]``, weight α and temperature T, the
    loss is ``(1 - α) · cross-entropy + α · T² · KL(teacher ‖ network)``, the KL at temperature T.
    """
    cross_entropy = F.cross_entropy(scores, labels, label_smoothing=settings.label_smoothing)
    if taught is None:
        return LossTerms(cross_entropy, cross_entropy, None)
    weight, temperature = settings.distillation.weight, settings.distillation.temperature
    ours, theirs = (F.log_softmax(one / temperature, 1) for one in (scores, taught))
    divergence = F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    distillation = temperature**2 * divergence
    total = (1 - weight) * cross_entropy + weight * distillation
    return LossTerms(total, cross_entropy, distillation)


def build_optimizer(
    network: SupervisedNetwork, settings: OneCycleSettings
) -> torch.optim.Optimizer:
    """Return SGD over the trainable parameters."""
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return torch.optim.SGD(
        trainable,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        fused=trainable[0].device.type in FUSED_DEVICES,
    )


def one_cycle(settings: OneCycleSettings, step: int, num_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 1 (Smith & Topin 2018, with cosines).

    It rises from the highest divided by ``initial_divisor`` over ``warmup_share`` of the steps, and
    falls until the last to the first divided by ``final_divisor``. A function of the step alone, so
    that a resumed run needs no state of it.
    """
    first = settings.learning_rate / settings.initial_divisor
    start, end = settings.learning_rate, first / settings.final_divisor
    position, last = step - 1, num_steps - 1
    peak = max(0.0, settings.warmup_share * num_steps - 1)
    share = (position - peak) / (last - peak) if last > peak else 0.0
    if position < peak:
        start, end, share = first, start, position / peak
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))


def validator_settings(settings: PretrainSettings) -> RunSettings:
    """Return the few-shot classifier that validates: nearest prototype by cosine.

    Features have length one before they are averaged to a prototype. It builds the backbone, so
    that a pre-trained one is what ``vsm train`` would build.
    """
    model = ModelSettings(
        backbone=settings.backbone,
        channels=settings.channels,
        keep_probability=settings.keep_probability,
        normalize_features=True,
        distance="cosine",
        temperature=VALIDATION_TEMPERATURE,
    )
    return RunSettings(data=settings.data, method="protonet", seed=settings.seed, model=model)
