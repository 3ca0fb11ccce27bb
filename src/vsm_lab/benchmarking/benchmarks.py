"""Benchmarks of training steps, evaluations, the memory and the classifier.

Each function sets up a benchmark and returns it.
"""

from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vsm import training
from vsm.classify import FewShotClassifier
from vsm.data import EpisodeSampler, ImageDataset, open_images
from vsm.encoders import Backbone
from vsm.evaluation.evaluator import evaluate
from vsm.memory import (
    GaussianMemory,
    Memory,
    Observations,
    ReadSettings,
    Recollection,
    SlotConsolidation,
    SlotMemory,
    SupportSet,
)
from vsm.model import FewShotModel
from vsm.pretraining import learner
from vsm.pretraining.supervised import Batch, SupervisedNetwork
from vsm.runs.checkpoints import TrainingState
from vsm.runs.trained_model import TrainedModel, load
from vsm.seeding import generator, normal, uniform
from vsm.settings import (
    Inference,
    Method,
    ModelSettings,
    OptimizerSettings,
    PretrainSettings,
    RunSettings,
    SamplingSettings,
)
from vsm.system.devices import Precision, choose_placement
from vsm_lab.benchmarking.timing import Benchmark
from vsm_lab.benchmarking.workloads import (
    ClassifierWorkload,
    EpisodeWorkload,
    EvaluationWorkload,
    PretrainingWorkload,
    StatisticsWorkload,
    StepWorkload,
)

IMAGE_SHAPE = (3, 32, 32)  # of pre-training
NUM_BATCHES = 8  # different classes in as many steps
PRODUCT_WIDTH = 1024  # of matrices so large that arithmetic alone decides how long they take
EVALUATION_SEED = 0  # of the list of episodes; the reference's are the first of the same list
Pixels = npt.NDArray[np.uint8]


def run_settings(
    workload: EpisodeWorkload, method: Method, inference: Inference = "network"
) -> RunSettings:
    """Return default settings with the sizes of ``workload``; only the network samples memories."""
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
    """Return noise ``[T, N, K + Q, C, H, W]``, channels-last in memory as datasets are."""
    channels, height, width = workload.image_shape
    shape = (workload.tasks, workload.way, workload.shot + workload.queries)
    pixels = normal(generator(0, "images"), *shape, height, width, channels)
    return pixels.movedim(-1, -3)


def remembered(model: FewShotModel, num_classes: int) -> Memory | None:
    """Return a memory of ``num_classes`` random classes; None if the model has no memory."""
    features = uniform(generator(0, "memory"), num_classes, model.num_features)
    observations = Observations(features, torch.arange(num_classes))
    with torch.no_grad():
        return model.consolidate(model.empty_memory(), observations, 0)


def episode_classes(workload: StepWorkload, batch: int) -> Tensor:
    """Draw the classes of a batch ``[T, N]`` from the remembered ones, distinct within a task."""
    chances = uniform(generator(0, "classes", batch), workload.tasks, workload.remembered)
    return chances.topk(workload.way).indices


def training_step(
    workload: StepWorkload, method: Method, inference: Inference = "network"
) -> Benchmark:
    """One training step on tensors, including Adam and the update of the memory."""
    settings = run_settings(workload, method, inference)
    model = FewShotModel(settings, workload.image_shape)
    optimizer = training.build_optimizer(model, settings.optimizer)
    inputs = episode_images(workload)
    state = TrainingState(step=0, memory=remembered(model, workload.remembered), pending=None)
    batches = cycle([episode_classes(workload, batch) for batch in range(NUM_BATCHES)])

    def step() -> dict[str, float]:
        state.step += 1
        return training.training_step(model, optimizer, inputs, next(batches), state)

    return step


def pretraining_step(workload: PretrainingWorkload, precision: Precision) -> Benchmark:
    """One step of pre-training on normalized images, including SGD."""
    placement = choose_placement("cpu", precision)
    settings = PretrainSettings(backbone="resnet12", channels=workload.channels)
    judge = FewShotModel(learner.judge_settings(settings), IMAGE_SHAPE).place(placement)
    network = SupervisedNetwork(judge.require_backbone(), workload.classes, settings, placement)
    optimizer = learner.build_optimizer(network, settings.optimizer)
    channels, height, width = IMAGE_SHAPE
    pixels = normal(generator(0, "images"), workload.images, height, width, channels)
    labels = torch.arange(workload.images) % workload.classes
    batch = Batch(pixels.movedim(-1, 1), labels, torch.empty(0, dtype=torch.int64))
    rate = settings.optimizer.learning_rate
    return lambda: learner.pretraining_step(network, optimizer, batch, rate, settings, 1)


def backbone_pass(workload: StepWorkload) -> Benchmark:
    """Forward and backward pass of the backbone alone, on the images of a training step."""
    backbone, images = _backbone_and_images(workload)
    backbone.train()

    def forward_and_backward() -> None:
        backbone.zero_grad(set_to_none=True)
        backbone(images).sum().backward()

    return forward_and_backward


