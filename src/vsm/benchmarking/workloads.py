"""How much work is timed; nothing here imports torch."""

from dataclasses import dataclass

from vsm.errors import SettingsError


@dataclass(frozen=True)
class EpisodeWorkload:
    """Tasks of N classes with K + Q images each, and a memory of so many classes.

    The defaults are the paper's 5-way 1-shot tasks.
    """

    channels: int = 64
    way: int = 5
    shot: int = 1
    queries: int = 15
    memory_samples: int = 100
    prototype_samples: int = 100
    remembered: int = 512


@dataclass(frozen=True)
class StepWorkload(EpisodeWorkload):
    """One training step on T tasks, with the paper's J = 150 and L = 100.

    ``image_size`` 28 is gray as Omniglot is, other sizes are color.
    """

    memory_samples: int = 150
    image_size: int = 28
    tasks: int = 8

    def __post_init__(self) -> None:
        if self.remembered < self.way:
            raise SettingsError(
                f"remembered: a task's {self.way} classes are drawn from the remembered ones, got "
                f"{self.remembered} of them; give at least {self.way}"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(channels, height, width)``."""
        return (1 if self.image_size == 28 else 3), self.image_size, self.image_size

    @property
    def num_images(self) -> int:
        """T · N · (K + Q)."""
        return self.tasks * self.way * (self.shot + self.queries)


@dataclass(frozen=True)
class EvaluationWorkload(EpisodeWorkload):
    """Episodes of the test classes of ``data``; the reference is given fewer of them."""

    data: str = "glyphs"
    episodes: int = 2000
    reference_episodes: int = 600


@dataclass(frozen=True)
class ClassifierWorkload:
    """A shipped model is given N classes of K images each, and asked about ``queries`` others."""

    model: str = "omniglot-vsm"
    way: int = 5
    shot: int = 5
    queries: int = 100


@dataclass(frozen=True)
class StatisticsWorkload:
    """Class statistics of so many features and classes take in one more class, and are read."""

    num_features: int = 256
    remembered: int = 100
    images: int = 20


Workload = StepWorkload | EvaluationWorkload | ClassifierWorkload | StatisticsWorkload
WORKLOADS: dict[str, type[Workload]] = {
    one.__name__: one
    for one in (StepWorkload, EvaluationWorkload, ClassifierWorkload, StatisticsWorkload)
}
