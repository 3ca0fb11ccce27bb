"""Sizes of the benchmarks; nothing here imports torch."""

from dataclasses import dataclass

from vsm.errors import SettingsError


@dataclass(frozen=True)
class EpisodeWorkload:
    """The paper's 5-way 1-shot tasks, and a memory of ``remembered`` classes."""

    channels: int = 64
    way: int = 5
    shot: int = 1
    queries: int = 15
    memory_samples: int = 100
    prototype_samples: int = 100
    remembered: int = 512


@dataclass(frozen=True)
class StepWorkload(EpisodeWorkload):
    """One training step with J = 150; images of 28×28 are gray, other sizes RGB."""

    memory_samples: int = 150
    image_size: int = 28
    tasks: int = 8

    def __post_init__(self) -> None:
        if self.remembered < self.way:
            raise SettingsError(
                f"remembered: must be at least way = {self.way}, got {self.remembered}"
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
    """Episodes of the test classes of ``data``; the reference evaluates fewer."""

    data: str = "glyphs"
    episodes: int = 2000
    reference_episodes: int = 600


@dataclass(frozen=True)
class ClassifierWorkload:
    """A shipped model, fitted to N classes of K images, classifies ``queries`` others."""

    model: str = "omniglot-vsm"
    way: int = 5
    shot: int = 5
    queries: int = 100


@dataclass(frozen=True)
class PretrainingWorkload:
    """One step of pre-training a ResNet-12 on RGB images of 32×32."""

    channels: int = 32
    images: int = 128
    classes: int = 64


@dataclass(frozen=True)
class StatisticsWorkload:
    """Add one class of ``images`` to class statistics of ``remembered`` classes."""

    num_features: int = 256
    remembered: int = 100
    images: int = 20


@dataclass(frozen=True)
class LoadWorkload:
    """Concurrent requests to a server whose task has N classes of K images.

    Attributes:
        model: the served model.
        way: N.
        shot: K.
        pictures: number of different images; the Python classifier gets them as one batch.
        clients: number of concurrent clients, each with one image per request.
        requests: in total.
        pairs: number of alternations of classifier and clients.
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
            if (value := getattr(self, name)) < smallest:
                option = "repeats" if name == "pairs" else name
                raise SettingsError(f"{option}: must be at least {smallest}, got {value}")

    @property
    def warm_up(self) -> int:
        """Requests before the server's memory is first measured: a tenth."""
        return self.requests // 10

    @property
    def burst(self) -> int:
        """Requests of each alternation; six tenths altogether."""
        return 6 * self.requests // 10 // self.pairs

    @property
    def paced(self) -> int:
        """Requests at half the throughput: a tenth."""
        return self.requests // 10

    @property
    def rest(self) -> int:
        """Remaining requests, before the server's memory is last measured."""
        return self.requests - self.warm_up - self.pairs * self.burst - self.paced


Workload = (
    StepWorkload | PretrainingWorkload | EvaluationWorkload | ClassifierWorkload
    | StatisticsWorkload
)  # fmt: skip
WORKLOADS: dict[str, type[Workload]] = {
    one.__name__: one
    for one in (
        *(StepWorkload, PretrainingWorkload, EvaluationWorkload, ClassifierWorkload),
        StatisticsWorkload,
    )
}
