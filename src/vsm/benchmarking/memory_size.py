"""What recall and consolidation cost; ``workload.remembered`` is the number of slots A."""

import torch
from torch import Tensor

from vsm.benchmarking.step import episode_classes, remembered, run_settings
from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import StepWorkload
from vsm.memory import Observations, Recollection, SlotConsolidation, SlotMemory, SupportSet
from vsm.model import FewShotModel
from vsm.seeding import generator, uniform


def recalls(workload: StepWorkload) -> Work:
    """Return one recall for the classes of a batch, as an evaluation does it."""
    model, memory, class_ids = _parts(workload)
    support, random = _support(model, class_ids), generator(0, "noise")
    recall = model.recall
    assert recall is not None
    return torch.no_grad()(lambda: recall(support, memory, None, workload.memory_samples, random))


def recalls_with_gradient(workload: StepWorkload) -> Work:
    """Return one recall as training does it: own classes hidden, forward and backward."""
    model, memory, class_ids = _parts(workload)
    support, random = _support(model, class_ids), generator(0, "noise")
    support.mean.requires_grad_()
    content = memory.content.requires_grad_()  # consolidation makes it part of the graph
    recall = model.recall
    assert recall is not None

    def recall_and_differentiate() -> None:
        model.zero_grad(set_to_none=True)
        support.mean.grad = content.grad = None
        slot_mask = memory.slot_mask(class_ids, model.settings.memory.mask)
        recollection: Recollection = recall(
            support, memory, slot_mask, workload.memory_samples, random
        )
        (recollection.samples.sum() + recollection.divergence.sum()).backward()

    return recall_and_differentiate


def consolidations(workload: StepWorkload) -> Work:
    """Return the update of the memory by one batch, forward and backward."""
    model, memory, class_ids = _parts(workload)
    consolidation = model.consolidation
    assert isinstance(consolidation, SlotConsolidation)
    nodes = class_ids.flatten().repeat_interleave(workload.shot + workload.queries)
    features = uniform(generator(0, "features"), len(nodes), model.num_features)
    observations = Observations(features, nodes)

    def consolidate() -> SlotMemory:
        model.zero_grad(set_to_none=True)
        updated: SlotMemory = consolidation(memory, observations, 1)
        updated.content.sum().backward()
        return updated

    return consolidate


def _parts(workload: StepWorkload) -> tuple[FewShotModel, SlotMemory, Tensor]:
    """Return a model, its memory, and the classes of a batch ``[T, N]``."""
    model = FewShotModel(run_settings(workload, "vsm"), workload.image_shape)
    memory = remembered(model, workload.remembered)
    assert isinstance(memory, SlotMemory)
    return model, memory, episode_classes(workload, 0)


def _support(model: FewShotModel, class_ids: Tensor) -> SupportSet:
    mean = uniform(generator(0, "support"), *class_ids.shape, model.num_features)
    return SupportSet(mean.unsqueeze(2), mean)
