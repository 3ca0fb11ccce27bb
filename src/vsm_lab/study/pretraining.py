"""Studies of pre-trainings: what each ingredient is worth on validation classes, and its time."""

from collections.abc import Sequence
from itertools import product
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from vsm.errors import SettingsError
from vsm.settings import PretrainSettings, own_code
from vsm_lab.document import Block, Table, Text
from vsm_lab.job_files import JobStore, data_checksum
from vsm_lab.jobs import Job, in_order, pretrain_job, with_changes
from vsm_lab.provenance import logged_seconds
from vsm_lab.study.definition import Found, PretrainingStudySettings, Study


class PretrainingPlan:
    """The jobs of a study of pre-trainings; takes what :class:`.runs.StudyPlan` takes."""

    def __init__(self, study: Study, backbones: Sequence[str] = (), **options: Any) -> None:
        assert isinstance(study.settings, PretrainingStudySettings)
        self.study, self.asked, self._backbones = study, study.settings, backbones
        self._options = options
        self._checksum = data_checksum(self.asked.data, {})
        self._cells = list(product(self.asked.rows, self.asked.seeds))
        self.jobs = in_order(self.job(*cell) for cell in self._cells)

    def job(self, label: str, seed: int) -> Job:
        """Return the pre-training of a row; that of its teacher comes before it."""
        changes = {**self.asked.changes, **self.asked.rows[label]}
        teacher = changes.pop("teacher", None)
        before = None if teacher is None else self.job(teacher, seed)
        if teacher is not None:
            changes["distillation.teacher"] = teacher
        base = PretrainSettings(data=self.asked.data, seed=seed)
        settings = with_changes(base, changes, given=self.asked.rows[label])
        own = own_code(settings.backbone)
        if own is not None and own not in self._backbones:
            raise SettingsError(
                f"rows: the study names code that is not part of vsm, {own}; if you trust it, add "
                f"--backbone {own}"
            )
        return pretrain_job(settings, self._checksum, before, **self._options)

    def write_results(self, store: JobStore) -> Found:
        """Summarize the finished jobs, and write the result file."""
        found = []
        for label, seed in self._cells:
            job = self.job(label, seed)
            seconds = logged_seconds(store.run_folder(job))
            record = {"row": label, "seed": seed, "key": job.key, "seconds": seconds}
            found.append({**record, **store.outcome(job)})
        return self.study.write_results({"pretrainings": found})


def pretraining_blocks(results: Found) -> list[Block]:
    """Return the content of the page: a table with a row for every pre-training."""
    asked, rows = results["study"], results["pretrainings"]
    first = rows[0]["validation"]
    shots = list(first["shots"])
    controls = {row["seed"]: row for row in rows if row["row"] == rows[0]["row"]}
    heads = ["", "seed", *(head for shot in shots for head in (f"{shot}-shot", "difference"))]
    listed = [
        [
            row["row"],
            str(row["seed"]),
            *(cell for shot in shots for cell in _cells(row, controls[row["seed"]], shot)),
            str(row["best_epoch"]),
            "" if row["seconds"] is None else f"{row['seconds'] / 60:.1f}",
        ]
        for row in rows
    ]
    return [
        Text(
            f"{asked['data']}, nearest prototype by cosine on validation classes, {first['way']}-"
            f"way, {first['episodes']} episodes of {first['queries']} queries per class, the same "
            "for all rows. Accuracy in percent at the best epoch, and its paired difference to "
            f"'{rows[0]['row']}' with the same seed; 95% intervals over episodes."
        ),
        Table([*heads, "epoch", "minutes"], listed),
    ]


def _cells(row: Found, control: Found, shot: str) -> list[str]:
    """Return accuracy and its paired difference to the control, both in percent."""
    validation = row["validation"]
    accuracy = percent(validation["shots"][shot])
    if row is control:
        return [accuracy, ""]
    questions = validation["way"] * validation["queries"]
    pairs = zip(row["answers"][shot], control["answers"][shot], strict=True)
    more = [100 * (ours - theirs) / questions for ours, theirs in pairs]
    return [accuracy, f"{fmean(more):+.2f} ± {1.96 * stdev(more) / sqrt(len(more)):.2f}"]


def percent(score: Found) -> str:
    """Return accuracy and interval in percent."""
    return f"{100 * score['accuracy']:.2f} ± {100 * score['ci95']:.2f}"
