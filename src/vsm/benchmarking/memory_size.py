"""What recall and consolidation cost; ``workload.remembered`` is the number of slots A."""

import torch
from torch import Tensor

from vsm.benchmarking.step import episode_classes, remembered, run_settings
from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import StepWorkload
from vsm.memory import Memory, Observations, Recollection
from vsm.model import FewShotModel
from vsm.seeding import generator, uniform


def recalls(workload: StepWorkload) -> Work:
    """Return one recall for the classes of a batch, as an evaluation does it."""
    model, memory, support_mean, _ = _parts(workload)
    random = generator(0, "noise")

    def recall() -> Recollection:
        with torch.no_grad():
            recollection: Recollection = model.recall(
                support_mean, memory.content, None, workload.memory_samples, random
            )
            return recollection

    return recall


def recalls_with_gradient(workload: StepWorkload) -> Work:
    """Return one recall as training does it: own classes hidden, forward and backward."""
    model, memory, support_mean, class_ids = _parts(workload)
    support_mean.requires_grad_()
    content = memory.content.requires_grad_()  # consolidation makes it part of the graph
    random = generator(0, "noise")

    def recall() -> None:
        model.zero_grad(set_to_none=True)
        support_mean.grad = content.grad = None
        hidden = memory.hidden_from(class_ids, model.settings.memory.mask)
        recollection: Recollection = model.recall(
            support_mean, content, hidden, workload.memory_samples, random
        )
        (recollection.samples.sum() + recollection.divergence.sum()).backward()

    return recall


def consolidations(workload: StepWorkload) -> Work:
    """Return the update of the memory by one batch, forward and backward."""
    model, memory, _, class_ids = _parts(workload)
    per_class = workload.shot + workload.queries
    nodes = class_ids.flatten().repeat_interleave(per_class)
    features = uniform(generator(0, "features"), len(nodes), model.num_features)
    observations = Observations(features, nodes)

    def consolidate() -> Memory:
        model.zero_grad(set_to_none=True)
        updated: Memory = model.consolidation(memory, observations, 1)
        updated.content.sum().backward()
        return updated

    return consolidate


def _parts(workload: StepWorkload) -> tuple[FewShotModel, Memory, Tensor, Tensor]:
    """Return a model, its memory, support means ``[T, N, D]`` and classes ``[T, N]``."""
    model = FewShotModel(run_settings(workload, "vsm"), workload.image_shape)
    memory = remembered(workload.remembered, model.num_features)
    class_ids = episode_classes(workload, 0)
    support_mean = uniform(generator(0, "support"), *class_ids.shape, model.num_features)
    return model, memory, support_mean, class_ids
