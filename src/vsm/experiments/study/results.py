"""From the jobs of a study to its result file."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from vsm import __version__
from vsm.data import Dataset, open_dataset
from vsm.evaluation.protocol import EpisodeProtocol
from vsm.evaluation.statistics import crossed_estimate, estimate, spearman
from vsm.experiments.results import Cell, class_interval, interval, number, read_cell
from vsm.experiments.store import JobStore
from vsm.experiments.study.definition import Condition, StudySettings, conditions
from vsm.experiments.study.plan import StudyPlan
from vsm.system.files import write_text

SCORES = ("nll", "ece", "temperature", "calibrated_nll", "calibrated_ece")
Found = dict[str, Any]


def write_results(plan: StudyPlan, store: JobStore) -> Found:
    """Sum up the finished jobs of a study, and write the result file."""
    asked = plan.study.settings
    assert isinstance(asked, StudySettings)
    dataset = open_dataset(asked.data)
    summaries = [_Summary(plan, asked, one, store, dataset) for one in conditions(asked)]
    found = {
        "package": __version__,
        "study": asdict(asked),
        "runs": plan.records(store),
        "conditions": [summary.found() for summary in summaries],
    }
    write_text(plan.study.results, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    return found


class _Summary:
    """Sums up one condition of a study."""

    def __init__(
        self,
        plan: StudyPlan,
        asked: StudySettings,
        condition: Condition,
        store: JobStore,
        dataset: Dataset,
    ) -> None:
        self._plan, self._asked, self._condition = plan, asked, condition
        self._store, self._dataset = store, dataset

    def found(self) -> Found:
        """Return everything that was found of the condition."""
        asked, condition = self._asked, self._condition
        is_inductive = condition.batch_norm == "inductive"
        rows = {label: self._cell(label) for label in asked.rows}
        baselines = {name: self._cell(name) for name in asked.baselines if is_inductive}
        reference, class_ids = rows[asked.reference], self._class_ids()
        found: Found = {
            **condition._asdict(),
            "rows": {label: _score(cell) for label, cell in rows.items()},
            "baselines": {name: _score(cell) for name, cell in baselines.items()},
            "differences": {
                label: self._difference(reference, (rows | baselines)[label], class_ids)
                for label in (*asked.compared, *baselines)
            },
        }
        if is_inductive:
            found["memory_sizes"] = self._memory_sizes(reference)
        if is_inductive and asked.without_memory is not None:
            more = reference.confusions - rows[asked.without_memory].confusions  # [S, E, N, N]
            found["gains"] = self._gains(more.mean(0).diagonal(dim1=1, dim2=2), class_ids)
            found["changes"] = self._store.outcome(self._plan.changes[condition]) or None
        return found

    def _cell(self, label: str) -> Cell:
        seeds = self._asked.seeds
        jobs = [self._plan.scores[label, self._condition, seed] for seed in seeds]
        return read_cell(self._store, jobs, seeds)

    def _difference(self, reference: Cell, other: Cell, class_ids: Tensor) -> Found:
        """Return how much more accurate the reference is, over episodes and over classes."""
        seed = self._asked.episode_seed
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

    def _memory_sizes(self, reference: Cell) -> list[Found]:
        """Return the accuracy of the reference with ever more of its slots; all come last."""
        slots = [one["memory_slots"] for one in reference.outcomes]
        if not min(slots):
            return []
        found = []
        for size in sorted({size for size in self._asked.memory_sizes if size < min(slots)}):
            subsets = range(self._asked.memory_subsets if size else 1)
            shares = torch.stack([self._cut(size, subset).values("accuracy") for subset in subsets])
            over_seeds = interval(crossed_estimate(shares.mean(0)))
            found.append({"slots": [size], "subsets": len(subsets), **over_seeds})
        every = interval(crossed_estimate(reference.values("accuracy")))
        return [*found, {"slots": sorted(set(slots)), "subsets": 1, **every}]

    def _cut(self, size: int, subset: int) -> Cell:
        seeds = self._asked.seeds
        jobs = [self._plan.cuts[self._condition, size, subset, seed] for seed in seeds]
        return read_cell(self._store, jobs, seeds)

    def _gains(self, gain: Tensor, class_ids: Tensor) -> Found | None:
        """Return what each class gains by memory ``[E, N]``, beside its mean nearness."""
        jobs = [self._plan.nearness[self._condition, seed] for seed in self._asked.seeds]
        found = [self._store.outcome(job) for job in jobs]
        if not all(found):
            return None
        nearness = {
            int(class_id): sum(one[class_id] for one in found) / len(found) for class_id in found[0]
        }
        return gains(gain, class_ids, nearness, self._dataset.class_names)

    def _class_ids(self) -> Tensor:
        """Return the classes of every episode ``[E, N]``."""
        job = self._plan.scores[self._asked.reference, self._condition, self._asked.seeds[0]]
        protocol = EpisodeProtocol(**job.recipe["protocol"])
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


def gains(
    values: Tensor, class_ids: Tensor, nearness: dict[int, float], names: Sequence[str]
) -> Found:
    """Set what each class gains beside its nearness to the memory, nearest first.

    Args:
        values: gain by episode and class ``[E, N]``.
        class_ids: ``[E, N]``.
        nearness: by class id.
        names: by class id.
    """
    classes, member = class_ids.flatten().unique(return_inverse=True)
    gain = torch.bincount(member, values.flatten()) / torch.bincount(member)
    near = torch.tensor([nearness[c] for c in classes.tolist()], dtype=torch.float64)
    listed = zip(classes.tolist(), near.tolist(), gain.tolist(), strict=True)
    return {
        "spearman": number(spearman(near, gain)),
        "classes": [
            {"class": names[class_id], "nearness": nearness_of_it, "gain": gain_of_it}
            for class_id, nearness_of_it, gain_of_it in sorted(listed, key=lambda one: -one[1])
        ],
    }
