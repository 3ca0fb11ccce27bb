"""What recall and consolidation cost; ``workload.remembered`` is the number of slots A."""

import torch
from torch import Tensor

from vsm.benchmarking.step import episode_classes, remembered, run_settings
from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import StepWorkload
from vsm.memory import Observations, Recall, Recollection, SlotConsolidation, SlotMemory, SupportSet
from vsm.model import FewShotModel
from vsm.seeding import generator, uniform


def recalls(workload: StepWorkload) -> Work:
    """Return one recall for the classes of a batch, as an evaluation does it."""
    _, memory, support, _, recall_from = _parts(workload)
    random = generator(0, "noise")

    def recall() -> Recollection:
        with torch.no_grad():
            recollection: Recollection = recall_from(
                support, memory, None, workload.memory_samples, random
            )
            return recollection

    return recall


def recalls_with_gradient(workload: StepWorkload) -> Work:
    """Return one recall as training does it: own classes hidden, forward and backward."""
    model, memory, support, class_ids, recall_from = _parts(workload)
    support.mean.requires_grad_()
    content = memory.content.requires_grad_()  # consolidation makes it part of the graph
    random = generator(0, "noise")

    def recall() -> None:
        model.zero_grad(set_to_none=True)
        support.mean.grad = content.grad = None
        slot_mask = memory.slot_mask(class_ids, model.settings.memory.mask)
        recollection: Recollection = recall_from(
            support, memory, slot_mask, workload.memory_samples, random
        )
        (recollection.samples.sum() + recollection.divergence.sum()).backward()

    return recall


def consolidations(workload: StepWorkload) -> Work:
    """Return the update of the memory by one batch, forward and backward."""
    model, memory, _, class_ids, _ = _parts(workload)
    assert isinstance(model.consolidation, SlotConsolidation)
    take_in = model.consolidation
    per_class = workload.shot + workload.queries
    nodes = class_ids.flatten().repeat_interleave(per_class)
    features = uniform(generator(0, "features"), len(nodes), model.num_features)
    observations = Observations(features, nodes)

    def consolidate() -> SlotMemory:
        model.zero_grad(set_to_none=True)
        updated: SlotMemory = take_in(memory, observations, 1)
        updated.content.sum().backward()
        return updated

    return consolidate


def _parts(
    workload: StepWorkload,
) -> tuple[FewShotModel, SlotMemory, SupportSet, Tensor, Recall]:
    """Return a model, its memory, support means, classes ``[T, N]``, and the model's recall."""
    model = FewShotModel(run_settings(workload, "vsm"), workload.image_shape)
    memory = remembered(model, workload.remembered)
    assert isinstance(memory, SlotMemory)
    class_ids = episode_classes(workload, 0)
    support_mean = uniform(generator(0, "support"), *class_ids.shape, model.num_features)
    support = SupportSet(support_mean.unsqueeze(2), support_mean)
    assert model.recall is not None
    return model, memory, support, class_ids, model.recall
