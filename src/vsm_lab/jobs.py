"""Jobs: units of work, each named by the hash of everything that defines its result.

Plans that need the same run share it, because its name is the same. What does not change a result
is no part of the name: where it is stored, how often it is saved, which plan asked for it.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from vsm.errors import SettingsError
from vsm.runs.configuration import AnyDataclass, AnySettings
from vsm.settings import (
    PretrainSettings,
    RunSettings,
    effective_settings,
    flatten,
    is_frozen_encoder,
)

VIEWS = ("mirror", "shift", "with_adapter")
"""Arguments of ``open_encoder`` that a job of learning a memory may have."""
RESULTS_VERSION = 2
"""Part of every name. Raise it with any change to what training or evaluation computes."""

GIVEN_FILES = (
    "config.yaml", "model.safetensors", "memory.safetensors", "backbone.safetensors",
    "calibration.json",
)  # fmt: skip
Changes = Mapping[str, Any]
"""Dotted names of settings and their values, e.g. ``{"memory.update": "mean"}``."""


@dataclass(frozen=True)
class Job:
    """A unit of work.

    Attributes:
        kind: a key of :data:`vsm_lab.execution.KINDS`, or "given" for a directory that exists.
        title: for people.
        recipe: everything that defines the result, as JSON values.
        after: the jobs whose results it needs; the model it measures comes first.
        options: what does not change the result: device, precision, how often to save, and the
            path of a given directory.
    """

    kind: str
    title: str
    recipe: Mapping[str, Any]
    after: tuple["Job", ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """The name: a hash of kind, recipe, what it needs, and the version of results."""
        defining = {
            "version": RESULTS_VERSION,
            "kind": self.kind,
            "recipe": self.recipe,
            "after": [job.key for job in self.after],
        }
        text = json.dumps(defining, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_given(self) -> bool:
        """Whether it is a directory that exists already, so that there is nothing to do."""
        return self.kind == "given"

    def as_dict(self) -> dict[str, Any]:
        """Return the content of ``job.json``, including all jobs it needs."""
        return {
            "key": self.key,
            "kind": self.kind,
            "title": self.title,
            "recipe": dict(self.recipe),
            "options": dict(self.options),
            "after": [job.as_dict() for job in self.after],
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Job":
        """Return the job that :meth:`as_dict` described."""
        after = tuple(map(Job.from_dict, values["after"]))
        return Job(values["kind"], values["title"], values["recipe"], after, values["options"])


def given_job(path: Path, **options: Any) -> Job:
    """Return a run, a pre-training or a shipped model that exists, named by a hash of its files."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else [path / name for name in GIVEN_FILES]:
        digest.update(file.read_bytes() if file.is_file() else b"")
        digest.update(b"\x1f")
    where = {"path": str(path), **options}
    return Job("given", str(path), {"digest": digest.hexdigest()}, options=where)


def pretrain_job(
    settings: PretrainSettings, data_checksum: str, teacher: Job | None = None, **options: Any
) -> Job:
    """Return the pre-training of a backbone; ``teacher`` replaces that of the settings."""
    title = f"pre-train {settings.backbone} on {settings.data}, {settings.epochs} epochs"
    return _training_job("pretrain", title, settings, data_checksum, teacher, options)


def train_job(
    settings: RunSettings, data_checksum: str, before: Job | None = None, **options: Any
) -> Job:
    """Return the training run of ``settings``, which begins with the backbone of ``before``."""
    title = f"train {describe(settings)}"
    return _training_job("train", title, settings, data_checksum, before, options)


def _training_job(
    kind: str,
    title: str,
    settings: RunSettings | PretrainSettings,
    data_checksum: str,
    before: Job | None,
    options: Mapping[str, Any],
) -> Job:
    """Name a training by its settings, except how often to save and the path ``init``."""
    values = asdict(settings)
    options = {"checkpoint_every": values.pop("checkpoint_every"), **options}
    values.pop("init", None)  # the job before it counts
    if isinstance(settings, PretrainSettings):
        values["distillation"]["teacher"] = None  # and so with a teacher
    if not settings.augment_affine:  # so that results from before this setting keep their names
        values.pop("augment_affine")
    after = () if before is None else (before,)
    return Job(kind, title, {"settings": values, "data": data_checksum}, after, options)


