"""Running one job in this process: under its lock, from wherever it was left."""

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from vsm.data import Dataset
from vsm.encoders import Encoder
from vsm.encoders.encoder import open_data
from vsm.errors import EpisodeError, RunError
from vsm.evaluation.evaluator import EpisodeProtocol, Evaluation
from vsm.learning import learn_memory
from vsm.pretraining import pretrain, validated_answers
from vsm.runs.directory import Directory, RunDirectory
from vsm.runs.loading import load, open_encoder
from vsm.runs.trained_model import ModelOnData, made_in_memory
from vsm.settings import BaselineSettings, GaussianSettings
from vsm.system.devices import Placement, choose_placement
from vsm.system.interruption import Interrupted, stop_request
from vsm.training import train
from vsm_lab.benchmarking.suite import Group
from vsm_lab.job_files import JobStore
from vsm_lab.jobs import VIEWS, Job, pretrain_settings, run_settings
from vsm_lab.measures import changed_answers, measure_separation, nearness_to_slots, with_slots
from vsm_lab.study.transductive import measure_harm, measure_methods
from vsm_lab.study.uncertainty import measure_uncertainty

Outcome = dict[str, Any]


def execute(root: Path, job: Job) -> None:
    """Run ``job`` and record its result, or why it failed.

    Raises:
        RunError: if it failed, or if another process is working on it.
        Interrupted: after saving, when the process was asked to stop.
    """
    store = JobStore(root)
    with store.lock(job):
        if store.is_done(job):
            return
        resumed = store.run_folder(job).is_dir()
        store.begin(job)
        started = time.monotonic()
        try:
            outcome = KINDS[job.kind](store, job)
        except Interrupted:
            raise
        except Exception as error:  # whatever it is: recorded, and other jobs continue
            store.write_failure(job, error)
            raise RunError(str(error)) from error
        store.write_result(job, outcome, None if resumed else time.monotonic() - started)


def _pretrain(store: JobStore, job: Job) -> Outcome:
    teacher = next(iter(_paths_before(store, job)), None)
    settings, placement = pretrain_settings(job, teacher), _placement(job)
    finished = pretrain(settings, store.run_folder(job), resume=True, placement=placement)
    answers = validated_answers(finished, placement)
    return {**_best(finished, "epoch", "mean_accuracy"), "answers": answers}


def _paths_before(store: JobStore, job: Job) -> list[str]:
    return [str(store.run_folder(before).resolve()) for before in job.after]


def _train(store: JobStore, job: Job) -> Outcome:
    settings, placement = run_settings(job, *_paths_before(store, job)), _placement(job)
    folder = store.run_folder(job)
    train(settings, folder, resume=True, placement=placement, learn_memory=False)
    return _best(RunDirectory(folder), "step", "accuracy")


def _learn(store: JobStore, job: Job) -> Outcome:
    settings = job.recipe["settings"]
    source = str(store.run_folder(job.after[0])) if job.after else job.recipe.get("encoder")
    views = tuple((name, job.recipe[name]) for name in VIEWS if name in job.recipe)
    key = job.after[0].key if job.after else ""
    encoder, dataset = _opened(source, key, settings["data"], views, _placement(job))
    gaussian, seed = GaussianSettings(**settings["gaussian"]), settings["seed"]
    learned = learn_memory(encoder, dataset, gaussian, data=settings["data"], seed=seed)
    made_in_memory(*learned).write(store.run_folder(job))
    described = learned.memory.describe(neighbors=0)
    return {"reading": described["reading"], "choice": described["choice"]}


@lru_cache(maxsize=2)  # an encoder and its features serve one memory after another
def _opened(
    source: str | None,
    _key: str,
    data: str,
    views: tuple[tuple[str, Any], ...],
    placement: Placement,
) -> tuple[Encoder, Dataset]:
    encoder = open_encoder(source, data, placement=placement, **dict(views))
    return encoder, open_data(encoder, data)


def _best(finished: Directory, unit: str, score: str) -> Outcome:
    """Return the best validation of a training, and at which step or epoch it was."""
    validations = [row for row in finished.read_metrics() if "validation" in row]
    best = max(validations, key=lambda row: row["validation"][score])
    return {f"best_{unit}": best[unit], "validation": best["validation"]}


