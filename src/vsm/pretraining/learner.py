"""What learns while pre-training: network, optimizer, average and teacher, and one step of them."""

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_type_hints

import torch
from torch import Tensor

from vsm.data import ImageDataset
from vsm.errors import RunError, SettingsError
from vsm.model import FewShotModel
from vsm.pretraining.averaging import average_decay, update_average
from vsm.pretraining.directory import PretrainingDirectory
from vsm.pretraining.supervised import Batch, SupervisedNetwork, shared, supervised_loss
from vsm.runs.checkpoints import stated
from vsm.seeding import generator
from vsm.settings import (
    ModelSettings,
    OneCycleSettings,
    PretrainSettings,
    RunSettings,
    own_code,
)
from vsm.system.devices import FUSED_DEVICES, ON_CPU, Placement
from vsm.system.tensor_files import (
    learning_tensors,
    load_tensors,
    load_weights,
    restore_learning,
    strip_prefix,
)

AVERAGE = "average"
"""Before the names of averaged weights among the tensors of a state."""
VALIDATION_TEMPERATURE = 0.1  # of the cosines; it orders no classes, so accuracy ignores it


@dataclass
class PretrainingState:
    """All that changes while pre-training, apart from the network and its optimizer.

    ``step`` counts over all epochs; ``best_epoch`` is 0 before the first validation.
    """

    step: int = 0
    best_epoch: int = 0
    best_accuracy: float = -1.0


class Learner:
    """All that learns.

    Attributes:
        network: what the optimizer changes.
        optimizer: of its parameters.
        kept: what is validated and kept: the average of its weights, or the network itself.
        teacher: whose scores it learns from besides the labels, if it has one.
        judge: the few-shot classifier that validates with the backbone of ``kept``.
    """

    def __init__(
        self,
        settings: PretrainSettings,
        dataset: ImageDataset,
        num_classes: int,
        placement: Placement = ON_CPU,
    ) -> None:
        self.settings = settings
        self.judge = FewShotModel(judge_settings(settings), dataset.image_shape).place(placement)
        backbone = self.judge.require_backbone()
        self.network = SupervisedNetwork(backbone, num_classes, settings, placement)
        self.optimizer = build_optimizer(self.network, settings.optimizer)
        self.kept = self.network
        if settings.average_decay is not None:
            self.kept = copy.deepcopy(self.network)
            self.judge.backbone = self.kept.backbone
        self.teacher = load_teacher(settings, dataset, num_classes, placement)

    def step(self, batch: Batch, learning_rate: float, step: int) -> dict[str, float]:
        """Do one step and return what is logged."""
        batch = batch.to(self.judge.device)
        if self.teacher is not None:
            batch = batch._replace(taught=self.teacher.classify(batch))
        measured = pretraining_step(
            self.network, self.optimizer, batch, learning_rate, self.settings, step
        )
        if self.settings.average_decay is not None:
            decay = average_decay(self.settings.average_decay, step)
            update_average(self.kept, self.network, decay)
        return measured

    def tensors(self) -> dict[str, Tensor]:
        """Return what :meth:`restore` reads."""
        tensors = learning_tensors(self.network, self.optimizer)
        if self.kept is not self.network:
            tensors |= {f"{AVERAGE}.{name}": t for name, t in self.kept.state_dict().items()}
        return tensors

    def restore(self, path: Path) -> PretrainingState:
        """Go back to a state that was saved."""
        tensors, saved = load_tensors(path)
        restore_learning(self.network, self.optimizer, tensors, path)
        if self.kept is not self.network:
            load_weights(self.kept, strip_prefix(tensors, AVERAGE), path)
        return PretrainingState(**stated(saved, get_type_hints(PretrainingState), path))


def load_teacher(
    settings: PretrainSettings,
    dataset: ImageDataset,
    num_classes: int,
    placement: Placement = ON_CPU,
) -> SupervisedNetwork | None:
    """Return the network of the pre-training that teaches, as its last step left it, if there is.

    Raises:
        SettingsError: if it learned other classes, or with code that the student does not name.
        RunError: if it is not at its end.
    """
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
    judge = FewShotModel(judge_settings(taught), dataset.image_shape)
    teacher = SupervisedNetwork(judge.require_backbone(), num_classes, taught, placement)
    weights = strip_prefix(tensors, AVERAGE) or strip_prefix(tensors, "model")
    load_weights(teacher, weights, run.resume)
    return teacher.eval().requires_grad_(False)


def pretraining_step(
    network: SupervisedNetwork,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    learning_rate: float,
    settings: PretrainSettings,
    step: int,
) -> dict[str, float]:
    """Do one step; change network and optimizer, and return what is logged."""
    network.train()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    scores = network(batch, generator(settings.seed, "noise", step))
    terms = supervised_loss(scores, batch, settings)
    optimizer.zero_grad(set_to_none=True)
    terms.total.backward()
    optimizer.step()
    measured = {
        "loss": terms.total.item(),
        "cross_entropy": terms.cross_entropy.item(),
        "accuracy": shared(
            partial(_share_right, scores.classes), batch.labels, batch.mixture
        ).item(),
        "learning_rate": learning_rate,
    }
    if batch.taught is not None:
        measured["distillation_loss"] = terms.distillation.item()
    if len(batch.turns):
        measured["rotation_loss"] = terms.rotation.item()
        measured["rotation_accuracy"] = _share_right(scores.turns, batch.turns).item()
    return measured


def _share_right(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.argmax(1) == labels).float().mean()


def build_optimizer(
    network: SupervisedNetwork, settings: OneCycleSettings
) -> torch.optim.Optimizer:
    """Return SGD over the parameters that learn."""
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return torch.optim.SGD(
        learning,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        fused=learning[0].device.type in FUSED_DEVICES,
    )


def judge_settings(settings: PretrainSettings) -> RunSettings:
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
