"""Maps: classes of the memory, prototypes and examples of a task, in two dimensions.

With class statistics these are the two directions that tell remembered classes apart best; with
other memories, the principal axes of what is shown.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vsm.classify.classifier import Embedded
from vsm.memory.named import NamedMemory
from vsm.serve.classifiers import FittedTask


@dataclass(frozen=True)
class Point:
    """A point of a map."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class TaskMap:
    """Prototypes, examples (by id) and recalled classes of a task in one plane."""

    prototypes: list[Point]
    examples: list[Point]
    recalled: list[Point]


def memory_places(memory: NamedMemory) -> dict[str, tuple[float, float]]:
    """Return the place of every remembered class."""
    if not memory.names:
        return {}
    slots = memory.slots
    plane = _principal if slots.statistics is None else _first_two
    points = plane(slots.coordinates)
    return {name: (x, y) for name, (x, y) in zip(memory.names, points.tolist(), strict=True)}


def task_places(fitted: FittedTask) -> TaskMap:
    """Return the map of a task's prototypes, examples and recalled classes."""
    classifier, support = fitted.classifier, fitted.support
    memory = classifier.memory
    prototypes = classifier.prototypes()
    examples = classifier.coordinates(Embedded(support.features.to(prototypes.device)))
    names = list(dict.fromkeys(one.name for found in fitted.recalled.values() for one in found))
    slots = prototypes[:0]
    if memory is not None and names:
        rows = memory.slots.coordinates
        slots = rows[[memory.places[name] for name in names]].to(prototypes)
    together = torch.cat([prototypes, examples.to(prototypes), slots])
    is_gaussian = memory is not None and memory.memory.statistics is not None
    points = _first_two(together) if is_gaussian else _principal(together)
    parts = points.split([len(prototypes), len(examples), len(names)])
    labels = [map(str, classifier.classes_.tolist()), support.ids, names]
    return TaskMap(
        *(
            [Point(name, x, y) for name, (x, y) in zip(named, part.tolist(), strict=True)]
            for named, part in zip(labels, parts, strict=True)
        )
    )


def _first_two(points: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(points, (0, max(0, 2 - points.shape[1])))
    return padded[:, :2].double()


def _principal(points: Tensor) -> Tensor:
    centered = (points - points.mean(0)).double()
    _, _, axes = torch.linalg.svd(centered, full_matrices=False)
    return _first_two(centered @ axes[:2].mT)