def _evaluate(store: JobStore, job: Job) -> Outcome:
    """Return correct answers by episode, calibration, and what else the recipe asks for."""
    recipe, protocol, model = job.recipe, protocol_of(job), _load(store, job)
    if "slots" in recipe:
        if not _num_slots(model):
            return {"memory_slots": 0}
        size, subset = recipe["slots"]
        model = with_slots(model, size, subset, protocol.seed)
    evaluation = _measured(model, protocol, job)
    found = {
        "correct": evaluation.correct.sum(1).tolist(),
        "queries": evaluation.correct.shape[1],
        "memory_slots": _num_slots(model),
        "accuracy": evaluation.accuracy.mean,
        "ci95": evaluation.accuracy.ci95,
        **_calibration(evaluation),
    }
    if recipe.get("confusions"):
        found["confusions"] = evaluation.confusions.tolist()
    if "temperature" in recipe:
        validation = EpisodeProtocol(**recipe["temperature"])
        try:
            validation.sampler(model.dataset)
        except EpisodeError:  # too few validation classes for a temperature
            return found
        temperature = _measured(model, validation, job).best_temperature()
        after = _calibration(evaluation.scale_by_temperature(temperature), "calibrated_")
        found |= {"temperature": temperature, **after}
    return found


def _measured(model: ModelOnData, protocol: EpisodeProtocol, job: Job) -> Evaluation:
    """Measure the model, or a baseline on its features."""
    baseline = job.recipe.get("baseline")
    if baseline is None:
        return model.measure(protocol).evaluation
    settings = BaselineSettings(**baseline["settings"])
    return model.measure_baseline(baseline["name"], protocol, settings).evaluation


def _calibration(evaluation: Evaluation, prefix: str = "") -> Outcome:
    error = evaluation.reliability.expected_calibration_error
    return {f"{prefix}nll": evaluation.nll, f"{prefix}ece": error}


def _prototypes(store: JobStore, job: Job) -> Outcome:
    found = measure_separation(_load(store, job), protocol_of(job))
    return {name: values.tolist() for name, values in found._asdict().items()}


def _nearness(store: JobStore, job: Job) -> Outcome:
    near = nearness_to_slots(_load(store, job), protocol_of(job).split)
    return {str(class_id): cosine for class_id, cosine in near.items()}


def _changes(store: JobStore, job: Job) -> Outcome:
    """Return how many answers memory changed; empty for a model without slots."""
    with_memory, without = (_load(store, job, position) for position in range(2))
    if not _num_slots(with_memory):
        return {}
    return changed_answers(with_memory, without, protocol_of(job))


def _uncertainty(store: JobStore, job: Job) -> Outcome:
    return measure_uncertainty(_load(store, job), protocol_of(job), job.recipe["way"])


def _harm(store: JobStore, job: Job) -> Outcome:
    return measure_harm(_load(store, job), protocol_of(job))


def _methods(store: JobStore, job: Job) -> Outcome:
    return measure_methods(_load(store, job), protocol_of(job), job.recipe["baselines"])


def _speed(store: JobStore, job: Job) -> Outcome:
    with store.timing_lock(), stop_request() as stop:
        return {"seconds": Group(**job.recipe["group"]).measure(stop=stop)}


def _num_slots(model: ModelOnData) -> int:
    return 0 if model.trained.state is None else len(model.trained.state)


def protocol_of(job: Job) -> EpisodeProtocol:
    """Return the episodes of a measurement."""
    return EpisodeProtocol(**job.recipe["protocol"])


def _load(store: JobStore, job: Job, position: int = 0) -> ModelOnData:
    """Return one of the models that a measurement is of, with its data."""
    model = job.after[position]
    folder, backbone = store.run_folder(model), model.options.get("backbone")
    return _loaded(folder, model.key, protocol_of(job).data, backbone, _placement(model))


@lru_cache(maxsize=2)  # a model and its features serve one measurement after another
def _loaded(
    folder: Path, _key: str, data: str, backbone: str | None, placement: Placement
) -> ModelOnData:
    trained = load(folder, backbone=backbone, placement=placement)
    return ModelOnData(trained, open_data(trained.encoder, data))


def _placement(job: Job) -> Placement:
    """Return where to compute, as the options of a trained model say."""
    return choose_placement(job.options.get("device", "auto"), job.options.get("precision", "auto"))


KINDS: dict[str, Callable[[JobStore, Job], Outcome]] = {
    "pretrain": _pretrain,
    "train": _train,
    "learn": _learn,
    "evaluate": _evaluate,
    "prototypes": _prototypes,
    "nearness": _nearness,
    "changes": _changes,
    "uncertainty": _uncertainty,
    "harm": _harm,
    "methods": _methods,
    "speed": _speed,
}
