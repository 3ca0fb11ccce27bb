"""Pre-training, top to bottom: all training classes → epochs of steps → few-shot validation.

One step: order of the epoch → images → augmentation → backbone → classifier → loss → optimizer.
The result is a backbone whose features separate unseen classes; ``vsm train`` begins with it.
Letters: B images of a batch, C training classes, D features.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.data import EpisodeSampler, ImageDataset, open_images
from vsm.encoders import Backbone
from vsm.errors import RunError, SettingsError
from vsm.evaluation.evaluator import evaluate
from vsm.evaluation.intervals import Estimate, estimate
from vsm.model import FewShotModel
from vsm.runs.checkpoints import begin_with_backbone, numbers_in, save_backbone
from vsm.runs.directory import PretrainingDirectory
from vsm.seeding import Randomness, default_generator, generator
from vsm.settings import ModelSettings, OneCycleSettings, PretrainSettings, RunSettings, own_code
from vsm.system.devices import (
    FUSED_DEVICES,
    ON_CPU,
    Placement,
    choose_placement,
    computing_in,
    send,
)
from vsm.system.interruption import Interrupted, stop_request
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import (
    learning_tensors,
    load_tensors,
    load_weights,
    restore_learning,
    save_tensors,
    strip_prefix,
)

VALIDATION_SEED = 0
VALIDATION_TEMPERATURE = 0.1  # of the cosines; accuracy does not depend on it


@dataclass
class PretrainingState:
    """All that changes in pre-training, apart from the network and its optimizer."""

    step: int = 0
    best_epoch: int = 0
    best_accuracy: float = -1.0


@dataclass(frozen=True)
class FewShotScores:
    """Accuracy of nearest prototypes on episodes of unseen classes, by number of support images."""

    way: int
    queries: int
    episodes: int
    accuracies: dict[int, Estimate]

    @property
    def mean(self) -> float:
        """Mean accuracy over the numbers of support images; the best backbone has the highest."""
        return sum(accuracy.mean for accuracy in self.accuracies.values()) / len(self.accuracies)

    def __str__(self) -> str:
        return ", ".join(f"{shot}-shot {score}" for shot, score in self.accuracies.items())

    def as_dict(self) -> dict[str, Any]:
        """Return the scores for log and metadata; accuracies are fractions."""
        return {
            "way": self.way,
            "queries": self.queries,
            "episodes": self.episodes,
            "mean_accuracy": self.mean,
            "shots": {
                str(shot): {"accuracy": accuracy.mean, "ci95": accuracy.ci95}
                for shot, accuracy in self.accuracies.items()
            },
        }


def pretrain(
    settings: PretrainSettings,
    output: Path,
    resume: bool = False,
    progress: Progress = NULL_PROGRESS,
    placement: Placement | None = None,
) -> PretrainingDirectory:
    """Train a backbone to classify all training classes, and keep the best by validation.

    Args:
        settings: the same settings give the same result, bit for bit.
        output: the directory.
        resume: continue from the last state in ``output``, if there is one.
        progress: shows every step and validation.
        placement: where to compute; chosen if not given.

    Raises:
        Interrupted: after saving, when the process was asked to stop.
    """
    run = PretrainingDirectory(output)
    with run.locked():
        _pretrain(settings, run, resume, progress, placement or choose_placement())
    return run


def _pretrain(
    settings: PretrainSettings,
    run: PretrainingDirectory,
    resume: bool,
    progress: Progress,
    placement: Placement,
) -> None:
    dataset = open_images(settings.data)
    images = TrainingImages.of(dataset, settings)
    samplers = validation_samplers(settings, dataset)
    validator = FewShotModel(validator_settings(settings), dataset.image_shape).place(placement)
    backbone = validator.require_backbone()
    network = SupervisedNetwork(backbone, images.num_classes, settings, placement)
    optimizer = build_optimizer(network, settings.optimizer)
    teacher = load_teacher(settings, dataset, images.num_classes, placement)
    state = PretrainingState()
    if run.open(settings, resume):
        tensors, saved = load_tensors(run.resume)
        restore_learning(network, optimizer, tensors, run.resume)
        state = PretrainingState(**numbers_in(saved, get_type_hints(PretrainingState), run.resume))
    num_steps = settings.epochs * images.steps_per_epoch
    progress.start("pretrain", num_steps)
    progress.advance(state.step)
    with run.step_log(state.step) as log, stop_request() as stop:
        for epoch, ids, labels in images.batches(state.step):
            state.step += 1
            inputs = load_images(dataset, ids, settings, state.step)
            batch = (send(inputs, validator.device), send(labels, validator.device))
            rate = one_cycle(settings.optimizer, state.step, num_steps)
            measured = pretraining_step(
                network, optimizer, *batch, rate, settings, state.step, teacher
            )
            progress.advance(1, f"loss {measured['loss']:.3f}")
            log.step({"step": state.step, "epoch": epoch}, measured)
            at_end = state.step == num_steps
            epoch_done = state.step % images.steps_per_epoch == 0
            if at_end or (epoch_done and epoch % settings.validation.every == 0):
                scores = validate(validator, samplers, settings.validation.episodes)
                is_best = scores.mean > state.best_accuracy
                if is_best:
                    state.best_epoch, state.best_accuracy = epoch, scores.mean
                    metadata = backbone_metadata(settings, dataset, epoch, scores)
                    save_backbone(run.backbone, backbone, metadata)
                log.write({"step": state.step, "epoch": epoch, "validation": scores.as_dict()})
                best = " (best so far)" if is_best else ""
                progress.message(f"epoch {epoch}: validation {scores}{best}")
            if state.step % settings.checkpoint_every == 0 or at_end or stop:
                save_tensors(run.resume, learning_tensors(network, optimizer), vars(state))
            if stop.signal_number is not None and not at_end:
                raise Interrupted(
                    stop.signal_number,
                    f"stopped and saved at step {state.step} of {num_steps} (epoch {epoch} of "
                    f"{settings.epochs}); go on with: vsm pretrain --output {run.path} --resume"
                    f"{placement.options}",
                )


@dataclass(frozen=True)
class TrainingImages:
    """Every image of the training classes ``[n]``, and the order in which each epoch visits them.

    ``image_ids`` are positions in ``dataset.images``, ``labels`` count the training classes.
    """

    image_ids: Tensor
    labels: Tensor
    num_classes: int
    settings: PretrainSettings

    @classmethod
    def of(cls, dataset: ImageDataset, settings: PretrainSettings) -> "TrainingImages":
        """List the images of ``dataset``, or say why they cannot be trained on."""
        classes = dataset.classes("train")
        image_ids = torch.from_numpy(dataset.split_ids("train"))
        sizes = torch.from_numpy(dataset.class_sizes[classes])
        if settings.batch_size > len(image_ids):
            raise SettingsError(
                f"batch_size: {settings.batch_size} images asked for, but the training classes of "
                f"{dataset.name} have {len(image_ids)}; lower batch_size"
            )
        labels = torch.arange(len(classes)).repeat_interleave(sizes)
        return cls(image_ids, labels, len(classes), settings)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches; an epoch leaves out the images that fill none, others each time."""
        return len(self.image_ids) // self.settings.batch_size

    def batches(self, steps_done: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield epoch (from 1), image ids ``[B]`` and labels ``[B]`` of every step still to do."""
        first, within = divmod(steps_done, self.steps_per_epoch)
        for epoch in range(first + 1, self.settings.epochs + 1):
            random = generator(self.settings.seed, "order", epoch)
            order = torch.randperm(len(self.image_ids), generator=random)
            for rows in order.split(self.settings.batch_size)[within : self.steps_per_epoch]:
                yield epoch, self.image_ids[rows], self.labels[rows]
            within = 0


def load_images(
    dataset: ImageDataset, image_ids: Tensor, settings: PretrainSettings, step: int
) -> Tensor:
    """Load, augment and normalize the images ``[B]`` of a step: ``[B, C, H, W]``."""
    pixels = dataset.load(image_ids)
    if settings.augment:
        random = generator(settings.seed, "augmentation", step)
        pixels = dataset.augment(pixels, random, settings.augment_colors, settings.augment_affine)
    return dataset.normalize(pixels)


def validation_samplers(settings: PretrainSettings, dataset: ImageDataset) -> list[EpisodeSampler]:
    """Return one sampler of validation episodes for each number of support images."""
    validation = settings.validation
    way = min(validation.way, len(dataset.classes("validation")))
    return [
        EpisodeSampler(dataset, "validation", way, shot, validation.queries)
        for shot in validation.shots
    ]


def validate(
    validator: FewShotModel, samplers: list[EpisodeSampler], episodes: int
) -> FewShotScores:
    """Measure the current backbone; every validation image is embedded once."""
    accuracies = _episode_accuracies(validator, samplers, episodes)
    found = {shot: estimate(accuracies[shot]) for shot in accuracies}
    return FewShotScores(samplers[0].way, samplers[0].queries, episodes, found)


def validated_answers(
    run: PretrainingDirectory, placement: Placement = ON_CPU
) -> dict[str, list[int]]:
    """Count the correct answers of the best backbone in every validation episode, by shot."""
    settings = run.settings()
    dataset = open_images(settings.data)
    validator = FewShotModel(validator_settings(settings), dataset.image_shape).place(placement)
    begin_with_backbone(validator, run.path)
    samplers = validation_samplers(settings, dataset)
    found = _episode_accuracies(validator, samplers, settings.validation.episodes)
    asked = samplers[0].way * samplers[0].queries
    return {str(shot): (asked * one).round().int().tolist() for shot, one in found.items()}


def _episode_accuracies(
    validator: FewShotModel, samplers: list[EpisodeSampler], episodes: int
) -> dict[int, Tensor]:
    """Return the accuracy in every episode ``[E]``, by number of support images."""
    validator.encoder.forget()  # its weights were trained
    found = [evaluate(validator, None, one, episodes, VALIDATION_SEED) for one in samplers]
    return {of.shot: one.episode_accuracies for of, one in zip(samplers, found, strict=True)}


def backbone_metadata(
    settings: PretrainSettings, dataset: ImageDataset, epoch: int, scores: FewShotScores
) -> dict[str, Any]:
    """Return the metadata of a backbone: how to build it, its origin and scores."""
    names = ("backbone", "channels", "keep_probability", "data")
    return {
        **{name: getattr(settings, name) for name in names},
        "input_shape": list(dataset.image_shape),
        "epoch": epoch,
        "validation": scores.as_dict(),
    }


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
    """Do one step on normalized ``images [B, C, H, W]`` with ``labels [B]``; return what to log."""
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
    falls until the last to the first divided by ``final_divisor``.
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

    It builds the backbone, so that a pre-trained one is what ``vsm train`` would build.
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
