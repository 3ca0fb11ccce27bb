"""Studies of runs: the jobs they take, and their result files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsm.data import Dataset, open_dataset
from vsm.errors import RunError, SettingsError
from vsm.evaluation.evaluator import EpisodeProtocol
from vsm.evaluation.intervals import crossed_estimate, estimate, spearman, student_quantile
from vsm.runs.configuration import preset_paths, read_settings
from vsm.runs.directory import RunDirectory, find_run
from vsm.settings import BaselineSettings, ModelSettings, RunSettings, is_frozen_encoder
from vsm_lab.cells import Cell, class_interval, interval, number, read_cell
from vsm_lab.job_files import JobStore, data_checksum
from vsm_lab.jobs import (
    VIEWS,
    Job,
    evaluate_job,
    given_job,
    in_order,
    learn_job,
    train_job,
    with_changes,
)
from vsm_lab.provenance import training_record
from vsm_lab.study.definition import Condition, Found, Study, StudySettings

SCORES = ("nll", "ece", "temperature", "calibrated_nll", "calibrated_ece")


class Model(NamedTuple):
    """A row's model of one seed: the job that makes it, and the settings it is trained by."""

    job: Job
    settings: RunSettings


class StudyPlan:
    """The jobs of a study of runs. Making a plan computes and writes nothing.

    ``backbones`` is code of the user's own that runs may import, as ``module:attribute``;
    ``options`` are device and precision. RunError if a run is missing, of other data or unfinished.
    """

    def __init__(self, study: Study, backbones: Sequence[str] = (), **options: Any) -> None:
        assert isinstance(study.settings, StudySettings)
        self.study, self.asked = study, study.settings
        self._backbones, self._options = backbones, options
        self._models: dict[str, Model] = {}
        self.jobs = self._all_jobs()

    def _all_jobs(self) -> list[Job]:
        """Return every job once; those of one model follow one another, which loads it once."""
        asked, seeds = self.asked, self.asked.seeds
        labels = (*asked.others, asked.reference)
        inductive = [one for one in asked.conditions if one.batch_norm == "inductive"]
        compared = inductive if asked.without_memory is not None else []
        found = [
            *(self.score(*k) for k in product(labels, asked.conditions, seeds)),
            *(self.score(*k) for k in product(asked.baselines, inductive, seeds)),
            *(
                self.cut(condition, size, subset, seed)
                for condition, size in product(inductive, sorted(set(asked.memory_sizes)))
                for subset, seed in product(self.subsets(size), seeds)
            ),
            *(self.nearness(*k) for k in product(compared, seeds)),
            *map(self.changes, compared),
        ]
        places = {key: n for n, key in enumerate(dict.fromkeys(j.after[0].key for j in found))}
        return in_order(sorted(found, key=lambda job: places[job.after[0].key]))

    def records(self, store: JobStore) -> list[dict[str, Any]]:
        """Return how every run was trained, each once."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for key in product(self.asked.rows, self.asked.conditions, self.asked.seeds):
            label, _, seed = key
            job, settings = self._model(*key)
            if (label, job.key) not in found:
                if job.kind == "learn" and job.after and not job.after[0].is_given:
                    settings = replace(settings, init=str(store.run_folder(job.after[0])))
                record = training_record(store.run_folder(job), settings)
                found[label, job.key] = {"row": label, "seed": seed, **record}
        return list(found.values())

    def write_results(self, store: JobStore) -> Found:
        """Summarize the finished jobs, and write the result file."""
        conditions = [self._found(condition, store) for condition in self.asked.conditions]
        return self.study.write_results({"runs": self.records(store), "conditions": conditions})

    def score(self, label: str, condition: Condition, seed: int) -> Job:
        """Return the evaluation of a row, or of a baseline on the features of the reference."""
        protocol, more = self._protocol(condition), dict[str, Any](confusions=True)
        if self.asked.split == "test":
            episodes = self.asked.temperature_episodes
            more["temperature"] = {**protocol, "split": "validation", "episodes": episodes}
        is_row = label in self.asked.rows
        if not is_row:
            more["baseline"] = {"name": label, "settings": asdict(BaselineSettings())}
        model = self._model(label if is_row else self.asked.reference, condition, seed)
        return evaluate_job(model.job, f"{condition}, {label}, seed {seed}", protocol, **more)

    def subsets(self, size: int) -> range:
        """Return the numbers of the choices of ``size`` slots."""
        return range(self.asked.memory_subsets if size else 1)

    def cut(self, condition: Condition, size: int, subset: int, seed: int) -> Job:
        """Return the evaluation of the reference with ``size`` of its slots alone."""
        title = f"{condition}, {size} slots, subset {subset}, seed {seed}"
        model, protocol = self._reference(condition, seed), self._protocol(condition)
        return evaluate_job(model, title, protocol, slots=(size, subset))

    def nearness(self, condition: Condition, seed: int) -> Job:
        """Return how near classes are to the reference's slots, whatever the episodes."""
        recipe = {"protocol": self._protocol(self.asked.conditions[0])}
        title = f"nearness to the slots, seed {seed}"
        return Job("nearness", title, recipe, (self._reference(condition, seed),))

    def changes(self, condition: Condition) -> Job:
        """Return the answers that the memory of the first seed changed."""
        assert self.asked.without_memory is not None
        seed, recipe = self.asked.seeds[0], {"protocol": self._protocol(condition)}
        without = self._model(self.asked.without_memory, condition, seed).job
        pair = (self._reference(condition, seed), without)
        return Job("changes", f"{condition}, changed answers", recipe, pair)

    def _reference(self, condition: Condition, seed: int) -> Job:
        return self._model(self.asked.reference, condition, seed).job

    def _model(self, label: str, condition: Condition, seed: int) -> Model:
        """Return the model of a row; it is looked up once."""
        row = self.asked.rows[label]
        if isinstance(row, str):
            name = row.format(seed=seed, way=condition.way, shot=condition.shot)
            if name not in self._models:
                self._models[name] = self._given(Path(name))
        else:
            name = f"{label}\x1f{seed}"
            if name not in self._models:
                make = self._learned if "encoder" in row else self._trained
                self._models[name] = make(row, seed)
        return self._models[name]

    def _given(self, path: Path) -> Model:
        settings = RunDirectory(path).settings()
        if settings.data != self.asked.data:
            raise RunError(
                f"{path} was trained on {settings.data}, but the study is of {self.asked.data}"
            )
        training_record(path, settings)  # says if it is not at its end
        return Model(run_job(path, settings, self._backbones, self._options), settings)

    def _learned(self, row: Mapping[str, Any], seed: int) -> Model:
        """Return the memory that is learned with the encoder of a row, and its settings."""
        name, before = str(row["encoder"]).format(seed=seed), None
        if isinstance(trained := self.asked.rows.get(name), dict):
            before = self._trained(trained, seed).job
        elif not is_frozen_encoder(name):
            path = find_run(name)
            if not path.exists():
                raise RunError(f"rows: there is no encoder {path}; make it first")
            before = given_job(path)
        views = {name: row[name] for name in VIEWS if name in row}
        changes = {key: value for key, value in row.items() if key not in ("encoder", *views)}
        model = ModelSettings(inference="gaussian")
        base = RunSettings(data=self.asked.data, init=name, seed=seed, model=model)
        settings = with_changes(base, changes, given=changes)
        return Model(learn_job(settings, self._checksum, before, self._options, **views), settings)

    def _trained(self, row: Mapping[str, Any], seed: int) -> Model:
        base = read_settings(RunSettings, *preset_paths(self.asked.base or ""))
        changes = {"data": self.asked.data, **self.asked.changes, **row, "seed": seed}
        if isinstance(changes.get("init"), str):
            changes["init"] = changes["init"].format(seed=seed)
        settings = with_changes(base, changes, given=row)
        own, before = settings.model.own_backbone, None
        if own is not None and own not in self._backbones:
            raise SettingsError(
                f"rows: the study names code that is not part of vsm, {own}; if you trust it, add "
                f"--backbone {own}"
            )
        if settings.init is not None:
            path = find_run(settings.init)
            if not path.exists():
                raise RunError(
                    f"init: there is no {path}; make it with vsm pretrain --output {path}"
                )
            before = given_job(path)
        options = {"backbone": own, **self._options}
        return Model(train_job(settings, self._checksum, before, **options), settings)

    @cached_property
    def _checksum(self) -> str:
        return data_checksum(self.asked.data, {})

    def _protocol(self, condition: Condition) -> dict[str, Any]:
        asked = self.asked
        return {
            "data": asked.data,
            "split": asked.split,
            "way": condition.way,
            "shot": condition.shot,
            "queries": asked.queries,
            "episodes": asked.episodes,
            "seed": asked.episode_seed,
            "batch_norm": condition.batch_norm,
        }

    @cached_property
    def _dataset(self) -> Dataset:
        return open_dataset(self.asked.data)

    def _found(self, condition: Condition, store: JobStore) -> Found:
        """Return everything that was measured under one condition."""
        asked = self.asked
        is_inductive = condition.batch_norm == "inductive"
        rows = {label: self._cell(label, condition, store) for label in asked.rows}
        baselines = {
            name: self._cell(name, condition, store) for name in asked.baselines if is_inductive
        }
        reference, class_ids = rows[asked.reference], self._class_ids(condition)
        found: Found = {
            **condition._asdict(),
            "rows": {label: _score(cell) for label, cell in rows.items()},
            "baselines": {name: _score(cell) for name, cell in baselines.items()},
            "differences": {
                label: self._difference(reference, (rows | baselines)[label], class_ids)
                for label in (*asked.others, *baselines)
            },
            "pairs": [
                {"row": one, "minus": other, **self._difference(rows[one], rows[other], class_ids)}
                for one, other in asked.pairs.items()
            ],
        }
        if is_inductive:
            found["memory_sizes"] = self._memory_sizes(reference, condition, store)
        if is_inductive and asked.without_memory is not None:
            more = reference.confusions - rows[asked.without_memory].confusions  # [S, E, N, N]
            by_class = more.mean(0).diagonal(dim1=1, dim2=2)
            found["gains"] = self._gains(by_class, class_ids, condition, store)
            found["changes"] = store.outcome(self.changes(condition)) or None
        return found

    def _cell(self, label: str, condition: Condition, store: JobStore) -> Cell:
        jobs = [self.score(label, condition, seed) for seed in self.asked.seeds]
        return read_cell(store, jobs, self.asked.seeds)

    def _difference(self, reference: Cell, other: Cell, class_ids: Tensor) -> Found:
        """Return how much more accurate the first is, over episodes and over classes."""
        seed = self.asked.episode_seed
        more = reference.values("accuracy") - other.values("accuracy")  # [S, E]
        pairs = reference.confusions - other.confusions  # [S, E, N, N]
        return {
            **interval(crossed_estimate(more)),
            "ci95_classes": class_interval(pairs.mean(0), class_ids, seed),
            "seeds": [
                {
                    "seed": one,
                    **interval(estimate(values)),
                    "ci95_classes": class_interval(of_seed, class_ids, seed),
                }
                for one, values, of_seed in zip(reference.seeds, more, pairs, strict=True)
            ],
        }

    def _memory_sizes(self, reference: Cell, condition: Condition, store: JobStore) -> list[Found]:
        """Return the accuracy of the reference with ever more of its slots; all come last."""
        slots = [one["memory_slots"] for one in reference.outcomes]
        if not min(slots):
            return []
        found, asked = [], self.asked
        for size in sorted({size for size in asked.memory_sizes if size < min(slots)}):
            subsets = self.subsets(size)
            cells = [
                [self.cut(condition, size, subset, seed) for seed in asked.seeds]
                for subset in subsets
            ]
            accuracies = [read_cell(store, c, asked.seeds).values("accuracy") for c in cells]
            over_seeds = interval(crossed_estimate(torch.stack(accuracies).mean(0)))
            apart = None
            if len(subsets) > 1:  # over choices of classes, each by its mean
                means = torch.stack([one.mean() for one in accuracies])
                std = means.std().item() / len(subsets) ** 0.5
                apart = student_quantile(len(subsets) - 1) * std
            found.append(
                {"slots": [size], "subsets": len(subsets), **over_seeds, "ci95_subsets": apart}
            )
        every = interval(crossed_estimate(reference.values("accuracy")))
        return [*found, {"slots": sorted(set(slots)), "subsets": 1, **every}]

    def _gains(
        self, values: Tensor, class_ids: Tensor, condition: Condition, store: JobStore
    ) -> Found | None:
        """Return the gain of each class and its mean nearness to the memory, nearest first.

        ``values`` and ``class_ids`` are by episode and class ``[E, N]``.
        """
        found = [store.outcome(self.nearness(condition, seed)) for seed in self.asked.seeds]
        if not all(found):
            return None
        classes, member = class_ids.flatten().unique(return_inverse=True)
        gain = torch.bincount(member, values.flatten()) / torch.bincount(member)
        near = [sum(one[str(c)] for one in found) / len(found) for c in classes.tolist()]
        names = [self._dataset.class_names[class_id] for class_id in classes.tolist()]
        listed = [
            {"class": name, "nearness": nearness, "gain": of_class}
            for name, nearness, of_class in zip(names, near, gain.tolist(), strict=True)
        ]
        return {
            "spearman": number(spearman(torch.tensor(near, dtype=torch.float64), gain)),
            "classes": sorted(listed, key=lambda one: -one["nearness"]),
        }

    def _class_ids(self, condition: Condition) -> Tensor:
        """Return the classes of every episode ``[E, N]``."""
        protocol = EpisodeProtocol(**self._protocol(condition))
        sampler = protocol.sampler(self._dataset)
        blocks = sampler.evaluation_episodes(protocol.episodes, protocol.seed)
        return torch.cat([block.class_ids for block in blocks])


def _score(cell: Cell) -> Found:
    """Return means over seeds, and each seed by itself."""
    names = [name for name in SCORES if name in cell.outcomes[0]]
    by_seed = cell.values("accuracy")
    return {
        **interval(crossed_estimate(by_seed)),
        **{name: sum(one[name] for one in cell.outcomes) / len(cell.outcomes) for name in names},
        "seeds": [
            {"seed": seed, **interval(estimate(values)), **{name: one[name] for name in names}}
            for seed, values, one in zip(cell.seeds, by_seed, cell.outcomes, strict=True)
        ],
    }


def run_job(
    path: Path, settings: RunSettings, backbones: Sequence[str], options: Mapping[str, Any]
) -> Job:
    """Return a trained run as a job, with code of the user's own if ``backbones`` allow it."""
    own = settings.model.own_backbone
    return given_job(path, backbone=own if own in backbones else None, **options)
