"""A study of pre-trainings: what each ingredient is worth on validation classes, and its time.

Rows that the result file has of the same settings are not trained again, so a study can be
continued on another machine.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from vsm.errors import RunError, SettingsError
from vsm.settings import PretrainSettings, own_code
from vsm_lab.changes import with_changes
from vsm_lab.checksums import data_checksum
from vsm_lab.jobs import Job, in_order, pretrain_job
from vsm_lab.provenance import logged_seconds
from vsm_lab.store import JobStore
from vsm_lab.study.definition import Found, PretrainingStudySettings, Study


class PretrainingPlan:
    """The jobs of a study of pre-trainings. Making a plan computes and writes nothing.

    Args:
        study: what to measure.
        backbones: code of the user's own that may be imported, as ``module:attribute``.
        options: of the jobs: device and precision.
    """

    def __init__(self, study: Study, backbones: Sequence[str] = (), **options: Any) -> None:
        assert isinstance(study.settings, PretrainingStudySettings)
        self.study, self.asked, self._backbones = study, study.settings, backbones
        self._options = options
        self._checksum = data_checksum(self.asked.data, {})
        self._known = self._measured_before()
        self.jobs = in_order(
            self.job(*key)
            for key in product(self.asked.rows, self.asked.seeds)
            if key not in self._known
        )

    def _measured_before(self) -> dict[tuple[str, int], Found]:
        """Return what the result file has of the same pre-trainings, wherever they were made.

        A damaged one has nothing: it is written anew.
        """
        keys = set(product(self.asked.rows, self.asked.seeds))
        try:
            found = self.study.read_results()["pretrainings"]
            known = {(one["row"], one["seed"]): one for one in found}
        except (RunError, LookupError, TypeError):  # there is none, or it is damaged
            return {}
        return {
            key: one
            for key, one in known.items()
            if key in keys and one.get("key") == self.job(*key).key
        }

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
        return pretrain_job(settings, self._checksum, before, **self._options)

    def write_results(self, store: JobStore) -> Found:
        """Sum up the finished jobs, and write the result file."""
        keys = product(self.asked.rows, self.asked.seeds)
        found = [self._known.get(key) or self._found(store, *key) for key in keys]
        return self.study.write_results({"pretrainings": found})

    def _found(self, store: JobStore, label: str, seed: int) -> Found:
        job = self.job(label, seed)
        seconds = logged_seconds(store.run_folder(job))
        record = {"row": label, "seed": seed, "key": job.key, "seconds": seconds}
        return {**record, **store.outcome(job)}
