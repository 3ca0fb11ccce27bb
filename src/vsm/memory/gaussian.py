"""The Gaussian memory: class statistics, kept as sums.

It holds the count and mean of every class, and the scatter of the members of all classes about
these means. All of these are sums, so adding classes or images one after the other, merging
memories, and learning everything at once give the same result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Self, get_args

import torch
from torch import Tensor

from vsm.errors import MemoryFileError
from vsm.memory.reader import Decomposition, GaussianReader, unit
from vsm.memory.slots.consolidation import Consolidation
from vsm.memory.state import ClassMemory, Memory, Observations
from vsm.settings import Normalization

NORMALIZATIONS: tuple[Normalization, ...] = get_args(Normalization)
OF_CLASSES = ("content", "class_ids", "counts", "last_update", "factor_rows", "freedom")


class ReadSettings(NamedTuple):
    """How class statistics are read; the symbols are those of docs/design/gaussian-memory.md.

    Normalizations are those of SimpleShot: ``un`` (none), ``l2n`` (length one), ``cl2n`` (length
    one, less the center, length one again).
    """

    normalization: Normalization = "l2n"
    epsilon: float = torch.inf  # ε, shrinkage of the covariance within classes; infinite: isotropic
    beta: float = torch.inf  # β, shrinkage of that between classes; infinite: to that within them
    rho: float = 0.0  # ρ, how far a new class's expected prototype lies towards what it recalls
    addressing_scale: float = 10.0  # factor on the cosines of Eq. 9
    noise_scale: float = 1.0  # s, factor on both covariances

    @property
    def uses_memory(self) -> bool:
        """Whether reading uses more of the memory than the sizes of two variances."""
        return min(self.epsilon, self.beta) < torch.inf or self.rho > 0

    def as_dict(self) -> dict[str, Any]:
        """Return all by their names, ready for JSON."""
        return {name: "inf" if v == torch.inf else v for name, v in self._asdict().items()}

    def tensor(self) -> Tensor:
        """Return all as numbers ``[6]``."""
        numbers = (NORMALIZATIONS.index(self.normalization), *self[1:])
        return torch.tensor(numbers, dtype=torch.float64)

    @staticmethod
    def of(numbers: Tensor) -> "ReadSettings":
        """Return what :meth:`tensor` gave."""
        first, *others = numbers.tolist()
        return ReadSettings(NORMALIZATIONS[int(first)], *others)


@dataclass(frozen=True)
class GaussianMemory(ClassMemory):
    """Means of classes, and the scatter of their members; everything in double precision.

    ``content`` are means of normalized features. The scatter Σ_c Σ_i (h − M_c)(h − M_c)ᵀ is kept in
    two parts: one matrix for the classes that were learned at once, and for what was added since
    the rows F_c of each class with F_cᵀF_c its scatter, so that it can be forgotten.
    """

    center: Annotated[Tensor, "float D"]  # subtracted by cl2n; constant, so that sums stay sums
    factors: Annotated[Tensor, "float R D"]  # the rows F_c of all classes, in the order of slots
    factor_rows: Annotated[Tensor, "int A"]  # how many of them each class has
    freedom: Annotated[Tensor, "int A"]  # degrees of freedom of each class's rows
    shared_scatter: Annotated[Tensor, "float D D"]  # of the classes that were learned at once
    shared_freedom: Annotated[Tensor, "int"]  # its degrees of freedom
    reading: Annotated[Tensor, "float 6"]  # ReadSettings.tensor()

    def __post_init__(self) -> None:
        for name, value in self.tensors().items():  # files may hold less than double precision
            if value.is_floating_point():
                object.__setattr__(self, name, value.double())

    def check(self, width: int | None = None) -> None:
        """See :class:`vsm.Memory`."""
        super().check(width)
        if (self.factor_rows < 0).any() or self.factor_rows.sum() != len(self.factors):
            raise ValueError("its factor_rows are not those of its factors")
        if (self.freedom < 0).any() or self.shared_freedom < 0:
            raise ValueError("its degrees of freedom are negative")
        kind, epsilon, beta, rho, scale, noise = self.reading.tolist()
        if not (
            kind in range(len(NORMALIZATIONS))
            and epsilon > 0
            and beta >= 0
            and 0 <= rho <= 1
            and 0 < scale < torch.inf
            and 0 < noise < torch.inf
        ):
            raise ValueError(f"its read settings {self.reading.tolist()} are invalid")

    @staticmethod
    def empty(center: Tensor, read_settings: ReadSettings) -> "GaussianMemory":
        """Return a memory without classes of features that have ``center [D]``."""
        width, none = len(center), torch.zeros(0, dtype=torch.int64)
        no_rows = torch.zeros(0, width, dtype=torch.float64)
        return GaussianMemory(
            content=no_rows,
            class_ids=none,
            counts=none,
            last_update=none,
            center=center.double(),
            factors=no_rows,
            factor_rows=none,
            freedom=none,
            shared_scatter=torch.zeros(width, width, dtype=torch.float64),
            shared_freedom=torch.zeros((), dtype=torch.int64),
            reading=read_settings.tensor(),
        )

    @staticmethod
    def fit(
        features: Tensor,
        class_ids: Tensor,
        center: Tensor,
        read_settings: ReadSettings,
        keep_factors: bool = False,
    ) -> "GaussianMemory":
        """Learn ``features [P, D]`` of ``class_ids [P]``; factors let classes be forgotten."""
        memory = GaussianMemory.empty(center, read_settings)
        rows = memory.normalize(features)
        if keep_factors:
            return memory.add(rows, class_ids, 0)
        found, members = torch.unique(class_ids.cpu(), return_inverse=True)
        statistics = ClassStatistics.empty(len(found), rows.shape[1]).add(rows, members)
        return memory.from_statistics(statistics, found)

    def from_statistics(self, statistics: "ClassStatistics", class_ids: Tensor) -> "GaussianMemory":
        """Return this empty memory with the statistics of classes ``class_ids [C]``."""
        return replace(
            self._with_new_classes(class_ids),
            content=statistics.means,
            counts=statistics.counts,
            shared_scatter=statistics.scatter,
            shared_freedom=(statistics.counts - 1).sum(),
        )

    @cached_property
    def read_settings(self) -> ReadSettings:
        """How it is read."""
        return ReadSettings.of(self.reading)

    def normalize(self, features: Tensor) -> Tensor:
        """See :class:`vsm.Memory`; the precision of the features is kept."""
        normalization = self.read_settings.normalization
        if normalization == "un":
            return features
        features = unit(features)
        if normalization == "l2n":
            return features
        return unit(features - self.center.to(features))

    def project(self, features: Tensor) -> Tensor:
        """See :class:`vsm.Memory`."""
        return self.reader.to(features.device).project(self.normalize(features))

    @property
    def statistics(self) -> "GaussianMemory":
        """See :class:`vsm.Memory`."""
        return self

    @property
    def coordinates(self) -> Tensor:
        """See :class:`vsm.memory.state.ClassMemory`."""
        return self.reader.slots

    @property
    def within(self) -> Tensor:
        """S_w, the pooled covariance within classes ``[D, D]``; zero where no class has two."""
        freedom = int(self.shared_freedom + self.freedom.sum())
        return (self.shared_scatter + self.factors.mT @ self.factors) / max(freedom, 1)

    @cached_property
    def reader(self) -> GaussianReader:
        """The decomposed statistics, computed on first use."""
        _, epsilon, *others = self.read_settings
        decomposition = Decomposition.of(self.content, self.counts, self.within, epsilon)
        return decomposition.reader(*others)

    def to(self, device: torch.device) -> Self:  # noqa: ARG002 - contract
        """Return itself: sums stay on the CPU, in double precision; the reader can be moved."""
        return self

    def detach(self) -> Self:
        """Return itself: sums are never part of a graph."""
        return self

    def add(self, rows: Tensor, class_ids: Tensor, step: int) -> "GaussianMemory":
        """Add normalized ``rows [P, D]`` of ``class_ids [P]`` as factors; they can be forgotten."""
        batch = _class_sums(rows, class_ids)
        new = replace(
            self,
            content=batch.means,
            class_ids=batch.class_ids,
            counts=batch.counts,
            last_update=torch.full_like(batch.counts, step),
            factors=batch.centered[batch.member.argsort(stable=True)],
            factor_rows=batch.counts,
            freedom=batch.counts - 1,
        )
        return self._joined(new, batch.class_ids)

    def _joined(self, other: "GaussianMemory", class_ids: Tensor) -> "GaussianMemory":
        """Join the classes of ``other``, called ``class_ids`` here; not its shared scatter."""
        memory = self._with_new_classes(class_ids[~torch.isin(class_ids, self.class_ids)])
        slots = memory.find(class_ids)
        old = memory.counts[slots]
        moved, shifts = _join_means(old, memory.content[slots], other.counts, other.content)
        parts = list(memory.factors.split(memory.factor_rows.tolist()))
        added = other.factors.split(other.factor_rows.tolist())
        for position, slot in enumerate(slots.tolist()):
            shift = shifts[position : position + 1] if old[position] else shifts[:0]
            rows = torch.cat([parts[slot], added[position], shift])
            if len(rows) > rows.shape[1]:
                rows = torch.linalg.qr(rows, mode="r").R  # at most D rows with the same FᵀF
            parts[slot] = rows
        updated = memory.last_update.clone()
        updated[slots] = torch.maximum(updated[slots], other.last_update)
        return replace(
            memory,
            content=memory.content.index_add(0, slots, moved),
            counts=memory.counts.index_add(0, slots, other.counts),
            last_update=updated,
            factors=torch.cat([memory.factors[:0], *parts]),
            factor_rows=torch.tensor([len(part) for part in parts], dtype=torch.int64),
            freedom=memory.freedom.index_add(0, slots, other.freedom + (old > 0)),
        )

    def _with_new_classes(self, class_ids: Tensor) -> "GaussianMemory":
        """Append empty slots for ``class_ids``."""
        zeros = self.content.new_zeros(len(class_ids), self.content.shape[1])
        new = dict.fromkeys(OF_CLASSES, torch.zeros_like(class_ids))
        new |= {"content": zeros, "class_ids": class_ids}
        joined = {name: torch.cat([getattr(self, name), rows]) for name, rows in new.items()}
        return replace(self, **joined)

    @property
    def can_be_forgotten(self) -> Tensor:
        """See :class:`vsm.memory.state.ClassMemory`."""
        return self.freedom == self.counts - 1

    def keep(self, slots: Tensor) -> "GaussianMemory":
        """See ``ClassMemory``; of the others only their part of the shared scatter stays."""
        parts = self.factors.split(self.factor_rows.tolist())
        factors = torch.cat([self.factors[:0], *(parts[slot] for slot in slots.tolist())])
        kept = {name: getattr(self, name)[slots] for name in OF_CLASSES}
        return replace(self, factors=factors, **kept)

    def first(self, count: int) -> "GaussianMemory":
        """See :class:`vsm.Memory`; an error where the scatter of the others is not separate."""
        if count >= len(self):
            return self
        if count == 0:
            return GaussianMemory.empty(self.center, ReadSettings(self.read_settings.normalization))
        if not self.can_be_forgotten[count:].all():
            raise MemoryFileError(
                f"memory: the scatter of its {len(self)} classes is kept as one matrix, from which "
                f"that of the first {count} cannot be told apart; learn a memory of these alone, or"
                " one with --gaussian.exact_forgetting true"
            )
        return self.keep(torch.arange(count))

    def merge(self, other: "GaussianMemory", class_ids: Tensor) -> "GaussianMemory":
        """See :class:`vsm.memory.state.ClassMemory`; an equal shared scatter counts once, too."""
        same_space = torch.equal(self.center, other.center)
        if not same_space or self.read_settings.normalization != other.read_settings.normalization:
            raise MemoryFileError(
                "merge: the memories normalize features differently, so their sums cannot be added;"
                " learn one like the other with vsm memory learn --like"
            )
        same = self.same_evidence(other, self.find(class_ids))
        one_scatter = bool(
            same.any() and torch.equal(self.shared_scatter, other.shared_scatter)
        )  # without a class in common, equal scatter is chance, or none at all
        if not one_scatter and not other.can_be_forgotten[same].all():
            raise MemoryFileError(
                "merge: both hold classes that were learned from the same images, whose scatter "
                "cannot be told apart from that of others; learn all classes in one pass"
            )
        new = (~same).nonzero().flatten()
        merged = self._joined(other.keep(new), class_ids[new])
        if one_scatter:
            return merged
        return replace(
            merged,
            shared_scatter=self.shared_scatter + other.shared_scatter,
            shared_freedom=self.shared_freedom + other.shared_freedom,
        )


@dataclass(frozen=True)
class GaussianConsolidation(Consolidation):
    """Adds features to the sums; it has no parameters."""

    num_features: int

    def empty(self) -> GaussianMemory:
        """Return a memory without classes, whose features are scaled to length one."""
        return GaussianMemory.empty(torch.zeros(self.num_features), ReadSettings())

    def __call__(self, memory: Memory, observations: Observations, step: int) -> GaussianMemory:
        """See :class:`Consolidation`."""
        assert isinstance(memory, GaussianMemory)
        return memory.add(memory.normalize(observations.features), observations.class_ids, step)


class ClassStatistics(NamedTuple):
    """Sums of data that may be added in parts, and by several processes."""

    counts: Tensor  # of classes [C]
    means: Tensor  # of classes [C, D]
    scatter: Tensor  # about the means [D, D]

    @staticmethod
    def empty(num_classes: int, width: int) -> "ClassStatistics":
        """Return the statistics of no data."""
        sums = torch.zeros(num_classes + width, width, dtype=torch.float64)
        means, scatter = sums.split([num_classes, width])
        return ClassStatistics(torch.zeros(num_classes, dtype=torch.int64), means, scatter)

    def add(self, rows: Tensor, members: Tensor) -> "ClassStatistics":
        """Take in normalized ``rows [P, D]`` of the classes at ``members [P]``."""
        batch = _class_sums(rows, members)
        ids, old = batch.class_ids, self.counts[batch.class_ids]
        moved, shifts = _join_means(old, self.means[ids], batch.counts, batch.means)
        return ClassStatistics(
            self.counts.index_add(0, ids, batch.counts),
            self.means.index_add(0, ids, moved),
            self.scatter + batch.centered.mT @ batch.centered + shifts.mT @ shifts,
        )

    def summed(self, all_reduce: Callable[[Tensor], Tensor]) -> "ClassStatistics":
        """Join the parts of all processes; ``all_reduce`` sums over them."""
        counts = all_reduce(self.counts)
        sums = all_reduce(self.means * self.counts.unsqueeze(-1))
        means = sums / counts.clamp_min(1).unsqueeze(-1)
        shifts = (self.means - means) * self.counts.double().sqrt().unsqueeze(-1)
        return ClassStatistics(counts, means, all_reduce(self.scatter + shifts.mT @ shifts))


class _ClassSums(NamedTuple):
    class_ids: Tensor  # of the C classes that occur [C]
    counts: Tensor  # [C]
    means: Tensor  # [C, D]
    centered: Tensor  # the rows less the mean of their class [P, D]
    member: Tensor  # the position of each row's class [P]


def _class_sums(rows: Tensor, class_ids: Tensor) -> _ClassSums:
    rows = rows.detach().cpu().double()
    if not rows.isfinite().all():
        raise MemoryFileError(
            "features: some are infinite or not a number, and would spoil every sum; leave these "
            "images out"
        )
    found, member = torch.unique(class_ids.cpu(), return_inverse=True)
    counts = torch.bincount(member, minlength=len(found))
    sums = rows.new_zeros(len(found), rows.shape[1]).index_add(0, member, rows)
    means = sums / counts.unsqueeze(-1)
    return _ClassSums(found, counts, means, rows - means[member], member)


def _join_means(
    counts: Tensor, means: Tensor, new_counts: Tensor, new_means: Tensor
) -> tuple[Tensor, Tensor]:
    """How far the means ``[C, D]`` of classes move, and by which rows their scatter grows.

    The scatter of n old and k new members of a class is the sum of both, and nk/(n + k)·δδᵀ for
    the difference δ of their means: the rows are sqrt(nk/(n + k))·δ.
    """
    apart = new_means - means
    weight = (new_counts / (counts + new_counts).double()).unsqueeze(-1)
    return apart * weight, apart * (counts.unsqueeze(-1) * weight).sqrt()
