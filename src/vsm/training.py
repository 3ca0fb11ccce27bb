"""Training, top to bottom: set-up → steps → validation → checkpoints → closing memory.

One step: sampler → episode → features → consolidation of the previous step's observations →
recall → prototypes → probabilities → objective → optimizer; its own features then become the
pending observations of the next step. So the attention vector of Eq. 11 learns, and no task
recalls what its own queries wrote.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vsm.data import Dataset, EpisodeBatch, EpisodeSampler, ImageDataset, open_dataset
from vsm.data.images import Preprocessing
from vsm.encoders import evaluation_mode
from vsm.encoders.encoder import encode_dataset
from vsm.errors import ProcessLostError, SettingsError
from vsm.evaluation.evaluator import evaluate
from vsm.evaluation.intervals import estimate
from vsm.learning import class_features, learn_memory, learn_statistics
from vsm.memory import Memory, Observations
from vsm.model import FewShotModel, objective
from vsm.nn.batch_norm import synchronize_batch_norm, unsynchronized_buffers
from vsm.runs.checkpoints import (
    TrainingState,
    apply_pending,
    begin_with_backbone,
    load_resume,
    save_resume,
)
from vsm.runs.directory import RunDirectory, StepLog
from vsm.runs.loading import load
from vsm.runs.trained_model import TrainedModel, made_in_memory, save_best
from vsm.seeding import generator, task_generators
from vsm.settings import GaussianSettings, OptimizerSettings, RunSettings
from vsm.system.devices import FUSED_DEVICES, Placement, choose_placement, send
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.files import atomic_directory
from vsm.system.interruption import Interrupted, stop_request
from vsm.system.progress import NULL_PROGRESS, Progress

VALIDATION_SEED = 0


def train(
    settings: RunSettings,
    output: Path,
    resume: bool = False,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
    placement: Placement | None = None,
    learn_memory: bool = True,
) -> TrainedModel:
    """Train a model, leave a run directory, and return the model in it.

    Args:
        settings: all that defines the run; the same settings give the same run, bit for bit.
        output: the run directory.
        resume: go on from the last state in ``output``, if there is one.
        progress: of every step and validation, in the first process.
        processes: all of them call this together, and only the first writes ``output``.
        placement: where to compute; chosen if not given.
        learn_memory: end by learning the Gaussian memory of the trained features, which is used
            if validation classes say that it is no worse (method vsm with conjugate inference).

    Raises:
        Interrupted: after saving, when a process was asked to stop.
        ProcessLostError: when another process ended; the last saved state can be resumed.
    """
    placement = placement or choose_placement()
    progress = progress if processes.is_first else NULL_PROGRESS
    run, own = RunDirectory(output), settings.model.own_backbone
    with run.locked(processes.is_first):
        dataset = _train(settings, run, resume, progress, processes, placement)
        trained = None
        if processes.is_first:
            trained = load(output, backbone=own, placement=placement, inference=settings.inference)
            calibration = trained.calibrate_rejection(dataset)
            calibration.write(run.calibration, trained.encoder.fingerprint)
            trained = replace(trained, calibration=calibration)
            if learn_memory and settings.method == "vsm" and settings.inference == "conjugate":
                trained = learn_closing_memory(run, trained, dataset, progress)
        processes.barrier()  # nobody leaves before everything is stored
    return trained or load(output, backbone=own, placement=placement)


def _train(
    settings: RunSettings,
    run: RunDirectory,
    resume: bool,
    progress: Progress,
    processes: Processes,
    placement: Placement,
) -> Dataset:
    """Do all steps; return the data, encoded already if the backbone is frozen."""
    if settings.inference == "gaussian" and settings.init is None:
        raise SettingsError(
            "model.inference: gaussian trains a backbone that is good already; name one with "
            "--init, or learn a memory of features as they are with vsm memory learn"
        )
    tasks = processes.share(settings.tasks)
    dataset = open_dataset(settings.data)
    samplers = training_samplers(settings, dataset)
    model = FewShotModel(settings, dataset.input_shape).place(placement)
    model.encoder.preprocessing = Preprocessing.of(dataset)
    if settings.freeze_backbone:
        model.require_backbone().requires_grad_(False)
    if settings.model.synchronize_batch_norm:
        synchronize_batch_norm(model, processes)
    optimizer = build_optimizer(model, settings.optimizer)
    # The first process decides whether to resume, since it may have begun to write already.
    has_state = bool(processes.broadcast_value(run.has_state()))
    if settings.init is not None and not (resume and has_state):
        begin_with_backbone(model, Path(settings.init))
    state = TrainingState(step=0, memory=model.empty_memory(), pending=None)
    if run.open(settings, resume, processes.broadcast_value, processes.is_first):
        state = load_resume(run, model, optimizer)
    processes.broadcast(model.state_dict().values())
    inputs_of = dataset
    if settings.freeze_backbone:
        assert isinstance(dataset, ImageDataset)
        inputs_of = encode_dataset(model.encoder, dataset, ("train", "validation"))
        samplers = training_samplers(settings, inputs_of)
    loop = _Loop(run, model, optimizer, state, dataset, inputs_of, samplers, progress, processes)
    try:
        loop.do_steps(tasks)
    except ProcessLostError as error:
        raise ProcessLostError(
            f"a process of this job was lost at step {state.step}; go on with: {loop.command}"
        ) from error
    return inputs_of


@dataclass
class _Loop:
    """The steps of a run. Inputs come from ``inputs_of``: the dataset, or features of it."""

    run: RunDirectory
    model: FewShotModel
    optimizer: torch.optim.Optimizer
    state: TrainingState
    dataset: Dataset
    inputs_of: Dataset
    samplers: tuple[EpisodeSampler, EpisodeSampler]
    progress: Progress
    processes: Processes

    @property
    def command(self) -> str:
        """The command that goes on with the run."""
        options = f"{backbone_option(self.model.settings)}{self.model.encoder.placement.options}"
        return f"vsm train --output {self.run.path} --resume{options}"

    def do_steps(self, tasks: range) -> None:
        """Do the steps that are left, of which this process computes ``tasks``."""
        model, state, settings = self.model, self.state, self.model.settings
        self.progress.start(settings.method, settings.steps)
        self.progress.advance(state.step)
        is_gaussian, every = settings.inference == "gaussian", settings.gaussian.refresh_every
        with self.run.step_log(state.step, self.processes.is_first) as log, stop_request() as stop:
            while state.step < settings.steps:
                if is_gaussian and state.step % every == 0:
                    state.memory = class_statistics(model, self.dataset)
                state.step += 1
                random = generator(settings.seed, "episodes", state.step)
                batch = self.samplers[0].draw(settings.tasks, random).part(tasks)
                inputs = load_inputs(
                    self.inputs_of, batch, settings, state.step, tasks, model.device
                )
                measured = training_step(
                    model, self.optimizer, inputs, batch.class_ids, state, self.processes
                )
                self.progress.advance(1, f"loss {measured['loss']:.3f}")
                log.step({"step": state.step}, measured, "or set optimizer.clip_norm")
                if state.step % settings.validation.every == 0 or state.step == settings.steps:
                    self._validate(log)
                self._save_or_stop(stop.signal_number)

    def _validate(self, log: StepLog) -> None:
        """Measure the model in the first process; keep it if it is the best so far."""
        model, state, settings, accuracy = self.model, self.state, self.model.settings, 0.0
        if self.processes.is_first:
            training, validation = self.samplers
            memory = apply_pending(model, state)
            if settings.inference == "gaussian":
                memory = class_statistics(model, self.dataset)
            elif memory is not None and settings.memory.refresh_steps:
                memory = refreshed_memory(model, training)
            episodes = settings.validation.episodes
            result = evaluate(model, memory, validation, episodes, VALIDATION_SEED)
            accuracy = result.accuracy.mean
            is_best = accuracy > state.best_accuracy
            if is_best:
                save_best(self.run, model, memory, state.step, self.dataset)
            scores = {"accuracy": accuracy, "ci95": result.accuracy.ci95, "nll": result.nll}
            log.write({"step": state.step, "validation": {"way": validation.way, **scores}})
            best = " (best so far)" if is_best else ""
            self.progress.message(f"step {state.step}: validation {result.accuracy}{best}")
        accuracy = self.processes.broadcast_value(accuracy)
        if accuracy > state.best_accuracy:
            state.best_step, state.best_accuracy = state.step, accuracy

    def _save_or_stop(self, signal_number: int | None) -> None:
        """Save the state when it is time to, and stop if any process was asked to."""
        step, settings = self.state.step, self.model.settings
        at_end = step == settings.steps
        stopped_by = self.processes.all_reduce_max(signal_number or 0)
        if step % settings.checkpoint_every == 0 or at_end or stopped_by:
            if self.processes.is_first:
                names = self.dataset.class_names
                save_resume(self.run, self.model, self.optimizer, self.state, names)
            self.processes.barrier()  # nobody leaves before the state is saved
        if stopped_by and not at_end:
            raise Interrupted(
                stopped_by,
                f"stopped and saved at step {step} of {settings.steps}; go on with: {self.command}",
            )


def learn_closing_memory(
    run: RunDirectory, trained: TrainedModel, dataset: Dataset, progress: Progress = NULL_PROGRESS
) -> TrainedModel:
    """Learn the Gaussian memory of a run's features; use it if validation says it is no worse.

    It is written to ``run.gaussian``, which :func:`vsm.load` then prefers, and logged.
    """
    settings = trained.settings
    _, validation = training_samplers(settings, dataset)
    images = sum(len(dataset.split_ids(split)) for split in ("train", "validation"))
    progress.start("learn memory", images)
    encoder, data, seed = trained.encoder, settings.data, settings.seed
    found = learn_memory(
        encoder, dataset, GaussianSettings(), data=data, seed=seed, progress=progress
    )
    learned = made_in_memory(*found)
    shape = {name: getattr(settings, name) for name in ("way", "shot", "queries")}
    learned.model.settings = replace(learned.settings, init=str(run.path), **shape)
    before, after = (
        evaluate(one.model, one.state, validation, settings.validation.episodes, VALIDATION_SEED)
        for one in (trained, learned)
    )
    difference = estimate(after.episode_accuracies - before.episode_accuracies)
    is_used = difference.mean >= 0
    scores = {"accuracy": asdict(after.accuracy), "difference": asdict(difference)}
    with run.step_log(settings.steps) as log:
        log.write({"step": settings.steps, "gaussian": {"used": is_used, **scores}})
    run.remove_gaussian()
    if not is_used:
        return trained
    with atomic_directory(run.gaussian) as folder:
        learned.write(folder)
    return replace(learned, name=trained.name, path=run.path)


def backbone_option(settings: RunSettings) -> str:
    """Return what a command about the run must add: the name of the user's own code, if any."""
    own = settings.model.own_backbone
    return "" if own is None else f" --backbone {own}"


