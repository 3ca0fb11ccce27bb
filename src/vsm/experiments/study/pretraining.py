"""A study of pre-trainings: what each ingredient is worth on validation classes, and its time."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from vsm.errors import SettingsError
from vsm.experiments.changes import with_changes
from vsm.experiments.checksums import data_checksum
from vsm.experiments.jobs import Job, in_order, pretrain_job
from vsm.experiments.provenance import logged_seconds
from vsm.experiments.store import JobStore
from vsm.experiments.study.definition import Found, PretrainingStudySettings, Study
from vsm.settings import PretrainSettings, own_code


class PretrainingPlan:
    """The jobs of a study of pre-trainings. Making a plan computes and writes nothing.

    Args:
        study: what to measure.
        backbones: code of the user's own that may be imported, as ``module:attribute``.
        options: not used; pre-training takes place where torch does by default.
    """

    def __init__(self, study: Study, backbones: Sequence[str] = (), **options: Any) -> None:
        assert isinstance(study.settings, PretrainingStudySettings)
        del options
        self.study, self.asked, self._backbones = study, study.settings, backbones
        self._checksum = data_checksum(self.asked.data, {})
        self.jobs = in_order(self.job(*key) for key in product(self.asked.rows, self.asked.seeds))

    def job(self, label: str, seed: int) -> Job:
        """Return the pre-training of a row; that of its teacher comes before it."""
        changes = {**self.asked.changes, **self.asked.rows[label]}
        teacher = changes.pop("teacher", None)
        before = None if teacher is None else self.job(teacher, seed)
        settings = with_changes(PretrainSettings(data=self.asked.data, seed=seed), changes)
        own = own_code(settings.backbone)
        if own is not None and own not in self._backbones:
            raise SettingsError(
                f"rows: the study names code that is not part of vsm, {own}; if you trust it, add "
                f"--backbone {own}"
            )
        return pretrain_job(settings, self._checksum, before)

    def write_results(self, store: JobStore) -> Found:
        """Sum up the finished jobs, and write the result file."""
        found = []
        for label, seed in product(self.asked.rows, self.asked.seeds):
            job = self.job(label, seed)
            seconds = logged_seconds(store.run_folder(job))
            found.append({"row": label, "seed": seed, "seconds": seconds, **store.outcome(job)})
        return self.study.write_results({"pretrainings": found})
