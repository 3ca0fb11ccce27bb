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
class PretrainingWorkload:
    """One step of pre-training a ResNet-12 on so many color images of 32×32."""

    channels: int = 32
    images: int = 128
    classes: int = 64


@dataclass(frozen=True)
class StatisticsWorkload:
    """Class statistics of so many features and classes take in one more class, and are read."""

    num_features: int = 256
    remembered: int = 100
    images: int = 20


@dataclass(frozen=True)
class LoadWorkload:
    """A server is given N classes of K images each, and then asked by many clients at once.

    Attributes:
        model: that is served.
        way: N.
        shot: K.
        pictures: different ones that are asked; the Python classifier is given all as one batch.
        clients: that ask at the same time, each one picture after another.
        requests: in all.
        pairs: turns of the classifier and the clients.
    """

    model: str = "photos-vsm"
    way: int = 5
    shot: int = 5
    pictures: int = 320
    clients: int = 32
    requests: int = 10_000
    pairs: int = 10

    def __post_init__(self) -> None:
        least = {"pictures": 1, "clients": 1, "pairs": 1, "requests": 10 * self.pairs}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                shown = "repeats" if name == "pairs" else name
                raise SettingsError(
                    f"{shown}: must be at least {smallest}, got {getattr(self, name)}"
                )

    @property
    def settling(self) -> int:
        """Requests after which the server's memory is read first: a tenth."""
        return self.requests // 10

    @property
    def burst(self) -> int:
        """Requests of each of the turns, which have six tenths together."""
        return 6 * self.requests // 10 // self.pairs

    @property
    def paced(self) -> int:
        """Requests at half the throughput: a tenth."""
        return self.requests // 10

    @property
    def rest(self) -> int:
        """What is left: more of the same, until the server's memory is read last."""
        return self.requests - self.settling - self.pairs * self.burst - self.paced


Workload = (
    StepWorkload
    | PretrainingWorkload
    | EvaluationWorkload
    | ClassifierWorkload
    | StatisticsWorkload
)
WORKLOADS: dict[str, type[Workload]] = {
    one.__name__: one
    for one in (
        StepWorkload,
        PretrainingWorkload,
        EvaluationWorkload,
        ClassifierWorkload,
        StatisticsWorkload,
    )
}
