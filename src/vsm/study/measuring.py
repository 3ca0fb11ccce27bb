"""From trained runs to the result file of a study."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsm import __version__
from vsm.data import Dataset, open_dataset
from vsm.errors import EpisodeError
from vsm.evaluation.comparison import (
    EpisodeProtocol,
    LoadedRun,
    MeasuredRun,
    load_for,
    measure,
    measure_baseline,
)
from vsm.evaluation.evaluator import Advance, unwatched
from vsm.evaluation.statistics import crossed_estimate
from vsm.runs.trained_model import RunDirectory
from vsm.settings import BaselineName, BaselineSettings
from vsm.study.changes import changed_answers
from vsm.study.parts import Parts, digest_of_run
from vsm.study.plan import Condition, Study
from vsm.study.remembered import chosen_slots, nearness_to_slots
from vsm.study.summary import accuracies, difference, gains, interval, summary
from vsm.study.training_record import training_record
from vsm.system.devices import Placement, choose_placement
from vsm.system.files import write_text

Watch = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows progress of something, by its title and size, while the block runs."""
Measure = Callable[[LoadedRun, EpisodeProtocol, Advance], MeasuredRun]
Found = dict[str, Any]


def unseen(_title: str, _total: int) -> AbstractContextManager[Advance]:
    """Show nothing."""
    return nullcontext(unwatched)


