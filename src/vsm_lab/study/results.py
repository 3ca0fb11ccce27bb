"""From the jobs of a study to its result file."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vsm.data import Dataset, open_dataset
from vsm.evaluation.protocol import EpisodeProtocol
from vsm.evaluation.statistics import crossed_estimate, estimate, spearman, student_quantile
from vsm_lab.results import Cell, class_interval, interval, number, read_cell
from vsm_lab.store import JobStore
from vsm_lab.study.definition import Condition, Found
from vsm_lab.study.plan import StudyPlan

SCORES = ("nll", "ece", "temperature", "calibrated_nll", "calibrated_ece")


def write_results(plan: StudyPlan, store: JobStore) -> Found:
    """Sum up the finished jobs of a study, and write the result file."""
    dataset = open_dataset(plan.asked.data)
    summaries = [_Summary(plan, one, store, dataset) for one in plan.asked.conditions]
    return plan.study.write_results(
        {"runs": plan.records(store), "conditions": [summary.found() for summary in summaries]}
    )


@dataclass(frozen=True)
class _Summary:
    """Sums up one condition of a study."""

    plan: StudyPlan
    condition: Condition
    store: JobStore
    dataset: Dataset

    def found(self) -> Found:
        """Return everything that was found of the condition."""
        asked, condition = self.plan.asked, self.condition
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
            "pairs": [
                {"row": one, "minus": other, **self._difference(rows[one], rows[other], class_ids)}
                for one, other in asked.pairs.items()
            ],
        }
        if is_inductive:
            found["memory_sizes"] = self._memory_sizes(reference)
        if is_inductive and asked.without_memory is not None:
            more = reference.confusions - rows[asked.without_memory].confusions  # [S, E, N, N]
            found["gains"] = self._gains(more.mean(0).diagonal(dim1=1, dim2=2), class_ids)
            found["changes"] = self.store.outcome(self.plan.changes(condition)) or None
        return found

    def _cell(self, label: str) -> Cell:
        seeds = self.plan.asked.seeds
        jobs = [self.plan.score(label, self.condition, seed) for seed in seeds]
        return read_cell(self.store, jobs, seeds)

    def _difference(self, reference: Cell, other: Cell, class_ids: Tensor) -> Found:
        """Return how much more accurate the first is, over episodes and over classes."""
        seed = self.plan.asked.episode_seed
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
        found, asked = [], self.plan.asked
        for size in sorted({size for size in asked.memory_sizes if size < min(slots)}):
            subsets = self.plan.subsets(size)
            cells = [
                [self.plan.cut(self.condition, size, subset, seed) for seed in asked.seeds]
                for subset in subsets
            ]
            accuracies = [read_cell(self.store, c, asked.seeds).values("accuracy") for c in cells]
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

    def _gains(self, values: Tensor, class_ids: Tensor) -> Found | None:
        """Set what each class gains beside its mean nearness to the memory, nearest first.

        ``values`` and ``class_ids`` are by episode and class ``[E, N]``.
        """
        seeds = self.plan.asked.seeds
        found = [self.store.outcome(self.plan.nearness(self.condition, seed)) for seed in seeds]
        if not all(found):
            return None
        classes, member = class_ids.flatten().unique(return_inverse=True)
        gain = torch.bincount(member, values.flatten()) / torch.bincount(member)
        near = [sum(one[str(c)] for one in found) / len(found) for c in classes.tolist()]
        listed = [
            {"class": self.dataset.class_names[class_id], "nearness": nearness, "gain": of_class}
            for class_id, nearness, of_class in zip(
                classes.tolist(), near, gain.tolist(), strict=True
            )
        ]
        return {
            "spearman": number(spearman(torch.tensor(near, dtype=torch.float64), gain)),
            "classes": sorted(listed, key=lambda one: -one["nearness"]),
        }

    def _class_ids(self) -> Tensor:
        """Return the classes of every episode ``[E, N]``."""
        asked = self.plan.asked
        job = self.plan.score(asked.reference, self.condition, asked.seeds[0])
        protocol = EpisodeProtocol(**job.recipe["protocol"])
        sampler = protocol.sampler(self.dataset)
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
