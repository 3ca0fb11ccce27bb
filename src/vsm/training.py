"""Training, top to bottom: set-up → steps → validation → checkpoints.

One step: sampler → episode → features → consolidation of the previous step's observations →
recall → prototypes → probabilities → objective → optimizer; its own features then become the
pending observations of the next step. So the attention vector of Eq. 11 learns, and no task
recalls what its own queries wrote.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vsm.data import Dataset, EpisodeBatch, EpisodeSampler, open_dataset
from vsm.errors import ProcessLostError, RunError, SettingsError
from vsm.evaluation.cached_features import cached_features
from vsm.evaluation.evaluator import Evaluation, evaluate, evaluation_mode
from vsm.memory import Memory, Observations
from vsm.model import FewShotModel
from vsm.nn.batch_norm import synchronize_batch_norm, unsynchronized_buffers
from vsm.objective import objective
from vsm.runs.directory import Log
from vsm.runs.trained_model import (
    RunDirectory,
    TrainingState,
    apply_pending,
    begin_with_backbone,
    load_resume,
    save_best,
    save_resume,
)
from vsm.seeding import generator, task_generators
from vsm.settings import OptimizerSettings, RunSettings
from vsm.system.devices import Placement, choose_placement, send
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.interruption import Interrupted, stop_request

LOG_EVERY = 10
VALIDATION_SEED = 0
FUSED_ADAM_DEVICES = ("cpu", "cuda", "mps")


class Progress(Protocol):
    """What the loop tells whoever watches."""

    def step(self, step: int, loss: float) -> None:
        """A step is done."""

    def validated(self, step: int, evaluation: Evaluation, is_best: bool) -> None:
        """A validation is done."""


class Silence:
    """Nobody watches."""

    def step(self, step: int, loss: float) -> None:
        """Say nothing."""

    def validated(self, step: int, evaluation: Evaluation, is_best: bool) -> None:
        """Say nothing."""


def train(
    settings: RunSettings,
    output: Path,
    resume: bool = False,
    progress: Progress | None = None,
    processes: Processes = SINGLE_PROCESS,
    placement: Placement | None = None,
) -> RunDirectory:
    """Train a model and leave a run directory.

    Args:
        settings: all that defines the run; the same settings give the same run, bit for bit.
        output: the run directory.
        resume: go on from the last state in ``output``, if there is one.
        progress: told of every step and validation, by the first process.
        processes: all of them call this together, and the first alone writes ``output``.
        placement: where to compute; chosen if not given.

    Raises:
        Interrupted: after saving, when a process was asked to stop.
        ProcessLostError: when another process ended; the last saved state can be resumed.
    """
    progress = progress if progress and processes.is_first else Silence()
    tasks = processes.share(settings.tasks)
    dataset = open_dataset(settings.data)
    training_samplers(settings, dataset)  # says before anything else if there are too few classes
    model = FewShotModel(settings, dataset.input_shape).place(placement or choose_placement())
    if settings.freeze_backbone:
        model.require_backbone().requires_grad_(False)
    if settings.model.synchronize_batch_norm:
        synchronize_batch_norm(model, processes)
    optimizer = build_optimizer(model, settings.optimizer)
    run, state = _open_run(settings, output, resume, model, optimizer, processes)
    processes.broadcast(model.state_dict().values())
    if settings.freeze_backbone:
        dataset = cached_features(model, dataset, Path(settings.init or output))
    sampler, validation = training_samplers(settings, dataset)
    started = time.monotonic()
    with (
        run.metrics_log(state.step, processes.is_first) as log,
        stop_request() as stop,
        _report_lost_process(settings, state, output),
    ):
        while state.step < settings.steps:
            state.step += 1
            whole = sampler.draw(settings.tasks, generator(settings.seed, "episodes", state.step))
            batch = whole.part(tasks)
            inputs = load_inputs(dataset, batch, settings, state.step, tasks, model.device)
            measured = training_step(model, optimizer, inputs, batch.class_ids, state, processes)
            progress.step(state.step, measured["loss"])
            if not math.isfinite(measured["loss"]):
                raise RunError(
                    f"training diverged: the loss is {measured['loss']} at step {state.step}; "
                    "lower optimizer.learning_rate or set optimizer.clip_norm"
                )
            if state.step % LOG_EVERY == 0 or state.step == 1:
                log({"step": state.step, "seconds": time.monotonic() - started, **measured})
            if state.step % settings.validation.every == 0 or state.step == settings.steps:
                accuracy = processes.broadcast_value(
                    _validate(run, model, state, sampler, validation, log, progress)
                    if processes.is_first
                    else 0.0
                )
                if accuracy > state.best_accuracy:
                    state.best_step, state.best_accuracy = state.step, accuracy
            at_end = state.step == settings.steps
            stopped_by = processes.largest(stop.signal_number or 0)
            if state.step % settings.checkpoint_every == 0 or at_end or stopped_by:
                if processes.is_first:
                    save_resume(run, model, optimizer, state)
                processes.wait()  # nobody leaves before the state is saved
            if stopped_by and not at_end:
                raise Interrupted(
                    stopped_by,
                    f"stopped and saved at step {state.step} of {settings.steps}; "
                    f"go on with: vsm train --output {output} --resume{named_again(settings)}",
                )
    return run


def named_again(settings: RunSettings) -> str:
    """Return what a command about the run must add: the name of the user's own code, if any."""
    own = settings.model.own_backbone
    return "" if own is None else f" --backbone {own}"


