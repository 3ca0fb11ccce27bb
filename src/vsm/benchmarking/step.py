"""A training step, the bare backbone inside it, and embedding without gradients."""

from itertools import cycle

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vsm.backbones import Backbone
from vsm.benchmarking.timing import Work
from vsm.benchmarking.workloads import EpisodeWorkload, StepWorkload
from vsm.memory import Memory, Observations
from vsm.model import FewShotModel
from vsm.runs.checkpoints import TrainingState
from vsm.seeding import generator, normal, uniform
from vsm.settings import (
    Inference,
    Method,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    SamplingSettings,
)
from vsm.training import build_optimizer, training_step

NUM_BATCHES = 8  # different classes in as many steps
PRODUCT_WIDTH = 1024  # of matrices so large that arithmetic alone decides how long they take


def run_settings(
    workload: EpisodeWorkload, method: Method, inference: Inference = "network"
) -> RunSettings:
    """Return the defaults of a run with the sizes of ``workload``.

    The paper's network is the slower of the two inferences, and the one that draws J memories.
    """
    num_memories = workload.memory_samples if inference == "network" else None
    samples = (num_memories, workload.prototype_samples)
    return RunSettings(
        method=method,
        way=workload.way,
        shot=workload.shot,
        queries=workload.queries,
        model=ModelSettings(inference=inference, channels=workload.channels),
        sampling=SamplingSettings(*samples, *samples),
        optimizer=OptimizerSettings(schedule="constant"),
    )


def episode_images(workload: StepWorkload) -> Tensor:
    """Return noise ``[T, N, K + Q, C, H, W]`` in place of normalized images.

    It is channels-last in memory, as datasets give their images.
    """
    channels, height, width = workload.image_shape
    shape = (workload.tasks, workload.way, workload.shot + workload.queries)
    pixels = normal(generator(0, "images"), *shape, height, width, channels)
    return pixels.movedim(-1, -3)


def remembered(model: FewShotModel, num_classes: int) -> Memory | None:
    """Return the model's memory of ``num_classes`` made-up classes, or None if it has none."""
    features = uniform(generator(0, "memory"), num_classes, model.num_features)
    observations = Observations(features, torch.arange(num_classes))
    with torch.no_grad():
        return model.consolidate(model.empty_memory(), observations, 0)


def episode_classes(workload: StepWorkload, batch: int) -> Tensor:
    """Draw the classes of a batch ``[T, N]`` from the remembered ones; distinct within a task."""
    chances = uniform(generator(0, "classes", batch), workload.tasks, workload.remembered)
    return chances.topk(workload.way).indices


def training_steps(
    workload: StepWorkload, method: Method, inference: Inference = "network"
) -> Work:
    """Return a training step: tensors in; Adam and the update of the memory done."""
    settings = run_settings(workload, method, inference)
    model = FewShotModel(settings, workload.image_shape)
    optimizer = build_optimizer(model, settings.optimizer)
    inputs = episode_images(workload)
    state = TrainingState(step=0, memory=remembered(model, workload.remembered), pending=None)
    batches = cycle([episode_classes(workload, batch) for batch in range(NUM_BATCHES)])

    def step() -> dict[str, float]:
        state.step += 1
        return training_step(model, optimizer, inputs, next(batches), state)

    return step


def backbone_passes(workload: StepWorkload) -> Work:
    """Return forward and backward of the step's backbone alone on the step's images."""
    backbone, images = _backbone_and_images(workload)
    backbone.train()

    def forward_and_backward() -> None:
        backbone.zero_grad(set_to_none=True)
        backbone(images).sum().backward()

    return forward_and_backward


def equal_arithmetic(workload: StepWorkload, method: Method) -> Work:
    """Return as much arithmetic as the convolutions and matrix products of a step, and no more.

    Products of large square matrices use all of a processor: a step that computes the same sums in
    the same way cannot be faster.
    """
    step = training_steps(workload, method)
    step()  # leaves something to consolidate
    with FlopCounterMode(display=False) as counter:
        step()
    num_rows = counter.get_total_flops() / (2 * PRODUCT_WIDTH**2)
    repeats = max(1, round(num_rows / PRODUCT_WIDTH))
    rows = max(1, round(num_rows / repeats))
    left = normal(generator(0, "left"), rows, PRODUCT_WIDTH)
    right = normal(generator(0, "right"), PRODUCT_WIDTH, PRODUCT_WIDTH)
    product = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=product)

    return multiply


def embeddings(workload: StepWorkload) -> Work:
    """Return the embedding of the step's images in evaluation mode."""
    backbone, images = _backbone_and_images(workload)
    backbone.eval()
    return torch.no_grad()(lambda: backbone(images))


def _backbone_and_images(workload: StepWorkload) -> tuple[Backbone, Tensor]:
    model = FewShotModel(run_settings(workload, "protonet"), workload.image_shape)
    return model.require_backbone(), episode_images(workload).flatten(0, 2)
