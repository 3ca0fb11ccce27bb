"""Pre-training, top to bottom: all training classes → epochs of steps → few-shot validation.

One step: order of the epoch → images → augmentation → backbone → classifier → loss → optimizer.
The result is a backbone whose features separate unseen classes; ``vsm train`` begins with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from vsm.data import EpisodeSampler, ImageDataset, open_images
from vsm.errors import SettingsError
from vsm.evaluation.evaluator import evaluate
from vsm.evaluation.intervals import Estimate, estimate
from vsm.model import FewShotModel
from vsm.pretraining.supervised import (
    SupervisedNetwork,
    build_optimizer,
    load_teacher,
    one_cycle,
    pretraining_step,
    validator_settings,
)
from vsm.runs.checkpoints import begin_with_backbone, numbers_in, save_backbone
from vsm.runs.directory import PretrainingDirectory
from vsm.seeding import generator
from vsm.settings import PretrainSettings
from vsm.system.devices import ON_CPU, Placement, choose_placement, send
from vsm.system.interruption import Interrupted, stop_request
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import (
    learning_tensors,
    load_tensors,
    restore_learning,
    save_tensors,
)

VALIDATION_SEED = 0


@dataclass
class PretrainingState:
    """All that changes in pre-training, apart from the network and its optimizer.

    ``step`` counts over all epochs; ``best_epoch`` is 0 before the first validation.
    """

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