@contextmanager
def _report_lost_process(
    settings: RunSettings, state: TrainingState, output: Path
) -> Iterator[None]:
    """Say at which step a process was lost, and how to go on."""
    try:
        yield
    except ProcessLostError as error:
        raise ProcessLostError(
            f"a process of this job was lost at step {state.step}; "
            f"go on with: vsm train --output {output} --resume{named_again(settings)}"
        ) from error


def _validate(
    run: RunDirectory,
    model: FewShotModel,
    state: TrainingState,
    training: EpisodeSampler,
    validation: EpisodeSampler,
    log: Log,
    progress: Progress,
) -> float:
    """Measure the model, keep it if it is the best so far, and return its accuracy."""
    memory = apply_pending(model, state)
    if memory is not None and model.settings.memory.refresh_steps:
        memory = refreshed_memory(model, training)
    num_episodes = model.settings.validation.episodes
    result = evaluate(model, memory, validation, num_episodes, VALIDATION_SEED)
    is_best = result.accuracy.mean > state.best_accuracy
    if is_best:
        save_best(run, model, memory, state.step, validation.dataset.class_names)
    log({"step": state.step, "validation": _summary(result, validation.way)})
    progress.validated(state.step, result, is_best)
    return result.accuracy.mean


def refreshed_memory(model: FewShotModel, sampler: EpisodeSampler) -> Memory | None:
    """Replay Eqs. 11-13 over training episodes as the model sees images at test, from nothing.

    While training, features come from moving weights, batch statistics, dropout and varied images,
    so what was stored of them differs from the features it is compared with at test. The stream of
    episodes is seeded and its length is ``memory.refresh_steps``.
    """
    settings, dataset = model.settings, sampler.dataset
    memory = model.empty_memory()
    with torch.no_grad(), evaluation_mode(model):
        for step in range(1, settings.memory.refresh_steps + 1):
            batch = sampler.draw(settings.tasks, generator(settings.seed, "refresh", step))
            pixels = send(dataset.load(batch.image_ids), model.device)
            features = model.embed(dataset.normalize(pixels).flatten(0, 2))
            classes = batch.class_ids.unsqueeze(-1).expand(batch.image_ids.shape).flatten()
            seen = Observations(features, classes.to(model.device))
            memory = model.consolidate(memory, seen, step)
    return memory


def training_samplers(
    settings: RunSettings, dataset: Dataset
) -> tuple[EpisodeSampler, EpisodeSampler]:
    """Return the samplers of training and validation episodes."""
    shape = (settings.way, settings.shot, settings.queries)
    validation_way = min(settings.way, len(dataset.classes("validation")))
    return (
        EpisodeSampler(dataset, "train", *shape),
        EpisodeSampler(dataset, "validation", validation_way, *shape[1:]),
    )