def class_statistics(model: FewShotModel, dataset: Dataset) -> Memory:
    """Learn the Gaussian memory of the training classes, to be read as validation classes say."""
    known = class_features(model.encoder, dataset, "train")
    validation = class_features(model.encoder, dataset, "validation")
    class_ids = torch.from_numpy(dataset.classes("train"))
    return learn_statistics(model, known, class_ids, validation).memory


def refreshed_memory(model: FewShotModel, sampler: EpisodeSampler) -> Memory | None:
    """Replay Eqs. 11-13 over ``memory.refresh_steps`` training episodes, from an empty memory.

    While training, features come from moving weights, batch statistics, dropout and varied images,
    so what was stored of them differs from the features it is compared with at test.
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

    ``tasks`` are the places of the T episodes in the full batch; unset: they are all of it.
    """
    pixels = dataset.load(batch.image_ids)
    if device is not None:
        pixels = send(pixels, device)
    if settings.augment:
        tasks = range(len(pixels)) if tasks is None else tasks
        random = task_generators(settings.seed, "augmentation", step, tasks)
        pixels = dataset.augment(pixels, random, settings.augment_colors, settings.augment_affine)
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

    This process's share of the batch is ``inputs``, normalized images ``[T, N, K + Q, C, H, W]`` or
    features ``[T, N, K + Q, D]``, with ``class_ids [T, N]``. Returned are the terms of the
    objective and diagnostics of the memory.
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
    prior = None if prediction.posterior.mixture is None else model.prior(queries)
    terms = objective(prediction, prior, settings.objective)

    optimizer.zero_grad(set_to_none=True)
    terms.total.backward()
    processes.average_gradients(model.parameters())
    limit = settings.optimizer.clip_norm or math.inf
    gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
    optimizer.step()
    model.encoder.forget()

    processes.average(unsynchronized_buffers(model))
    if memory is not None and settings.inference != "gaussian":
        _observe(memory.detach(), features.detach(), class_ids, state, processes)

    means = {"loss": terms.total, **dict(zip(terms._fields[1:], terms[1:], strict=True))}
    posterior = prediction.posterior
    if model.recall is not None and posterior.recollection is not None:
        means |= model.recall.diagnostics(posterior.recollection)
    if posterior.strength is not None:
        means["memory_strength"] = posterior.strength.mean()
    values = processes.all_reduce(torch.stack([value.detach() for value in means.values()]))
    measured = dict(zip(means, (values / processes.count).tolist(), strict=True))
    measured |= {"gradient_norm": gradient_norm, "learning_rate": optimizer.param_groups[0]["lr"]}
    if memory is not None and model.consolidation is not None:
        measured |= model.consolidation.diagnostics(memory)
    return measured


def _observe(
    memory: Memory,
    features: Tensor,
    class_ids: Tensor,
    state: TrainingState,
    processes: Processes,
) -> None:
    """Keep the memory, and features as observations for the next step to consolidate."""
    state.memory = memory
    if features.device.type != "cpu":  # where sums have no fixed order, memories drift apart
        processes.broadcast(memory.tensors().values())
    nodes = class_ids.unsqueeze(-1).expand(features.shape[:3]).flatten()
    state.pending = Observations(
        processes.all_gather(features.flatten(0, 2)), processes.all_gather(nodes)
    )


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
        fused=model.device.type in FUSED_DEVICES,
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
