"""What the memory holds: parts of it, and how near test classes are to it."""

import torch
from torch.nn import functional as F

from vsm.evaluation.comparison import EpisodeProtocol, LoadedRun
from vsm.memory import Memory, SlotMemory
from vsm.seeding import generator


def chosen_slots(memory: Memory, size: int, subset: int, seed: int) -> Memory:
    """Return the memory of its first slots for subset 0, and of random ones for the others.

    A memory whose slots do not stand for classes has no subset but its first slots.
    """
    if subset == 0 or not isinstance(memory, SlotMemory):
        return memory.first(size)
    order = torch.randperm(len(memory), generator=generator(seed, "slots", size, subset))
    return memory.keep(order[:size].sort().values.to(memory.class_ids.device))


@torch.no_grad()
def nearness_to_slots(run: LoadedRun, protocol: EpisodeProtocol) -> dict[int, float]:
    """Return, by test class, the cosine of its mean feature to the slot that is nearest.

    Both are relative to the mean of all slots if `memory.center_addressing` is true.
    Nothing is near to a memory whose slots do not stand for classes.
    """
    memory = run.trained.memory
    if not isinstance(memory, SlotMemory) or not len(memory):
        return {}
    embed = run.embedder(protocol.sampler(run.dataset))
    classes = run.dataset.classes(protocol.split).tolist()
    means = [embed(torch.from_numpy(run.dataset.image_ids(c))).mean(0) for c in classes]
    features, content = torch.stack(means), memory.content
    if run.trained.settings.memory.center_addressing:
        center = content.mean(0)
        features, content = features - center, content - center
    cosines = F.normalize(features, dim=-1) @ F.normalize(content, dim=-1).mT  # [C, A]
    return dict(zip(classes, cosines.amax(-1).tolist(), strict=True))