def learn_job(
    settings: RunSettings,
    data_checksum: str,
    encoder: Job | None,
    options: Mapping[str, Any],
    **views: int,
) -> Job:
    """Return the learning of a memory by the ``gaussian`` settings; ``views`` as :data:`VIEWS`."""
    values = asdict(settings)
    learned = {name: values[name] for name in ("data", "seed", "gaussian")}
    recipe = {"settings": learned, "pixels": data_checksum, **views}
    if settings.init is not None and is_frozen_encoder(settings.init):
        recipe["encoder"] = settings.init
    after = () if encoder is None else (encoder,)
    return Job("learn", f"learn a memory of {settings.data}", recipe, after, dict(options))


def evaluate_job(model: Job, title: str, protocol: Mapping[str, Any], **more: Any) -> Job:
    """Return the evaluation of a model. Jobs of one protocol see the same list of episodes.

    Args:
        model: what is measured.
        title: for people.
        protocol: fields of :class:`vsm.evaluation.evaluator.EpisodeProtocol`.
        more: ``slots`` (how many the memory keeps, and which subset of them), ``baseline`` (name
            and settings of a classifier on the model's features), ``confusions`` (true: keep those
            of every episode), ``temperature`` (the protocol of validation episodes to which one is
            fitted).
    """
    return Job("evaluate", title, {"protocol": dict(protocol), **more}, (model,))


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs and all they need, each once, every job after those it needs."""
    ordered: dict[str, Job] = {}

    def add(job: Job) -> None:
        if job.key not in ordered and not job.is_given:
            for before in job.after:
                add(before)
            ordered[job.key] = job

    for job in jobs:
        add(job)
    return list(ordered.values())


def run_settings(job: Job, init: str = "pre-trained") -> RunSettings:
    """Return the settings of a ``train`` job; ``init`` is what it begins with, if anything."""
    return _settings(RunSettings, job, init=init if job.after else None)


def pretrain_settings(job: Job, teacher: str | None) -> PretrainSettings:
    """Return the settings of a ``pretrain`` job; ``teacher`` is the directory of its teacher."""
    taught = {**job.recipe["settings"]["distillation"], "teacher": teacher}
    return _settings(PretrainSettings, job, distillation=taught)


def _settings(kind: type[AnySettings], job: Job, **more: Any) -> AnySettings:
    every = job.options["checkpoint_every"]
    values = {**job.recipe["settings"], "checkpoint_every": every, **more}
    types = get_type_hints(kind)
    for name, part in values.items():
        if isinstance(part, dict):  # JSON made lists of tuples
            plain = {key: tuple(v) if isinstance(v, list) else v for key, v in part.items()}
            values[name] = types[name](**plain)
    return kind(**values)


def describe(settings: RunSettings) -> str:
    """Return what distinguishes a run within an experiment."""
    model, memory, usual = settings.model, settings.memory, RunSettings()
    parts: list[str] = [settings.method]
    if memory.update != usual.memory.update:
        parts.append(f"update {memory.update}")
    if memory.capacity is not None:
        parts.append(f"capacity {memory.capacity}")
    if model.backbone != usual.model.backbone:
        parts.append(f"backbone {model.backbone}")
    if settings.uses_memory and settings.inference == "network":
        parts.append(f"recall {memory.recall}")
    if settings.uses_memory:
        parts.append(f"α {memory.retention}")
    return (
        f"{', '.join(parts)}: {settings.data} {settings.way}-way {settings.shot}-shot, "
        f"{settings.steps} steps, seed {settings.seed}"
    )


def with_changes(
    settings: AnyDataclass, changes: Changes, given: Collection[str] = ()
) -> AnyDataclass:
    """Return ``settings`` with the values that dotted names give.

    What then has no effect gets its default, except for the names in ``given``, which are refused.

    Raises:
        SettingsError: if there is no such setting, or a value is not valid.
    """
    values = flatten(settings)
    for name in changes:
        if name not in values:
            section = name.rpartition(".")[0]
            known = [one for one in values if one.rpartition(".")[0] == section]
            raise SettingsError(
                f"unknown setting {name}; known there: {', '.join(known) or 'none'}"
            )
    return effective_settings(type(settings), values | dict(changes), given)
