"""Training, top to bottom: set-up → steps → validation → checkpoints → closing memory.

One step: sampler → episode → features → consolidation of the previous step's observations →
recall → prototypes → probabilities → objective → optimizer; its own features then become the
pending observations of the next step. So the attention vector of Eq. 11 learns, and no task
recalls what its own queries wrote.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from vsm.data import Dataset, EpisodeBatch, EpisodeSampler, ImageDataset, open_dataset
from vsm.data.preprocessing import Preprocessing
from vsm.encoders import evaluation_mode
from vsm.encoders.embedding import encode_dataset
from vsm.errors import ProcessLostError, SettingsError
from vsm.evaluation.evaluator import evaluate
from vsm.evaluation.intervals import estimate
from vsm.learning import class_features, learn_memory, learn_statistics
from vsm.memory import Memory, Observations
from vsm.model import FewShotModel, Prediction
from vsm.nn.batch_norm import synchronize_batch_norm, unsynchronized_buffers
from vsm.objective import objective
from vsm.runs.checkpoints import (
    TrainingState,
    apply_pending,
    begin_with_backbone,
    load_resume,
    save_resume,
)
from vsm.runs.directory import RunDirectory, StepLog
from vsm.runs.loading import load
from vsm.runs.trained_model import TrainedModel, made_in_memory, model_metadata, save_best
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
    run = RunDirectory(output)
    with run.locked(processes.is_first):
        dataset = _train(settings, run, resume, progress, processes, placement)
        trained = None
        if processes.is_first:
            own = settings.model.own_backbone
            trained = load(output, backbone=own, placement=placement, inference=settings.inference)
            calibration = trained.calibrate_rejection(dataset)
            calibration.write(run.calibration, trained.encoder.fingerprint)
            trained = replace(trained, calibration=calibration)
            if learn_memory and settings.method == "vsm" and settings.inference == "conjugate":
                trained = learn_closing_memory(run, trained, dataset, progress)
        processes.barrier()  # nobody leaves before everything is stored
    if trained is None:
        trained = load(output, backbone=settings.model.own_backbone, placement=placement)
    return trained


def _train(
    settings: RunSettings,
    run: RunDirectory,
    resume: bool,
    progress: Progress,
    processes: Processes,
    placement: Placement,
) -> Dataset:
    """Do all steps; return the data, encoded already if the backbone is frozen."""
    _require_trainable(settings)
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
    state = _open_run(settings, run, resume, model, optimizer, processes)
    processes.broadcast(model.state_dict().values())
    inputs_of = dataset
    if settings.freeze_backbone:
        assert isinstance(dataset, ImageDataset)
        inputs_of = encode_dataset(model.encoder, dataset, ("train", "validation"))
        samplers = training_samplers(settings, inputs_of)
    progress.start(settings.method, settings.steps)
    progress.advance(state.step)
    with (
        run.step_log(state.step, processes.is_first) as log,
        stop_request() as stop,
        _report_lost_process(model, state, run.path),
    ):
        while state.step < settings.steps:
            if (
                settings.inference == "gaussian"
                and state.step % settings.gaussian.refresh_every == 0
            ):
                state.memory = class_statistics(model, dataset)
            state.step += 1
            random = generator(settings.seed, "episodes", state.step)
            batch = samplers[0].draw(settings.tasks, random).part(tasks)
            inputs = load_inputs(inputs_of, batch, settings, state.step, tasks, model.device)
            measured = training_step(model, optimizer, inputs, batch.class_ids, state, processes)
            progress.advance(1, f"loss {measured['loss']:.3f}")
            log.step({"step": state.step}, measured, "or set optimizer.clip_norm")
            if state.step % settings.validation.every == 0 or state.step == settings.steps:
                _validate(run, model, state, samplers, dataset, log, progress, processes)
            _save_or_stop(run, model, optimizer, state, dataset, stop.signal_number, processes)
    return inputs_of


def _require_trainable(settings: RunSettings) -> None:
    if settings.inference == "gaussian" and settings.init is None:
        raise SettingsError(
            "model.inference: gaussian trains a backbone that is good already; name one with "
            "--init, or learn a memory of features as they are with vsm memory learn"
        )


def _save_or_stop(
    run: RunDirectory,
    model: FewShotModel,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    dataset: Dataset,
    signal_number: int | None,
    processes: Processes,
) -> None:
    """Save the state when it is time to, and stop if any process was asked to."""
    settings = model.settings
    at_end = state.step == settings.steps
    stopped_by = processes.all_reduce_max(signal_number or 0)
    if state.step % settings.checkpoint_every == 0 or at_end or stopped_by:
        if processes.is_first:
            remembered = [] if state.memory is None else state.memory.slot_classes
            seen = [] if state.pending is None else state.pending.class_ids.unique().tolist()
            metadata = model_metadata(dataset, sorted({*remembered, *seen}))
            save_resume(run, model, optimizer, state, metadata)
        processes.barrier()  # nobody leaves before the state is saved
    if stopped_by and not at_end:
        raise Interrupted(
            stopped_by,
            f"stopped and saved at step {state.step} of {settings.steps}; go on with: "
            f"{_resuming(model, run.path)}",
        )


def learn_closing_memory(
    run: RunDirectory, trained: TrainedModel, dataset: Dataset, progress: Progress = NULL_PROGRESS
) -> TrainedModel:
    """Learn the Gaussian memory of a run's features; use it if validation says it is no worse.

    It is written as a run directory inside that of the run, which :func:`vsm.load` then prefers.
    The comparison is logged with the measurements of the run, as ``gaussian``.
    """
    settings = trained.settings
    _, validation = training_samplers(settings, dataset)
    images = sum(len(dataset.split_ids(split)) for split in ("train", "validation"))
    progress.start("learn memory", images)
    learned = made_in_memory(
        *learn_memory(
            trained.encoder,
            dataset,
            GaussianSettings(),
            data=settings.data,
            seed=settings.seed,
            progress=progress,
        )
    )
    shape = {name: getattr(settings, name) for name in ("way", "shot", "queries")}
    learned.model.settings = replace(learned.settings, init=str(run.path), **shape)
    before, after = (
        evaluate(one.model, one.state, validation, settings.validation.episodes, VALIDATION_SEED)
        for one in (trained, learned)
    )
    difference = estimate(after.episode_accuracies - before.episode_accuracies)
    is_used = difference.mean >= 0
    found = {
        "used": is_used,
        "accuracy": asdict(after.accuracy),
        "difference": asdict(difference),
    }
    with run.step_log(settings.steps) as log:
        log.write({"step": settings.steps, "gaussian": found})
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


def _resuming(model: FewShotModel, output: Path) -> str:
    """Return the command that goes on with a run."""
    options = f"{backbone_option(model.settings)}{model.encoder.placement.options}"
    return f"vsm train --output {output} --resume{options}"


@contextmanager
def _report_lost_process(model: FewShotModel, state: TrainingState, output: Path) -> Iterator[None]:
    """Say at which step a process was lost, and how to go on."""
    try:
        yield
    except ProcessLostError as error:
        raise ProcessLostError(
            f"a process of this job was lost at step {state.step}; "
            f"go on with: {_resuming(model, output)}"
        ) from error


def _validate(
    run: RunDirectory,
    model: FewShotModel,
    state: TrainingState,
    samplers: tuple[EpisodeSampler, EpisodeSampler],
    dataset: Dataset,
    log: StepLog,
    progress: Progress,
    processes: Processes,
) -> None:
    """Measure the model in the first process; keep it if it is the best so far."""
    accuracy = 0.0
    if processes.is_first:
        training, validation = samplers
        memory = apply_pending(model, state)
        if model.settings.inference == "gaussian":
            memory = class_statistics(model, dataset)
        elif memory is not None and model.settings.memory.refresh_steps:
            memory = refreshed_memory(model, training)
        episodes = model.settings.validation.episodes
        result = evaluate(model, memory, validation, episodes, VALIDATION_SEED)
        accuracy = result.accuracy.mean
        is_best = accuracy > state.best_accuracy
        if is_best:
            save_best(run, model, memory, state.step, dataset)
        scores = {"accuracy": accuracy, "ci95": result.accuracy.ci95, "nll": result.nll}
        log.write({"step": state.step, "validation": {"way": validation.way, **scores}})
        best = " (best so far)" if is_best else ""
        progress.message(f"step {state.step}: validation {result.accuracy}{best}")
    accuracy = processes.broadcast_value(accuracy)
    if accuracy > state.best_accuracy:
        state.best_step, state.best_accuracy = state.step, accuracy


def class_statistics(model: FewShotModel, dataset: Dataset) -> Memory:
    """Learn the Gaussian memory of the training classes, as images are seen at test.

    What the settings leave open is chosen on validation classes.
    """
    known = class_features(model.encoder, dataset, "train")
    validation = class_features(model.encoder, dataset, "validation")
    class_ids = torch.from_numpy(dataset.classes("train"))
    return learn_statistics(model, known, class_ids, validation).memory


def refreshed_memory(model: FewShotModel, sampler: EpisodeSampler) -> Memory | None:
    """Replay Eqs. 11-13 over training episodes as images are seen at test, from an empty memory.

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
        tasks: the episodes' places in the full batch; unset: they are all of it.
        device: where the images go, as bytes; unset: the CPU.
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

    Args:
        model: put into training mode.
        optimizer: over its parameters.
        inputs: this process's share of the batch, normalized images ``[T, N, K + Q, C, H, W]`` or
            features ``[T, N, K + Q, D]``.
        class_ids: ``[T, N]``.
        state: says which step this is; its memory takes in what the previous step saw.
        processes: who shares the batch.

    Returns:
        What is logged: the terms of the objective and diagnostics of the memory.
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
    measured = _averages(means | _diagnostics(model, prediction), processes)
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
    """Keep the memory, and this step's features as observations for the next step to consolidate.

    Features ``[T, N, K + Q, D]`` and class ids ``[T, N]`` are this process's share of the batch.
    """
    state.memory = memory
    if features.device.type != "cpu":  # where sums have no fixed order, memories drift apart
        processes.broadcast(memory.tensors().values())
    nodes = class_ids.unsqueeze(-1).expand(features.shape[:3]).flatten()
    state.pending = Observations(
        processes.all_gather(features.flatten(0, 2)), processes.all_gather(nodes)
    )


