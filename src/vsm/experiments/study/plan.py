"""From a study to its jobs: evaluations of every row, condition and seed, and the rest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from vsm.errors import RunError, SettingsError
from vsm.experiments.changes import with_changes
from vsm.experiments.checksums import data_checksum
from vsm.experiments.jobs import Job, evaluate_job, given_job, in_order, train_job
from vsm.experiments.store import JobStore
from vsm.experiments.study.definition import Condition, Study, StudySettings, conditions
from vsm.experiments.study.training_record import training_record
from vsm.runs.configuration import preset_paths, settings_from_files
from vsm.runs.directory import RunDirectory
from vsm.runs.shipped import find_run
from vsm.settings import BaselineSettings, RunSettings


@dataclass(frozen=True)
class Model:
    """A row's model of one seed: the job that makes it, and the settings it is trained by."""

    job: Job
    settings: RunSettings


@dataclass(frozen=True)
class StudyPlan:
    """The jobs of a study.

    Attributes:
        study: what was asked for.
        models: by (label, condition, seed).
        scores: evaluations of rows, and of baselines, by (label, condition, seed).
        cuts: of the reference with part of its memory, by (condition, size, subset, seed).
        nearness: of classes to the reference's slots, by (condition, seed).
        changes: the answers that memory changed, by condition.
    """

    study: Study
    models: Mapping[tuple[str, Condition, int], Model]
    scores: Mapping[tuple[str, Condition, int], Job]
    cuts: Mapping[tuple[Condition, int, int, int], Job]
    nearness: Mapping[tuple[Condition, int], Job]
    changes: Mapping[Condition, Job]

    @cached_property
    def jobs(self) -> list[Job]:
        """Every job, each once; those of one model follow one another, which loads it once."""
        parts = (self.scores, self.cuts, self.nearness, self.changes)
        found = [job for part in parts for job in part.values()]
        places = {key: n for n, key in enumerate(dict.fromkeys(j.after[0].key for j in found))}
        return in_order(sorted(found, key=lambda job: places[job.after[0].key]))

    def records(self, store: JobStore) -> list[dict[str, Any]]:
        """Return how every run was trained, each once."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for (label, _, seed), model in self.models.items():
            if (label, model.job.key) not in found:
                record = training_record(store.run_folder(model.job), model.settings)
                found[label, model.job.key] = {"row": label, "seed": seed, **record}
        return list(found.values())


def make_plan(study: Study, backbones: Sequence[str] = (), **options: Any) -> StudyPlan:
    """Return the plan of a study of runs without computing or writing anything.

    Args:
        study: what to measure.
        backbones: code of the user's own that runs may import, as ``module:attribute``.
        options: ``device`` and ``precision``.

    Raises:
        RunError: if a run is missing, of other data, or not trained to its end.
    """
    asked = study.settings
    assert isinstance(asked, StudySettings)
    planner = _Planner(asked, backbones, options)
    reference, inductive = asked.reference, [c for c in conditions(asked) if c[2] == "inductive"]
    others = [label for label in asked.rows if label != reference]
    every = list(product((*others, reference), conditions(asked), asked.seeds))
    scores = {key: planner.score(*key) for key in every}
    scores |= {
        (name, condition, seed): planner.baseline(name, condition, seed)
        for name, condition, seed in product(asked.baselines, inductive, asked.seeds)
    }
    compares = asked.without_memory is not None
    return StudyPlan(
        study,
        {key: planner.model(*key) for key in product(asked.rows, conditions(asked), asked.seeds)},
        scores,
        {key: planner.cut(*key) for key in _cuts(asked, inductive)},
        {
            key: planner.nearness(*key)
            for key in product(inductive if compares else (), asked.seeds)
        },
        {condition: planner.changes(condition) for condition in inductive if compares},
    )


def _cuts(
    asked: StudySettings, inductive: Sequence[Condition]
) -> Iterator[tuple[Condition, int, int, int]]:
    for condition, size in product(inductive, sorted(set(asked.memory_sizes))):
        for subset, seed in product(range(asked.memory_subsets if size else 1), asked.seeds):
            yield condition, size, subset, seed


class _Planner:
    """Makes the jobs of a study; models are looked up once."""

    def __init__(
        self, asked: StudySettings, backbones: Sequence[str], options: Mapping[str, Any]
    ) -> None:
        self._asked = asked
        self._backbones = backbones
        self._options = options
        self._models: dict[str, Model] = {}
        self._checksum: str | None = None

    def model(self, label: str, condition: Condition, seed: int) -> Model:
        """Return the model of a row."""
        row = self._asked.rows[label]
        path = row.format(seed=seed, **_shape(condition)) if isinstance(row, str) else ""
        name = path or f"{label}\x1f{seed}"
        if name not in self._models:
            made = self._given(Path(path)) if isinstance(row, str) else self._trained(row, seed)
            self._models[name] = made
        return self._models[name]

    def _given(self, path: Path) -> Model:
        settings = RunDirectory(path).settings()
        if settings.data != self._asked.data:
            raise RunError(
                f"{path} was trained on {settings.data}, but the study is of {self._asked.data}"
            )
        training_record(path, settings)  # says if it is not at its end
        backbone = settings.model.backbone
        named = backbone if backbone in self._backbones else None
        return Model(given_job(path, backbone=named, **self._options), settings)

    def _trained(self, row: Mapping[str, Any], seed: int) -> Model:
        base = settings_from_files(*preset_paths(self._asked.base or ""))
        shared = {"data": self._asked.data, **self._asked.changes}
        settings = with_changes(base, {**shared, **row, "seed": seed})
        own = settings.model.own_backbone
        if own is not None and own not in self._backbones:
            raise SettingsError(
                f"rows: the study names code that is not part of vsm, {own}; if you trust it, add "
                f"--backbone {own}"
            )
        if self._checksum is None:
            self._checksum = data_checksum(self._asked.data, {})
        before = None if settings.init is None else _beginning(settings.init)
        options = {"backbone": own, **self._options}
        return Model(train_job(settings, self._checksum, before, **options), settings)

    def score(self, label: str, condition: Condition, seed: int) -> Job:
        """Return the evaluation of a row."""
        return self._evaluation(self.model(label, condition, seed), condition, label, seed)

    def baseline(self, name: str, condition: Condition, seed: int) -> Job:
        """Return the evaluation of a baseline on the features of the reference."""
        used = {"name": name, "settings": asdict(BaselineSettings())}
        return self._evaluation(self._reference(condition, seed), condition, name, seed, used)

    def _evaluation(
        self,
        model: Model,
        condition: Condition,
        label: str,
        seed: int,
        baseline: dict[str, Any] | None = None,
    ) -> Job:
        protocol = self._protocol(condition)
        more: dict[str, Any] = {"confusions": True}
        if self._asked.split == "test":
            episodes = self._asked.temperature_episodes
            more["temperature"] = {**protocol, "split": "validation", "episodes": episodes}
        if baseline is not None:
            more["baseline"] = baseline
        return evaluate_job(model.job, f"{condition}, {label}, seed {seed}", protocol, **more)

    def cut(self, condition: Condition, size: int, subset: int, seed: int) -> Job:
        """Return the evaluation of the reference with ``size`` slots alone."""
        title = f"{condition}, {size} slots, subset {subset}, seed {seed}"
        model, protocol = self._reference(condition, seed), self._protocol(condition)
        return evaluate_job(model.job, title, protocol, slots=(size, subset))

    def nearness(self, condition: Condition, seed: int) -> Job:
        """Return how near classes are to the reference's slots, whatever the episodes."""
        protocol = self._protocol(conditions(self._asked)[0])
        title = f"nearness to the slots, seed {seed}"
        model = self._reference(condition, seed)
        return Job("nearness", title, {"protocol": protocol}, (model.job,))

    def changes(self, condition: Condition) -> Job:
        """Return the answers that the memory of the first seed changed."""
        assert self._asked.without_memory is not None
        seed, recipe = self._asked.seeds[0], {"protocol": self._protocol(condition)}
        without = self.model(self._asked.without_memory, condition, seed)
        pair = (self._reference(condition, seed).job, without.job)
        return Job("changes", f"{condition}, changed answers", recipe, pair)

    def _reference(self, condition: Condition, seed: int) -> Model:
        return self.model(self._asked.reference, condition, seed)

    def _protocol(self, condition: Condition) -> dict[str, Any]:
        asked = self._asked
        return {
            "data": asked.data,
            "split": asked.split,
            **_shape(condition),
            "queries": asked.queries,
            "episodes": asked.episodes,
            "seed": asked.episode_seed,
            "batch_norm": condition.batch_norm,
        }


def _shape(condition: Condition) -> dict[str, int]:
    return {"way": condition.way, "shot": condition.shot}


def _beginning(init: str) -> Job:
    """Return the directory that a training begins with."""
    path = find_run(init)
    if not path.exists():
        raise RunError(f"init: there is no {path}; make it with vsm pretrain --output {path}")
    return given_job(path)