def equal_arithmetic(workload: StepWorkload, method: Method) -> Benchmark:
    """Products of large matrices with as many operations as a training step: its lower limit."""
    step = training_step(workload, method)
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


def embedding(workload: StepWorkload) -> Benchmark:
    """Embed the images of a training step in evaluation mode."""
    backbone, images = _backbone_and_images(workload)
    backbone.eval()
    return torch.no_grad()(lambda: backbone(images))


def _backbone_and_images(workload: StepWorkload) -> tuple[Backbone, Tensor]:
    model = FewShotModel(run_settings(workload, "protonet"), workload.image_shape)
    return model.require_backbone(), episode_images(workload).flatten(0, 2)


def evaluation(workload: EvaluationWorkload) -> Benchmark:
    """Evaluate VSM, including embedding the test set and sampling the episodes."""
    dataset, sampler = held_out_classes(workload)
    model = FewShotModel(run_settings(workload, "vsm"), dataset.image_shape)
    memory = remembered(model, workload.remembered)
    return lambda: evaluate(model, memory, sampler, workload.episodes, EVALUATION_SEED)


def held_out_classes(workload: EvaluationWorkload) -> tuple[ImageDataset, EpisodeSampler]:
    """Return the dataset of an evaluation and the sampler of its test episodes."""
    dataset = open_images(workload.data)
    shape = (workload.way, workload.shot, workload.queries)
    return dataset, EpisodeSampler(dataset, "test", *shape)


def recall(workload: StepWorkload) -> Benchmark:
    """Recall for the classes of one batch, without gradient."""
    model, memory, class_ids = _parts(workload)
    support, random = _support(model, class_ids), generator(0, "noise")
    recall = model.recall
    assert recall is not None
    return torch.no_grad()(lambda: recall(support, memory, None, workload.memory_samples, random))


def recall_with_gradient(workload: StepWorkload) -> Benchmark:
    """Recall as in training: own classes masked, forward and backward."""
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


def consolidation(workload: StepWorkload) -> Benchmark:
    """Update the memory by one batch, forward and backward."""
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


def statistics_update(workload: StatisticsWorkload) -> Benchmark:
    """Add one class to a Gaussian memory and prepare its reader."""
    per_class, width = 2 * workload.num_features // workload.remembered + 2, workload.num_features
    rows = uniform(generator(0, "statistics"), workload.remembered * per_class, width)
    class_ids = torch.arange(workload.remembered).repeat_interleave(per_class)
    memory = GaussianMemory.fit(rows, class_ids, rows.mean(0), ReadSettings("cl2n", 3.0, 1.0, 0.5))
    new = memory.normalize(uniform(generator(0, "new"), workload.images, width))
    new_ids = torch.full((workload.images,), workload.remembered)
    return lambda: memory.add(new, new_ids, 1).reader


def forward_pass(workload: ClassifierWorkload) -> Benchmark:
    """Embed examples and queries as one prepared batch."""
    trained = load(workload.model)
    assert trained.preprocessing is not None
    support, queries = images(workload, trained)
    prepared = trained.preprocessing.normalize(trained.preprocessing.pixels([*support, *queries]))
    return torch.no_grad()(lambda: trained.model.embed(prepared))


def embed_images(workload: ClassifierWorkload) -> Benchmark:
    """Embed examples, then queries, from pixels."""
    trained = load(workload.model)
    support, queries = images(workload, trained)
    return lambda: (trained.embed(support), trained.embed(queries))


def fit_and_predict(workload: ClassifierWorkload) -> Benchmark:
    """Fit and predict, from pixels to labels."""
    classifier, support, queries, labels = fitted(workload)
    return lambda: classifier.fit(support, labels).predict(queries)


def predict(workload: ClassifierWorkload) -> Benchmark:
    """Predict probabilities with a fitted classifier."""
    classifier, _, queries, _ = fitted(workload)
    return lambda: classifier.predict_proba(queries)


def explain(workload: ClassifierWorkload) -> Benchmark:
    """Explain the predictions of a fitted classifier."""
    classifier, _, queries, _ = fitted(workload)
    return lambda: classifier.explain_all(queries)


def images(
    workload: ClassifierWorkload, trained: TrainedModel
) -> tuple[list[Pixels], list[Pixels]]:
    """Return noise for examples and queries, uint8 arrays ``[H, W, C]``."""
    channels, height, width = trained.input_shape
    examples = workload.way * workload.shot
    shape = (examples + workload.queries, height, width, channels)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return list(noise[:examples]), list(noise[examples:])


def fitted(
    workload: ClassifierWorkload,
) -> tuple[FewShotClassifier, list[Pixels], list[Pixels], list[str]]:
    """Return a fitted classifier, its examples, queries, and the labels of the examples."""
    trained = load(workload.model)
    support, queries = images(workload, trained)
    labels = [f"class {number}" for number in range(workload.way) for _ in range(workload.shot)]
    return FewShotClassifier(trained).fit(support, labels), support, queries, labels