def _diagnostics(model: FewShotModel, prediction: Prediction) -> dict[str, Tensor]:
    """Return what is logged of recall, as means over this process's tasks."""
    means: dict[str, Tensor] = {}
    posterior = prediction.posterior
    if model.recall is not None and posterior.recollection is not None:
        means |= model.recall.diagnostics(posterior.recollection)
    if posterior.strength is not None:
        means["memory_strength"] = posterior.strength.mean()
    return means


def _averages(means: dict[str, Tensor], processes: Processes) -> dict[str, float]:
    """Average over the processes what each has averaged over its tasks."""
    values = processes.all_reduce(torch.stack([value.detach() for value in means.values()]))
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


def _open_run(
    settings: RunSettings,
    run: RunDirectory,
    resume: bool,
    model: FewShotModel,
    optimizer: torch.optim.Optimizer,
    processes: Processes,
) -> TrainingState:
    """Begin a run, or take up the one that is there at its last state.

    The first process decides which, since it may have begun to write already.
    """
    has_state = bool(processes.broadcast_value(run.has_state()))
    if settings.init is not None and not (resume and has_state):
        begin_with_backbone(model, Path(settings.init))
    if run.open(settings, resume, processes.broadcast_value, processes.is_first):
        return load_resume(run, model, optimizer)
    return TrainingState(step=0, memory=model.empty_memory(), pending=None)
