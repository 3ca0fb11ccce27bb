"""N-way K-shot episodes as index tensors, drawn many at a time from a generator."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vsm.data.dataset import Dataset, Split
from vsm.errors import EpisodeError
from vsm.seeding import generator

EVALUATION_BLOCK = 50  # episodes drawn from one generator; part of the definition of the list


class EpisodeBatch(NamedTuple):
    """T episodes by position; the first K images of a class are its support, the others queries."""

    class_ids: Tensor  # int64 [T, N], dataset class ids
    image_ids: Tensor  # int64 [T, N, K + Q], positions in the dataset

    def part(self, tasks: range) -> "EpisodeBatch":
        """Return the episodes at these places, one after another, alone."""
        chosen = slice(tasks.start, tasks.stop)
        return EpisodeBatch(self.class_ids[chosen], self.image_ids[chosen])


@dataclass(frozen=True)
class EpisodeSampler:
    """Draws episodes of one shape from a split; building it fails if the split is too small."""

    dataset: Dataset
    split: Split
    way: int
    shot: int
    queries: int

    def __post_init__(self) -> None:
        for name, minimum in (("way", 2), ("shot", 1), ("queries", 1)):
            if getattr(self, name) < minimum:
                raise EpisodeError(f"{name}: must be at least {minimum}, got {getattr(self, name)}")
        classes = self.dataset.classes(self.split)
        place = f"the {self.split} split of {self.dataset.name}"
        if self.way > len(classes):
            raise EpisodeError(f"way: {self.way} classes asked for, but {place} has {len(classes)}")
        sizes = self.dataset.class_sizes[classes]
        needed = self.shot + self.queries
        if needed > sizes.min():
            smallest = classes[sizes.argmin()]
            raise EpisodeError(
                f"shot + queries: {self.shot} + {self.queries} = {needed} samples of a class asked "
                f"for, but class {self.dataset.class_names[smallest]!r} of {place} holds "
                f"{sizes.min()}"
            )

    def draw(self, num_tasks: int, random: torch.Generator) -> EpisodeBatch:
        """Draw ``num_tasks`` episodes: classes and samples are each drawn without replacement."""
        classes = torch.from_numpy(self.dataset.classes(self.split))
        order = torch.rand(num_tasks, len(classes), generator=random)
        class_ids = classes[order.topk(self.way).indices]  # [T, N]
        sizes = torch.from_numpy(self.dataset.class_sizes)[class_ids]  # [T, N]
        rank = torch.rand(*class_ids.shape, int(sizes.max()), generator=random)
        rank.masked_fill_(torch.arange(rank.shape[-1]) >= sizes.unsqueeze(-1), -1.0)
        within = rank.topk(self.shot + self.queries).indices  # [T, N, K + Q]
        starts = torch.from_numpy(self.dataset.class_starts)[class_ids]
        return EpisodeBatch(class_ids, starts.unsqueeze(-1) + within)

    def evaluation_episodes(self, num_episodes: int, seed: int) -> Iterator[EpisodeBatch]:
        """Yield the first ``num_episodes`` of the one list that this sampler and ``seed`` define.

        Every method is measured on the same list; a longer evaluation begins with a shorter one's.
        """
        key = (self.dataset.name, self.split, self.way, self.shot, self.queries)
        for block, start in enumerate(range(0, num_episodes, EVALUATION_BLOCK)):
            drawn = self.draw(EVALUATION_BLOCK, generator(seed, "evaluation", *key, block))
            yield drawn.part(range(min(EVALUATION_BLOCK, num_episodes - start)))