def load_inputs(
    dataset: Dataset,
    batch: EpisodeBatch,
    settings: RunSettings,
    step: int,
    tasks: range | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return a batch's inputs, normalized and perhaps augmented: ``[T, N, K + Q, …]``.

    Args:
        dataset: where they come from.
        batch: T episodes.
        settings: whether to augment, and the seed.
        step: the training step.
        tasks: the episodes' places in the whole batch; unset: they are all of it.
        device: where the images go, as bytes; unset: the CPU.
    """
    pixels = dataset.load(batch.image_ids)
    if device is not None:
        pixels = send(pixels, device)
    if settings.augment:
        tasks = range(len(pixels)) if tasks is None else tasks
        random = task_generators(settings.seed, "augmentation", step, tasks)
        pixels = dataset.augment(pixels, random, settings.augment_colors)
    return dataset.normalize(pixels)


def training_step(
    model: FewShotModel,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    class_ids: Tensor,
    state: TrainingState,
    processes: Processes = SINGLE_PROCESS,
) -> dict[str, float]:
    """Do step ``state.step``; change model, optimizer, and the memory in ``state``.

    Args:
        model: put into training mode.
        optimizer: over its parameters.
        inputs: this process's share of the batch, normalized images ``[T, N, K + Q, C, H, W]`` or
            features ``[T, N, K + Q, D]``.
        class_ids: ``[T, N]``.
        state: says which step this is; its memory takes in what the previous step saw.
        processes: who shares the batch.

    Returns:
        What is logged: the terms of the objective and signs of the memory's health.
    """
    settings = model.settings
    model.train()
    set_learning_rate(optimizer, settings.optimizer, state.step, settings.steps)
    tasks = processes.share(len(inputs) * processes.count)
    random = task_generators(settings.seed, "noise", state.step, tasks)
    class_ids = class_ids.to(inputs.device)

    features = model.embed(inputs.flatten(0, 2), random).unflatten(0, inputs.shape[:3])
    support, queries = features.split([settings.shot, settings.queries], 2)

    memory = model.consolidate(state.memory, state.pending, state.step - 1)  # in this step's graph
    if memory is not None and not settings.memory.delayed_gradient:
        memory = memory.detach()
    slot_mask = None if memory is None else memory.slot_mask(class_ids, settings.memory.mask)
    prediction = model(support, queries, memory, random, slot_mask)
    prior = model.prior(queries) if prediction.posterior is not None else None
    terms = objective(prediction, prior, settings.objective)

    optimizer.zero_grad(set_to_none=True)
    terms.total.backward()
    processes.average_gradients(model.parameters())
    gradient_norm = _clip(model, settings.optimizer.clip_norm)
    optimizer.step()

    processes.average(unsynchronized_buffers(model))

    means = {
        "loss": terms.total,
        "cross_entropy": terms.cross_entropy,
        "kl_z": terms.kl_z,
        "kl_m": terms.kl_m,
    }
    measured = {"gradient_norm": gradient_norm, "learning_rate": optimizer.param_groups[0]["lr"]}
    if model.recall is not None and prediction.recollection is not None:
        means |= model.recall.diagnostics(prediction.recollection)
    if prediction.strength is not None:
        means["memory_strength"] = prediction.strength.mean()
    if memory is not None and model.consolidation is not None:
        state.memory = memory.detach()
        if inputs.device.type != "cpu":  # where sums have no fixed order, memories drift apart
            processes.broadcast(state.memory.tensors().values())
        nodes = class_ids.unsqueeze(-1).expand(inputs.shape[:3]).flatten()
        state.pending = Observations(
            processes.gather(features.detach().flatten(0, 2)), processes.gather(nodes)
        )
        measured |= model.consolidation.diagnostics(memory)
    return _averages(means, processes) | measured


def _averages(means: dict[str, Tensor], processes: Processes) -> dict[str, float]:
    """Average over the processes what each has averaged over its tasks."""
    values = processes.total(torch.stack([value.detach() for value in means.values()]))
    return dict(zip(means, (values / processes.count).tolist(), strict=True))


def build_optimizer(model: FewShotModel, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return Adam over the parameters that learn, which must be on their device already."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learning:
        raise SettingsError(
            f"model.adapter: {model.settings.method} on fixed features has nothing to train; give "
            "it --model.adapter linear, or choose another --method"
        )
    return torch.optim.AdamW(
        learning,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=model.device.type in FUSED_ADAM_DEVICES,
    )


def set_learning_rate(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, step: int, num_steps: int
) -> None:
    """Set the learning rate of ``step``, counted from 1."""
    factor = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    if settings.schedule == "cosine":
        factor *= 0.5 * (1 + math.cos(math.pi * (step - 1) / num_steps))
    elif settings.schedule == "step":
        factor *= 0.5 ** ((step - 1) // settings.halve_every)
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * factor


def _clip(model: FewShotModel, largest: float | None) -> float:
    """Scale the gradient down to ``largest`` if it is longer; return its norm before that."""
    limit = math.inf if largest is None else largest
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()


def _open_run(
    settings: RunSettings,
    output: Path,
    resume: bool,
    model: FewShotModel,
    optimizer: torch.optim.Optimizer,
    processes: Processes,
) -> tuple[RunDirectory, TrainingState]:
    """Begin a run, or take up the one in ``output`` at its last state.

    What is there is for the first process to say, which may have begun to write it meanwhile.
    """
    run = RunDirectory(output)
    has_state = bool(processes.broadcast_value(run.has_state()))
    if settings.init is not None and not (resume and has_state):
        begin_with_backbone(model, Path(settings.init))
    if run.open(settings, resume, processes.broadcast_value, processes.is_first):
        return run, load_resume(run, model, optimizer)
    return run, TrainingState(step=0, memory=model.empty_memory(), pending=None)


def _summary(result: Evaluation, way: int) -> dict[str, float]:
    """Return what is logged of a validation; its way is lower where the split has fewer classes."""
    accuracy = result.accuracy
    return {"way": way, "accuracy": accuracy.mean, "ci95": accuracy.ci95, "nll": result.nll}
