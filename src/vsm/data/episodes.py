"""N-way K-shot episodes as index tensors, drawn many at a time from a generator."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsm.data.dataset import Dataset, Split
from vsm.errors import EpisodeError
from vsm.seeding import generator

EVALUATION_BLOCK = 50  # episodes drawn from one generator; part of the definition of the list

Proportions = float | tuple[float, ...] | Literal["balanced"]
"""How many queries each class has: equally many, as drawn from Dirichlet(α), or by N weights."""


class EpisodeBatch(NamedTuple):
    """T episodes by position; the first K images of a class are its support, the others queries."""

    class_ids: Tensor  # int64 [T, N], dataset class ids
    image_ids: Tensor  # int64 [T, N, K + Q], positions in the dataset

    def part(self, tasks: range) -> "EpisodeBatch":
        """Return the episodes at these places, one after another, alone."""
        chosen = slice(tasks.start, tasks.stop)
        return EpisodeBatch(self.class_ids[chosen], self.image_ids[chosen])


class EvaluationBatch(NamedTuple):
    """T episodes to be measured on, by position; the queries of a task are one set."""

    class_ids: Tensor  # int64 [T, N], dataset class ids
    support_ids: Tensor  # int64 [T, N, K], positions in the dataset
    query_ids: Tensor  # int64 [T, B + O]; the last O are of other classes
    labels: Tensor  # of the first B queries, as positions among the N classes: int64 [T, B]

    def split(self, size: int) -> "Iterator[EvaluationBatch]":
        """Yield parts of at most ``size`` episodes."""
        for parts in zip(*(ids.split(size) for ids in self), strict=True):
            yield EvaluationBatch(*parts)


@dataclass(frozen=True)
class EpisodeSampler:
    """Draws episodes of one shape from a split; building it fails if the split is too small.

    ``queries`` are per class. ``proportions`` other than "balanced" deal as many to the classes
    unequally, and ``outliers`` is the share of images of other classes that are added to them.
    """

    dataset: Dataset
    split: Split
    way: int
    shot: int
    queries: int
    proportions: Proportions = "balanced"
    outliers: float = 0.0

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
        check_query_set(self.proportions, self.outliers, self.way)
        if self.proportions != "balanced" and sizes.min() - self.shot < 2 * self.queries:
            raise EpisodeError(
                f"proportions: {self.queries} queries per class can be dealt unequally where each "
                f"class has {self.shot + 2 * self.queries} samples, but one of {place} has "
                f"{sizes.min()}; lower queries"
            )
        if self.outliers and self.way == len(classes):
            raise EpisodeError(
                f"outliers: {self.outliers} of the queries asked for, but all {self.way} classes "
                f"of {place} are in every task; lower way"
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
        for _, drawn, count in self._blocks(num_episodes, seed):
            yield drawn.part(range(count))

    def _blocks(self, num_episodes: int, seed: int) -> Iterator[tuple[int, EpisodeBatch, int]]:
        """Yield whole blocks with their numbers, and how many episodes of each are wanted."""
        key = (self.dataset.name, self.split, self.way, self.shot, self.queries)
        for block, start in enumerate(range(0, num_episodes, EVALUATION_BLOCK)):
            drawn = self.draw(EVALUATION_BLOCK, generator(seed, "evaluation", *key, block))
            yield block, drawn, min(EVALUATION_BLOCK, num_episodes - start)

    def evaluation_batches(self, num_episodes: int, seed: int) -> Iterator[EvaluationBatch]:
        """Yield the same list with its queries as sets, dealt to the classes by proportions.

        Classes and support do not depend on proportions and outliers.
        """
        classes = self.dataset.classes(self.split)
        starts = torch.from_numpy(self.dataset.class_starts[classes])
        sizes = torch.from_numpy(self.dataset.class_sizes[classes])
        places = torch.zeros(len(self.dataset.class_sizes), dtype=torch.int64)
        places[classes] = torch.arange(len(classes))
        key = (self.dataset.name, self.split, self.way, self.shot, self.queries)
        for block, batch, wanted in self._blocks(num_episodes, seed):
            support, queries = batch.image_ids.split([self.shot, self.queries], 2)
            labels = torch.arange(self.way).repeat_interleave(self.queries)
            drawn = (queries.flatten(1), labels.expand(len(queries), -1))
            shares = self.proportions
            numbers = shares if shares == "balanced" else np.asarray(shares, np.float64)
            asked = (str(numbers), str(float(self.outliers)))
            random = generator(seed, "query-sets", *key, *asked, block)
            pools = ClassPools(starts, sizes, places[batch.class_ids], support)
            count = self.way * self.queries
            if self.proportions != "balanced":
                drawn = pools.draw(count, self.proportions, self.outliers, random)
            elif self.outliers:
                others = pools.draw_others(count, self.outliers, random)
                drawn = (torch.cat([drawn[0], others], 1), drawn[1])
            found = (batch.class_ids, support, *drawn)
            yield EvaluationBatch(*(ids[:wanted] for ids in found))


def check_query_set(proportions: Proportions, outliers: float, way: int) -> None:
    """Raise an error unless query sets of ``way`` classes can be drawn so."""
    if isinstance(proportions, tuple):
        numbers = all(isinstance(one, int | float) and one >= 0 for one in proportions)
        if len(proportions) != way or not numbers or not 0 < sum(proportions) < np.inf:
            raise EpisodeError(f"proportions: expected {way} weights of classes, got {proportions}")
    elif proportions != "balanced" and not (
        isinstance(proportions, int | float) and 0 < proportions < np.inf
    ):
        raise EpisodeError(
            f"proportions: expected balanced, or a number α above 0 for Dirichlet(α), got "
            f"{proportions!r}"
        )
    if not 0 <= outliers < 1:
        raise EpisodeError(f"outliers: expected a share from 0 to below 1, got {outliers}")


class ClassPools(NamedTuple):
    """What the queries of T tasks are drawn from: C classes, less the support of each task.

    Rows of a class follow one another.
    """

    starts: Tensor  # first row of each class [C]
    sizes: Tensor  # [C]
    classes: Tensor  # of each task, as positions [T, N]
    support: Tensor  # rows [T, N, K]

    def draw(
        self,
        count: int,
        proportions: Proportions,
        outliers: float,
        random: torch.Generator,
        alike: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Draw ``count`` rows of the classes of each task, and then outliers: ``[T, B + O]``.

        Also return the labels of the first ``[T, B]``. Every row of class n has the weight w_n over
        the rows of n, and they are drawn without replacement, by the largest of log weight plus
        Gumbel noise. Outliers that are ``alike`` are of one class in each task.
        """
        tasks, way = self.classes.shape
        within = torch.arange(int(self.sizes.max()))
        starts, sizes = self.starts[self.classes], self.sizes[self.classes]  # [T, N]
        used = torch.zeros(tasks, way, len(within), dtype=torch.bool)
        used.scatter_(2, self.support - starts.unsqueeze(-1), True)
        free = (within < sizes.unsqueeze(-1)) & ~used  # [T, N, M]
        chances = self._weights(proportions, random) / free.sum(-1).clamp_min(1)
        keys = (
            chances.log().unsqueeze(-1)
            - torch.empty(free.shape).exponential_(generator=random).log()
        )
        best = keys.masked_fill(~free, -torch.inf).flatten(1).topk(count)
        if best.values.isinf().any():
            raise EpisodeError(
                f"queries: {count} images asked for by the proportions {proportions}, but the "
                "classes of some task have fewer; lower queries"
            )
        labels = best.indices // len(within)
        rows = starts.gather(1, labels) + best.indices % len(within)
        return torch.cat([rows, self.draw_others(count, outliers, random, alike)], 1), labels

    def _weights(self, proportions: Proportions, random: torch.Generator) -> Tensor:
        tasks, way = self.classes.shape
        if isinstance(proportions, tuple):
            return torch.tensor(proportions).expand(tasks, -1)
        if proportions == "balanced":
            return torch.ones(tasks, way)
        numbers = np.random.default_rng(random.initial_seed())
        return (
            torch.from_numpy(numbers.dirichlet(np.full(way, proportions), tasks))
            .float()
            .clamp_min(1e-30)
        )

    def draw_others(
        self, count: int, outliers: float, random: torch.Generator, alike: bool = False
    ) -> Tensor:
        """Draw rows of classes that are not in the task ``[T, O]``, a share of O + ``count``."""
        tasks, count = len(self.classes), round(count * outliers / (1 - outliers))
        if not count:
            return self.support.new_empty(tasks, 0)
        owner = torch.arange(len(self.sizes)).repeat_interleave(self.sizes)
        first = (self.sizes.cumsum(0) - self.sizes)[owner]
        rows = self.starts[owner] + torch.arange(len(owner)) - first
        in_task = torch.zeros(tasks, len(self.sizes), dtype=torch.bool)
        in_task.scatter_(1, self.classes, True)
        if alike:
            order = torch.rand(tasks, len(self.sizes), generator=random)
            chosen = order.masked_fill(in_task, -1).argmax(1, keepdim=True)
            in_task = torch.ones_like(in_task).scatter_(1, chosen, False)
        keys = torch.rand(tasks, len(owner), generator=random).masked_fill(in_task[:, owner], -1)
        best = keys.topk(min(count, len(owner)))
        if count > len(owner) or (best.values < 0).any():
            raise EpisodeError(
                f"outliers: {count} images of other classes asked for, but there are fewer; lower "
                "outliers or queries"
            )
        return rows[best.indices]