class Measurer:
    """Measures what a study asks for; what was measured before is kept.

    Args:
        study: what to measure.
        placement: where to compute; chosen if not given.
        watch: shows progress.
        backbones: code of the user's own that runs may import, as ``module:attribute``.
    """

    def __init__(
        self,
        study: Study,
        placement: Placement | None = None,
        watch: Watch = unseen,
        backbones: Sequence[str] = (),
    ) -> None:
        self.study = study
        self.settings = study.settings
        self.parts = Parts(study.parts)
        self._placement = placement or choose_placement()
        self._watch = watch
        self._backbones = backbones
        # All seeds of the reference stay loaded, and one other run.
        self._load = lru_cache(len(study.settings.seeds) + 1)(self._load_anew)
        self._digest = lru_cache(None)(digest_of_run)

    def write_results(self) -> Found:
        """Measure what is not measured yet, and write the result file."""
        found = {
            "package": __version__,
            "study": asdict(self.settings),
            "runs": self._training_records(),  # says before anything else what is missing
            "conditions": [self._condition(condition) for condition in self.study.conditions],
        }
        write_text(self.study.results, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
        return found

    def _training_records(self) -> list[Found]:
        records: dict[tuple[str, Path], Found] = {}
        for condition in self.study.conditions:
            for label in self.settings.rows:
                for seed, path in self._runs(label, condition).items():
                    if (label, path) not in records:
                        named = {"row": label, "seed": seed}
                        records[label, path] = {
                            **named,
                            **training_record(path, self.settings.data),
                        }
        return list(records.values())

    def _condition(self, condition: Condition) -> Found:
        asked, seeds = self.settings, self.settings.seeds
        others = [label for label in asked.rows if label != asked.reference]
        rows = {
            label: self._row(label, condition)
            for label in (*others, asked.reference)  # last, so that it stays loaded
        }
        is_inductive = condition.batch_norm == "inductive"
        names = asked.baselines if is_inductive else ()
        baselines = {name: self._baseline(name, condition) for name in names}
        answers = {label: self._confusions(scores) for label, scores in (rows | baselines).items()}
        reference, class_ids = answers[asked.reference], self._class_ids(condition)
        found: Found = {
            **condition._asdict(),
            "rows": {label: summary(seeds, rows[label], answers[label]) for label in asked.rows},
            "baselines": {
                name: summary(seeds, baselines[name], answers[name]) for name in baselines
            },
            "differences": {
                label: difference(seeds, reference - answers[label], class_ids, asked.episode_seed)
                for label in (*asked.compared, *baselines)
            },
        }
        if is_inductive:
            found["memory_sizes"] = self._memory_sizes(condition, reference)
        if is_inductive and asked.without_memory is not None:
            more = (reference - answers[asked.without_memory]).mean(0)  # [E, N, N]
            gain = more.diagonal(dim1=1, dim2=2)
            found["gains"] = self._gains(condition, gain, class_ids)
            found["changes"] = self._changes(condition)
        return found

    def _row(self, label: str, condition: Condition) -> list[Found]:
        return [
            self._scores(path, condition, f"{condition}, {label}, seed {seed}", {}, measure)
            for seed, path in self._runs(label, condition).items()
        ]

    def _baseline(self, name: BaselineName, condition: Condition) -> list[Found]:
        """Return the scores of a baseline on the features of the reference."""
        settings = BaselineSettings()

        def measure_it(run: LoadedRun, protocol: EpisodeProtocol, advance: Advance) -> MeasuredRun:
            return measure_baseline(run, name, protocol, settings, advance)

        of = {"baseline": name, "settings": asdict(settings)}
        return [
            self._scores(path, condition, f"{condition}, {name}, seed {seed}", of, measure_it)
            for seed, path in self._runs(self.settings.reference, condition).items()
        ]

    def _scores(
        self, path: Path, condition: Condition, title: str, of: Found, measure_it: Measure
    ) -> Found:
        """Return all answers, and NLL and ECE before and after a temperature."""
        test = self._protocol(condition)
        validation = replace(test, split="validation", episodes=self.settings.temperature_episodes)

        def find() -> Found:
            run = self._load(path)
            with self._watch(title, test.episodes) as advance:
                evaluation = measure_it(run, test, advance).evaluation
            found = {
                "confusions": evaluation.confusions.tolist(),
                "nll": evaluation.nll,
                "ece": evaluation.reliability.expected_calibration_error,
                "temperature": None,
            }
            if not _is_feasible(validation, run.dataset):
                return found
            with self._watch(f"{title}: temperature", validation.episodes) as advance:
                temperature = measure_it(run, validation, advance).evaluation.best_temperature()
            after = evaluation.scale_by_temperature(temperature)
            return found | {
                "temperature": temperature,
                "calibrated_nll": after.nll,
                "calibrated_ece": after.reliability.expected_calibration_error,
            }

        protocols = {"test": asdict(test), "validation": asdict(validation)}
        return self.parts.get(
            {"what": "scores", "run": self._digest(path), **protocols, **of}, find
        )

    def _memory_sizes(self, condition: Condition, whole: Tensor) -> list[Found]:
        """Return the accuracy of the reference with ever more of its slots; all come last."""
        asked = self.settings
        paths = list(self._runs(asked.reference, condition).values())
        slots = [self._num_slots(path) for path in paths]
        if not min(slots):
            return []
        found = []
        for size in sorted({size for size in asked.memory_sizes if size < min(slots)}):
            subsets = range(asked.memory_subsets if size else 1)
            correct = [
                [self._cut(path, condition, size, subset) for subset in subsets] for path in paths
            ]
            shares = torch.tensor(correct, dtype=torch.float64) / condition.way / asked.queries
            over_seeds = crossed_estimate(shares.mean(1))  # of [S, E]
            found.append({"slots": [size], "subsets": len(subsets), **interval(over_seeds)})
        every = {"slots": sorted(set(slots)), "subsets": 1}
        return [*found, {**every, **interval(crossed_estimate(accuracies(whole)))}]

    def _num_slots(self, path: Path) -> int:
        def find() -> Found:
            memory = self._load(path).trained.memory
            return {"slots": 0 if memory is None else len(memory)}

        slots: int = self.parts.get({"what": "slots", "run": self._digest(path)}, find)["slots"]
        return slots

    def _cut(self, path: Path, condition: Condition, size: int, subset: int) -> list[int]:
        """Return the right answers of each episode with ``size`` slots alone."""
        protocol = self._protocol(condition)

        def find() -> Found:
            run = self._load(path)
            assert run.trained.memory is not None
            kept = chosen_slots(run.trained.memory, size, subset, protocol.seed)
            cut = replace(run, trained=replace(run.trained, memory=kept))
            title = f"{condition}, {size} slots, subset {subset}"
            with self._watch(title, protocol.episodes) as advance:
                evaluation = measure(cut, protocol, advance).evaluation
            return {"correct": evaluation.correct.sum(1).tolist()}

        of = {"what": "cut", "run": self._digest(path), "test": asdict(protocol)}
        correct: list[int] = self.parts.get({**of, "size": size, "subset": subset}, find)["correct"]
        return correct

    def _gains(self, condition: Condition, gain: Tensor, class_ids: Tensor) -> Found | None:
        """Return what each class gains by memory, beside its mean nearness over seeds."""
        paths = self._runs(self.settings.reference, condition).values()
        found = [self._nearness(path, condition) for path in paths]
        if not all(found):
            return None
        nearness = {
            int(class_id): sum(one[class_id] for one in found) / len(found) for class_id in found[0]
        }
        return gains(gain, class_ids, nearness, self._dataset.class_names)

    def _nearness(self, path: Path, condition: Condition) -> dict[str, float]:
        def find() -> Found:
            near = nearness_to_slots(self._load(path), self._protocol(condition))
            return {str(class_id): cosine for class_id, cosine in near.items()}

        return self.parts.get({"what": "nearness", "run": self._digest(path)}, find)

    def _changes(self, condition: Condition) -> Found | None:
        """Return the answers that the memory of the first seed changed."""
        protocol, seed = self._protocol(condition), self.settings.seeds[0]
        assert self.settings.without_memory is not None
        with_memory = self.study.run(self.settings.reference, condition, seed)
        without = self.study.run(self.settings.without_memory, condition, seed)
        if not self._num_slots(with_memory):
            return None

        def find() -> Found:
            with self._watch(f"{condition}, changed answers", 2 * protocol.episodes) as advance:
                pair = self._load(with_memory), self._load(without)
                return changed_answers(*pair, protocol, advance)

        runs = {"run": self._digest(with_memory), "without": self._digest(without)}
        return self.parts.get({"what": "changes", **runs, "test": asdict(protocol)}, find)

    @cached_property
    def _dataset(self) -> Dataset:
        return open_dataset(self.settings.data)

    def _runs(self, label: str, condition: Condition) -> dict[int, Path]:
        """Return the run directories of a row, by seed."""
        return {seed: self.study.run(label, condition, seed) for seed in self.settings.seeds}

    def _load_anew(self, path: Path) -> LoadedRun:
        protocol = self._protocol(self.study.conditions[0])  # of which the data alone matter
        backbone = RunDirectory(path).settings().model.backbone
        named = backbone if backbone in self._backbones else None
        return load_for(path, protocol, backbone=named, placement=self._placement)

    def _protocol(self, condition: Condition) -> EpisodeProtocol:
        asked = self.settings
        return EpisodeProtocol(
            data=asked.data,
            split="test",
            way=condition.way,
            shot=condition.shot,
            queries=asked.queries,
            episodes=asked.episodes,
            seed=asked.episode_seed,
            batch_norm=condition.batch_norm,
        )

    def _class_ids(self, condition: Condition) -> Tensor:
        """Return the classes of every episode ``[E, N]``."""
        protocol = self._protocol(condition)
        sampler = protocol.sampler(self._dataset)
        blocks = sampler.evaluation_episodes(protocol.episodes, protocol.seed)
        return torch.cat([block.class_ids for block in blocks])

    def _confusions(self, scores: Sequence[Found]) -> Tensor:
        """Return the share of each class's queries that each class answered ``[S, E, N, N]``."""
        counts = torch.tensor([one["confusions"] for one in scores], dtype=torch.float64)
        return counts / self.settings.queries


def _is_feasible(protocol: EpisodeProtocol, dataset: Dataset) -> bool:
    """Tell whether a split has enough classes and images for such episodes."""
    try:
        protocol.sampler(dataset)
    except EpisodeError:
        return False
    return True
