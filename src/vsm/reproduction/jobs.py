"""Jobs: the pieces of work of a reproduction, each named by the hash of all that defines it.

Three kinds, each needing the one before it: ``pretrain`` (a backbone), ``train`` (a run),
``evaluate`` (its measurement). Two tables that need the same run share it, because its name is the
same. What does not change a result is no part of the name: where it is stored, how often it is
saved, which table asked for it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_type_hints

from vsm.reproduction.catalog import Measure
from vsm.runs.configuration import AnySettings
from vsm.settings import PretrainSettings, RunSettings

RESULTS_VERSION = 1
"""Part of every name. Raise it with any change to what training or evaluation computes."""

KEY_LENGTH = 16
IRRELEVANT = ("checkpoint_every", "init")  # init is a path; the pre-training's own name counts
BEFORE = "pre-trained"  # stands for the folder of a pre-training until it is known
EVALUATION_SEED = 0

Kind = Literal["pretrain", "train", "evaluate"]


@dataclass(frozen=True)
class Job:
    """A piece of work.

    Attributes:
        kind: what is done.
        title: what people call it.
        recipe: all that defines the result, as JSON values.
        after: the job whose result it needs.
        checkpoint_every: steps between saves of a run; no part of the name.
    """

    kind: Kind
    title: str
    recipe: Mapping[str, Any]
    after: "Job | None" = None
    checkpoint_every: int = 100

    @cached_property
    def key(self) -> str:
        """The name: a hash of kind, recipe, what it needs, and the version of results."""
        defining = {
            "version": RESULTS_VERSION,
            "kind": self.kind,
            "recipe": self.recipe,
            "after": self.after.key if self.after else None,
        }
        text = json.dumps(defining, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]

    def as_dict(self) -> dict[str, Any]:
        """Return what ``job.json`` holds; the whole chain, so that a process can work from it."""
        return {
            "key": self.key,
            "kind": self.kind,
            "title": self.title,
            "recipe": dict(self.recipe),
            "checkpoint_every": self.checkpoint_every,
            "after": self.after.as_dict() if self.after else None,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Job":
        """Return the job that :meth:`as_dict` described."""
        after = values["after"]
        return Job(
            values["kind"],
            values["title"],
            values["recipe"],
            Job.from_dict(after) if after else None,
            values["checkpoint_every"],
        )


def pretrain_job(settings: PretrainSettings, data_checksum: str) -> Job:
    """Return the pre-training of a backbone by ``settings`` on data with ``data_checksum``."""
    recipe = {"settings": _relevant(asdict(settings)), "data": data_checksum}
    title = f"pre-train {settings.backbone} on {settings.data}, {settings.epochs} epochs"
    return Job("pretrain", title, recipe, checkpoint_every=settings.checkpoint_every)


def train_job(settings: RunSettings, data_checksum: str, after: Job | None = None) -> Job:
    """Return the training run of ``settings`` on data with ``data_checksum``."""
    recipe = {"settings": _relevant(asdict(settings)), "data": data_checksum}
    title = f"train {_describe(settings)}"
    return Job("train", title, recipe, after, settings.checkpoint_every)


def evaluate_job(
    training: Job,
    settings: RunSettings,
    *,
    episodes: int,
    queries: int,
    slots: int | None,
    measure: Measure,
) -> Job:
    """Return a measurement of a training run on test episodes of its own way and shot.

    All jobs with equal episodes see the same list of them, so that differences are paired.
    """
    protocol = {
        "data": settings.data,
        "split": "test",
        "way": settings.way,
        "shot": settings.shot,
        "queries": queries,
        "episodes": episodes,
        "seed": EVALUATION_SEED,
        "memory_slots": slots,
    }
    cut = "" if slots is None else f", {slots} slots"
    what = "measure" if measure == "accuracy" else "look at the prototypes of"
    title = f"{what} {_describe(settings)}{cut}"
    return Job("evaluate", title, {"measure": measure, "protocol": protocol}, training)


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs and all they need, each once, every job after the one it needs."""
    ordered: dict[str, Job] = {}

    def add(job: Job) -> None:
        if job.key in ordered:
            return
        if job.after is not None:
            add(job.after)
        ordered[job.key] = job

    for job in jobs:
        add(job)
    return list(ordered.values())


def run_settings(job: Job, init: str = BEFORE) -> RunSettings:
    """Return the settings of a ``train`` job, whose pre-training, if any, is in folder ``init``."""
    return _settings(RunSettings, job, {"init": init if job.after else None})


def pretrain_settings(job: Job) -> PretrainSettings:
    """Return the settings of a ``pretrain`` job."""
    return _settings(PretrainSettings, job, {})


def _settings(kind: type[AnySettings], job: Job, more: dict[str, Any]) -> AnySettings:
    values = {**job.recipe["settings"], "checkpoint_every": job.checkpoint_every, **more}
    types = get_type_hints(kind)
    return kind(
        **{
            name: types[name](**_with_tuples(value)) if isinstance(value, dict) else value
            for name, value in values.items()
        }
    )


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Undo what JSON makes of tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def _relevant(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in IRRELEVANT}


def _describe(settings: RunSettings) -> str:
    """Name what distinguishes a run within a reproduction."""
    defaults = RunSettings()
    special = [
        f"{name} {value}"
        for name, value, usual in (
            ("update", settings.memory.update, defaults.memory.update),
            ("capacity", settings.memory.capacity, None),
            ("backbone", settings.model.backbone, defaults.model.backbone),
        )
        if value != usual
    ]
    if settings.uses_memory:
        if settings.inference == "network":
            special.append(f"recall {settings.memory.recall_kind}")
        special.append(f"α {settings.memory.retention}")
    return (
        f"{', '.join([settings.method, *special])}: {settings.data} {settings.way}-way "
        f"{settings.shot}-shot, {settings.steps} steps, seed {settings.seed}"
    )
