"""Learning the Gaussian memory: one pass over labeled images, and no training.

Images → features (:class:`vsm.encoders.Encoder`, each image once) → how the statistics are to be
read (:mod:`vsm.evaluation.memory_choice`) → counts, means and scatter of every class
(:mod:`vsm.memory.gaussian`) → rejection thresholds, and how unlabeled images are used
(:mod:`vsm.evaluation.calibration`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vsm.data import Dataset, Split
from vsm.data.dataset import Ids
from vsm.encoders import Encoder
from vsm.errors import MemoryFileError
from vsm.evaluation import transduction_choice
from vsm.evaluation.calibration import (
    EPISODES,
    NO_CALIBRATION,
    SHOTS,
    WAYS,
    Calibration,
    calibrate,
    calibrate_on_validation,
)
from vsm.evaluation.memory_choice import (
    Choice,
    ClassFeatures,
    choose_read_settings,
    held_out_trials,
)
from vsm.memory import ClassStatistics, GaussianMemory, Memory, ReadSettings
from vsm.memory.named import NamedMemory
from vsm.model import FewShotModel
from vsm.seeding import generator, uniform
from vsm.settings import GaussianSettings, ModelSettings, RunSettings
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.progress import NULL_PROGRESS, Progress

ENCODER_SETTINGS = (
    "backbone", "channels", "keep_probability", "mirror", "shift", "adapter", "normalize_features",
)  # fmt: skip
MOST_FOLDS = 5  # of classes, in which thresholds are measured
NUMBERS_AT_ONCE = 1 << 26  # of features, 256 MB
LEAST_ROWS = 20  # of a class that is drawn; rather than fewer rows, fewer classes are drawn


class LearnedStatistics(NamedTuple):
    """Class statistics, how they are read, and what was measured on left-out classes, if any."""

    memory: GaussianMemory
    choice: Choice
    calibration: Calibration


class LearnedMemory(NamedTuple):
    """A memory with names, and the model that reads it."""

    model: FewShotModel
    memory: NamedMemory
    calibration: Calibration


def learn_memory(
    encoder: Encoder,
    dataset: Dataset,
    settings: GaussianSettings,
    *,
    data: str | None = None,
    num_classes: int | None = None,
    like: NamedMemory | None = None,
    seed: int = 0,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> LearnedMemory:
    """Learn a memory of the training classes of ``dataset``, or of all if its splits are merged.

    If the encoder was trained on the same data, validation classes decide how the memory is read.
    Where the features do not fit into memory, some of every class decide, and all are remembered.

    ``data`` is the name that ``open_data`` opened ``dataset`` by; unset: its own. What ``settings``
    leave unset is chosen on episodes of ``seed``. Only the first ``num_classes`` are remembered.
    The memory can be merged with ``like``. Processes share the rows, and all learn the same one.
    """
    data = dataset.name if data is None else data
    model = gaussian_model(encoder, data, settings, seed)
    merged_with = None
    if like is not None:
        like.require_encoder(encoder.identity, "like")
        merged_with = like.memory.statistics
        if merged_with is None:
            raise MemoryFileError("like: has no class statistics; learn it with vsm memory learn")
    classes = dataset.classes("all" if "all" in dataset.splits else "train")
    if num_classes is not None and not 1 <= num_classes <= len(classes):
        raise MemoryFileError(
            f"classes: expected 1 to {len(classes)}, those of {data}, got {num_classes}"
        )
    classes = classes[:num_classes]
    rows = ClassRows(encoder, dataset, classes, processes)
    validation = None
    known = rows.drawn(seed, progress)
    if encoder.data == data and "validation" in dataset.splits:
        others = replace(rows, classes=dataset.classes("validation"))
        validation = others.drawn(seed, progress)
    remembered = None if rows.fit_at_once() else partial(rows.remembered, progress=progress)
    learned = learn_statistics(
        model, known, torch.from_numpy(classes), validation, merged_with, remembered=remembered
    )
    names = tuple(dataset.class_names[one] for one in learned.memory.slot_classes)
    named = name_memory(model, learned, names, int(rows.sizes.sum()))
    calibration = learned.calibration
    if validation is not None:
        calibration = calibrate_on_validation(model, learned.memory, dataset)
    return LearnedMemory(model, named, calibration)


def gaussian_model(
    encoder: Encoder, data: str, settings: GaussianSettings, seed: int
) -> FewShotModel:
    """Return a model that reads class statistics of the features of ``encoder``."""
    chosen = {name: getattr(encoder.settings, name) for name in ENCODER_SETTINGS}
    run = RunSettings(
        data=data,
        method="vsm",
        seed=seed,
        init=encoder.source,
        model=ModelSettings(inference="gaussian", **chosen),
        gaussian=settings,
    )
    return FewShotModel(run, encoder).to(encoder.placement.device).eval()


def learn_statistics(
    model: FewShotModel,
    known: ClassFeatures,
    class_ids: Tensor,
    validation: ClassFeatures | None,
    like: GaussianMemory | None = None,
    with_calibration: bool = True,
    remembered: Callable[[Tensor, ReadSettings], GaussianMemory] | None = None,
) -> LearnedStatistics:
    """Choose how to read the statistics of classes, and learn them.

    Args:
        model: of gaussian inference; what its settings set is not chosen.
        known: the classes to remember.
        class_ids: what the memory calls them ``[C]``.
        validation: other classes; None: the choice is made by leaving remembered ones out.
        like: a memory that the new one can be merged with.
        with_calibration: calibrate too, if there are no validation classes.
        remembered: gives the statistics of more rows than ``known``, by center and read settings.
    """
    settings, seed = model.settings.gaussian, model.settings.seed
    if not known.sizes:
        raise MemoryFileError("memory: there is no class to learn")
    if not known.features.isfinite().all():
        raise MemoryFileError(
            "features: some are infinite or not a number; is the encoder damaged, or an image?"
        )
    given_center = None if like is None else like.center.float()
    center = known.center if given_center is None else given_center
    if like is not None:
        settings = replace(settings, normalization=like.read_settings.normalization)
    choice = choose_read_settings(known, validation, settings, seed, given_center)
    if remembered is None:
        rows = class_ids.repeat_interleave(torch.tensor(known.sizes))
        memory = GaussianMemory.fit(
            known.features, rows, center, choice.read_settings, settings.exact_forgetting
        )
    elif settings.exact_forgetting:
        raise MemoryFileError(
            "exact_forgetting: is not supported for so many images, whose features do not fit into "
            "memory; leave it out, or learn parts with --like and merge them"
        )
    else:
        memory = remembered(center, choice.read_settings)
    calibration = NO_CALIBRATION
    if validation is None and with_calibration:
        calibration = _held_out_calibration(model, known, choice, given_center)
    return LearnedStatistics(memory, choice, calibration)


def name_memory(
    model: FewShotModel, learned: LearnedStatistics, names: tuple[str, ...], images: int
) -> NamedMemory:
    """Give class names to what was learned, and record how its reading was chosen."""
    event = {
        "action": "learned",
        "data": model.settings.data,
        "classes": len(names),
        "images": images,
        "choice": learned.choice.as_dict(),
    }
    identity = model.encoder.identity
    return NamedMemory(learned.memory, names, identity, (event,), model.settings.method)


def class_features(
    encoder: Encoder, dataset: Dataset, split: Split, progress: Progress = NULL_PROGRESS
) -> ClassFeatures:
    """Return the features of a split."""
    image_ids = torch.from_numpy(dataset.split_ids(split))
    features = encoder.features(dataset, image_ids, progress).cpu()
    return ClassFeatures(features, dataset.class_sizes[dataset.classes(split)].tolist())


def _held_out_calibration(
    model: FewShotModel, known: ClassFeatures, choice: Choice, center: Tensor | None
) -> Calibration:
    """Measure on remembered classes, in folds, each with the statistics of the others.

    Folds are just large enough for the largest tasks, since the final memory holds all classes.
    """
    way, seed = WAYS[-1], model.settings.seed
    folds = min(max(2, len(known.sizes) // way), MOST_FOLDS)
    trials = held_out_trials(
        known, None, SHOTS, seed, center, most_way=way, count=2 * EPISODES, folds=folds
    )
    if not trials:
        return NO_CALIBRATION
    memories = [trial.memory(choice.read_settings) for trial in trials]

    def episodes(shot: int) -> list[tuple[Memory | None, Tensor, Tensor]]:
        found: list[tuple[Memory | None, Tensor, Tensor]] = []
        for trial, memory in zip(trials, memories, strict=True):
            support, queries = (trial.others.features[rows] for rows in trial.episodes[shot])
            found.append((memory, support.to(model.device), queries.to(model.device)))
        return found

    pairs = zip(memories, trials, strict=True)
    left_out = [transduction_choice.Trial(memory, trial.others) for memory, trial in pairs]
    return calibrate(model, episodes, list(trials[0].episodes), left_out, seed)


@dataclass(frozen=True)
class ClassRows:
    """The images of ``classes [C]`` of a dataset, embedded when they are asked for.

    Each of several processes embeds the rows that it owns; it need not have the others.
    """

    encoder: Encoder
    dataset: Dataset
    classes: Ids
    processes: Processes = SINGLE_PROCESS

    @property
    def sizes(self) -> Tensor:
        """Rows of each class ``[C]``."""
        return torch.from_numpy(self.dataset.class_sizes[self.classes])

    def fit_at_once(self) -> bool:
        """Whether all of them fit into memory."""
        return int(self.sizes.sum()) * self.encoder.num_features <= NUMBERS_AT_ONCE

    def drawn(self, seed: int, progress: Progress = NULL_PROGRESS) -> ClassFeatures:
        """Embed all rows, or as many of every class as fit, drawn by ``seed``."""
        classes = self.classes
        most = self.dataset.num_samples  # of a class
        random = generator(seed, "drawn-rows")
        if not self.fit_at_once():
            rows = NUMBERS_AT_ONCE // self.encoder.num_features
            count = min(len(classes), max(1, rows // LEAST_ROWS))
            classes = classes[_drawn(len(classes), count, random).numpy()]
            most = max(1, rows // count)
        places = [torch.from_numpy(self.dataset.image_ids(one)) for one in classes]
        places = [
            part if len(part) <= most else part[_drawn(len(part), most, random)] for part in places
        ]
        image_ids = torch.cat(places)
        owned = self.processes.owned(image_ids, self.dataset.num_samples)
        features = torch.zeros(len(image_ids), self.encoder.num_features)
        features[owned] = self.encoder.features(self.dataset, image_ids[owned], progress).cpu()
        return ClassFeatures(self.processes.all_reduce(features), [len(part) for part in places])

    def remembered(
        self, center: Tensor, read_settings: ReadSettings, progress: Progress = NULL_PROGRESS
    ) -> GaussianMemory:
        """Learn the statistics of all rows in one pass, and those of all processes together."""
        memory = GaussianMemory.empty(center, read_settings)
        statistics = ClassStatistics.empty(len(self.classes), self.encoder.num_features)
        image_ids = torch.cat([torch.from_numpy(self.dataset.image_ids(c)) for c in self.classes])
        members = torch.arange(len(self.classes)).repeat_interleave(self.sizes)
        owned = self.processes.owned(image_ids, self.dataset.num_samples)
        rows_at_once = NUMBERS_AT_ONCE // (8 * self.encoder.num_features)
        at_once = max(self.encoder.batch_size, rows_at_once)
        parts = zip(image_ids[owned].split(at_once), members[owned].split(at_once), strict=True)
        for part, whose in parts:
            features = self.encoder.features(self.dataset, part, progress, keep=False).cpu()
            statistics = statistics.add(memory.normalize(features), whose)
        statistics = statistics.summed(self.processes.all_reduce)
        return memory.from_statistics(statistics, torch.from_numpy(self.classes))


def _drawn(size: int, count: int, random: torch.Generator) -> Tensor:
    """Return ``count`` positions below ``size``, in ascending order."""
    return uniform(random, size).argsort()[:count].sort().values
