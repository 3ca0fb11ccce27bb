"""What the parts of a training step cost, for the estimates of ``vsm reproduce``.

Backbones forward and backward, a megapixel; everything after the features, a class and latent
memory, and a query, class and prototype; the rest of a step. CPU time of one thread, which other
work on the machine lengthens little; the quickest of a few tries. Prints the JSON that
src/vsm/reproduction/costs.json holds.

    OMP_NUM_THREADS=1 python benchmarks/reproduction_costs.py
"""

import json
import time
from dataclasses import replace

import torch

from vsm.memory import SlotMemory
from vsm.model import FewShotModel
from vsm.objective import objective
from vsm.reproduction.costs import quickest, time_backbone, time_reference
from vsm.runs.trained_model import TrainingState
from vsm.seeding import generator
from vsm.settings import ModelSettings, RunSettings, SamplingSettings
from vsm.system.allocator import keep_allocations
from vsm.training import build_optimizer, training_step

CLOCK = time.process_time
TASKS, WAY, QUERIES, SLOTS = 4, 5, 15, 64
WIDTHS = (  # backbone, channels, side of its images, images at once
    ("conv4", 64, 84, 16),
    ("conv4", 32, 28, 64),
    ("resnet12", 64, 84, 4),
    ("resnet12", 8, 28, 32),
    ("wrn28_10", 64, 84, 1),
    ("wrn28_10", 4, 28, 32),
)


def megapixel_seconds(backbone: str, channels: int, side: int, images: int) -> float:
    seconds = time_backbone(backbone, channels, side, images, 3, CLOCK)
    return 1e6 * seconds / (images * side**2)


def head_seconds(num_memories: int, num_prototypes: int) -> float:
    """Time recall, inference, classification, objective and their backward pass."""
    sampling = SamplingSettings(train_memory=num_memories, train_prototypes=num_prototypes)
    inference = ModelSettings(inference="network")  # as all budgets have it
    settings = RunSettings(
        tasks=TASKS, way=WAY, queries=QUERIES, model=inference, sampling=sampling
    )
    model = FewShotModel(settings, (1, 28, 28))
    random = generator(0, "costs")
    features = torch.rand(TASKS, WAY, 1 + QUERIES, model.num_features, generator=random)
    support, queries = features.split([1, QUERIES], 2)
    slots = torch.rand(SLOTS, model.num_features, generator=random)
    counts = torch.ones(SLOTS, dtype=torch.int64)
    memory = SlotMemory(slots, torch.arange(SLOTS), counts, counts)

    def work() -> None:
        prediction = model(support, queries, memory, random)
        objective(prediction, model.prior(queries), settings.objective).total.backward()

    return quickest(work, 5, CLOCK)


def step_seconds() -> float:
    """Time a step of the smallest network on the fewest images: what every step costs."""
    settings = RunSettings(
        method="protonet", tasks=1, way=2, queries=1, model=ModelSettings(channels=4)
    )
    model = FewShotModel(settings, (1, 28, 28))
    optimizer = build_optimizer(model, settings.optimizer)
    inputs = torch.rand(1, 2, 2, 1, 28, 28, generator=generator(0, "costs"))
    state = TrainingState(step=1, memory=None, pending=None)
    ids = torch.arange(2).unsqueeze(0)
    return quickest(lambda: training_step(model, optimizer, inputs, ids, replace(state)), 5, CLOCK)


def rounded(value: float) -> float:
    return float(f"{value:.2g}")


def main() -> None:
    keep_allocations()
    torch.set_num_threads(1)
    many, fewer_memories, fewer_prototypes = (
        head_seconds(150, 100),
        head_seconds(50, 100),
        head_seconds(150, 20),
    )
    costs = {
        "reference_seconds": rounded(time_reference(CLOCK)),
        "seconds_per_step": rounded(step_seconds()),
        "seconds_per_memory": rounded((many - fewer_memories) / (100 * TASKS * WAY)),
        "seconds_per_distance": rounded(
            (many - fewer_prototypes) / (80 * TASKS * WAY * WAY * QUERIES)
        ),
        "seconds_per_megapixel": {
            f"{backbone}-{channels}": rounded(megapixel_seconds(backbone, channels, side, images))
            for backbone, channels, side, images in WIDTHS
        },
    }
    print(json.dumps(costs, indent=2))


if __name__ == "__main__":
    main()
