"""Rows of features of many classes, never more at once than fit into memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vsm.data import Dataset
from vsm.data.dataset import Ids
from vsm.evaluation.evaluator import EMBEDDING_BATCH, embed_images
from vsm.evaluation.memory_choice import ClassFeatures
from vsm.memory import ClassStatistics, GaussianMemory, ReadSettings
from vsm.model import FewShotModel
from vsm.seeding import generator, uniform
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.progress import NULL_PROGRESS, Progress

NUMBERS_AT_ONCE = 1 << 26  # of features, 256 MB
LEAST_ROWS = 20  # of a class that is drawn; rather than fewer, there are fewer classes


@dataclass(frozen=True)
class ClassRows:
    """The images of some classes of a dataset, embedded when they are asked for.

    Attributes:
        model: makes the features.
        dataset: holds the images, or what a backbone made of them.
        classes: their ids in the dataset ``[C]``.
        processes: each embeds the rows that it owns; the others may not even be there.
    """

    model: FewShotModel
    dataset: Dataset
    classes: Ids
    processes: Processes = SINGLE_PROCESS

    @property
    def sizes(self) -> Tensor:
        """Rows of each class ``[C]``."""
        return torch.from_numpy(self.dataset.class_sizes[self.classes])

    def fit_at_once(self) -> bool:
        """Tell whether all of them fit into memory."""
        return int(self.sizes.sum()) * self.model.num_features <= NUMBERS_AT_ONCE

    def drawn(self, seed: int, progress: Progress = NULL_PROGRESS) -> ClassFeatures:
        """Embed all rows, or as many of every class as fit, drawn by ``seed``."""
        starts = torch.from_numpy(self.dataset.class_starts[self.classes])
        chosen, taken = list(range(len(self.classes))), self.sizes
        random = generator(seed, "drawn-rows")
        if not self.fit_at_once():
            rows = NUMBERS_AT_ONCE // self.model.num_features
            most = min(len(self.classes), max(1, rows // LEAST_ROWS))
            order = uniform(random, len(self.classes)).argsort()[:most]
            chosen = order.sort().values.tolist()
            taken = self.sizes.clamp_max(max(1, rows // most))
        places = [
            starts[one] + _some(int(self.sizes[one]), int(taken[one]), random) for one in chosen
        ]
        features = self._embedded(torch.cat(places), progress)
        return ClassFeatures(features, [len(part) for part in places])

    def _embedded(self, image_ids: Tensor, progress: Progress) -> Tensor:
        """Embed rows, and gather those of the other processes ``[B, D]``."""
        owned = self.processes.owned(image_ids, self.dataset.num_samples)
        features = torch.zeros(len(image_ids), self.model.num_features)
        if owned.any():
            features[owned] = embed_images(
                self.model, self.dataset, image_ids[owned], progress
            ).cpu()
        return self.processes.all_reduce(features)

    def remembered(
        self, center: Tensor, read_settings: ReadSettings, progress: Progress = NULL_PROGRESS
    ) -> GaussianMemory:
        """Learn the statistics of all rows in one pass, and those of all processes together."""
        memory = GaussianMemory.empty(center, read_settings)
        statistics = ClassStatistics.empty(len(self.classes), self.model.num_features)
        starts = self.dataset.class_starts[self.classes]
        image_ids = torch.cat(
            [
                torch.arange(start, start + size)
                for start, size in zip(starts.tolist(), self.sizes.tolist(), strict=True)
            ]
        )
        members = torch.arange(len(self.classes)).repeat_interleave(self.sizes)
        owned = self.processes.owned(image_ids, self.dataset.num_samples)
        at_once = max(EMBEDDING_BATCH, NUMBERS_AT_ONCE // (8 * self.model.num_features))
        parts = zip(image_ids[owned].split(at_once), members[owned].split(at_once), strict=True)
        for part, whose in parts:
            features = embed_images(self.model, self.dataset, part, progress).cpu()
            statistics = statistics.add(memory.normalize(features), whose)
        statistics = statistics.summed(self.processes.all_reduce)
        return memory.from_statistics(statistics, torch.from_numpy(self.classes))


def _some(size: int, most: int, random: torch.Generator) -> Tensor:
    """Return ``most`` places below ``size``, all of them if it is no more, in ascending order."""
    if size <= most:
        return torch.arange(size)
    return uniform(random, size).argsort()[:most].sort().values
