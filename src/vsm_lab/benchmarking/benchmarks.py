"""Benchmarks of training steps, evaluation, memory and classifier, and images for a server.

Each function sets up a benchmark and returns it. ``sizes`` are fields of :class:`.suite.Sizes`.
"""

from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vsm import pretraining, training
from vsm.classify import FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.data import EpisodeSampler, ImageDataset, open_images
from vsm.data.glyphs import SIDE
from vsm.errors import BenchmarkError
from vsm.evaluation.evaluator import evaluate
from vsm.memory import (
    Memory,
    Observations,
    Recollection,
    SlotConsolidation,
    SlotMemory,
    SupportSet,
)
from vsm.model import FewShotModel
from vsm.runs.checkpoints import TrainingState
from vsm.runs.loading import load
from vsm.seeding import generator, normal, uniform
from vsm.settings import (
    Inference,
    Method,
    PretrainSettings,
    RunSettings,
)
from vsm.system.devices import Precision, choose_placement
from vsm_lab.benchmarking.processes import Benchmark
from vsm_lab.benchmarking.suite import Sizes
from vsm_lab.jobs import with_changes

PHOTO_SIZE = (640, 480)
GRAIN = 24  # gray levels; makes photos as large and as slow to decode as real ones
NUM_BATCHES = 8  # different classes in as many steps
EVALUATION_DATA, EVALUATION_SEED = "glyphs", 0  # the reference's episodes are the first of the same


def build_model(
    sizes: Sizes,
    method: Method,
    inference: Inference = "network",
    image_shape: tuple[int, int, int] | None = None,
) -> FewShotModel:
    """Build a model with default settings but for these sizes, as far as the method has them."""
    memories, prototypes = sizes.memory_samples, sizes.prototype_samples
    changes = {
        "method": method,
        "way": sizes.way,
        "shot": sizes.shot,
        "queries": sizes.queries,
        "model.inference": inference,
        "model.channels": sizes.channels,
        "sampling.train_memory": memories,
        "sampling.train_prototypes": prototypes,
        "sampling.evaluation_memory": memories,
        "sampling.evaluation_prototypes": prototypes,
        "optimizer.schedule": "constant",
    }
    settings = with_changes(RunSettings(), changes)
    return FewShotModel(settings, image_shape or sizes.image_shape)


def episode_images(sizes: Sizes) -> Tensor:
    """Return noise ``[T, N, K + Q, C, H, W]``, channels-last in memory as datasets are."""
    channels, height, width = sizes.image_shape
    shape = (sizes.tasks, sizes.way, sizes.shot + sizes.queries)
    pixels = normal(generator(0, "images"), *shape, height, width, channels)
    return pixels.movedim(-1, -3)


def fill_memory(model: FewShotModel, num_classes: int) -> Memory | None:
    """Return a memory of ``num_classes`` random classes; None if the model has no memory."""
    features = uniform(generator(0, "memory"), num_classes, model.num_features)
    observations = Observations(features, torch.arange(num_classes))
    with torch.no_grad():
        return model.consolidate(model.empty_memory(), observations, 0)


def episode_classes(sizes: Sizes, batch: int) -> Tensor:
    """Draw the classes of a batch ``[T, N]`` from the remembered ones, distinct within a task."""
    chances = uniform(generator(0, "classes", batch), sizes.tasks, sizes.remembered)
    return chances.topk(sizes.way).indices


def training_step(method: Method, inference: Inference = "network", **sizes: int) -> Benchmark:
    """One training step on tensors, including Adam and the update of the memory."""
    size = Sizes(**sizes)
    model = build_model(size, method, inference)
    optimizer = training.build_optimizer(model, model.settings.optimizer)
    inputs = episode_images(size)
    state = TrainingState(step=0, memory=fill_memory(model, size.remembered), pending=None)
    batches = cycle([episode_classes(size, batch) for batch in range(NUM_BATCHES)])

    def step() -> dict[str, float]:
        state.step += 1
        return training.training_step(model, optimizer, inputs, next(batches), state)

    return step


def pretraining_step(
    precision: Precision, channels: int = 32, images: int = 128, classes: int = 64
) -> Benchmark:
    """One step of pre-training a ResNet-12 on RGB images of 32×32, including SGD."""
    placement = choose_placement("cpu", precision)
    settings = PretrainSettings(backbone="resnet12", channels=channels)
    validator = FewShotModel(pretraining.validator_settings(settings), (3, 32, 32)).place(placement)
    backbone = validator.require_backbone()
    network = pretraining.SupervisedNetwork(backbone, classes, settings, placement)
    optimizer = pretraining.build_optimizer(network, settings.optimizer)
    pixels = normal(generator(0, "images"), images, 32, 32, 3).movedim(-1, 1)
    labels, rate = torch.arange(images) % classes, settings.optimizer.learning_rate
    return lambda: pretraining.pretraining_step(
        network, optimizer, pixels, labels, rate, settings, 1
    )


def backbone_pass(**sizes: int) -> Benchmark:
    """Forward and backward pass of the backbone alone, on the images of a training step."""
    size = Sizes(**sizes)
    backbone = build_model(size, "protonet").require_backbone()
    images = episode_images(size).flatten(0, 2)

    def forward_and_backward() -> None:
        backbone.zero_grad(set_to_none=True)
        backbone(images).sum().backward()

    return forward_and_backward


def evaluation(episodes: int, **sizes: int) -> Benchmark:
    """Evaluate VSM, including embedding the test set and sampling the episodes."""
    size = Sizes(**sizes)
    dataset, sampler = evaluation_episodes(size)
    model = build_model(size, "vsm", image_shape=dataset.image_shape)
    memory = fill_memory(model, size.remembered)
    return lambda: evaluate(model, memory, sampler, episodes, EVALUATION_SEED)


def evaluation_episodes(sizes: Sizes) -> tuple[ImageDataset, EpisodeSampler]:
    """Return the dataset of an evaluation and the sampler of its test episodes."""
    dataset = open_images(EVALUATION_DATA)
    return dataset, EpisodeSampler(dataset, "test", sizes.way, sizes.shot, sizes.queries)


def recall(gradient: bool = False, **sizes: int) -> Benchmark:
    """Recall for the classes of one batch.

    With ``gradient`` as in training: own classes masked, forward and backward.
    """
    size = Sizes(**sizes)
    model, memory, class_ids = _memory_parts(size)
    mean = uniform(generator(0, "support"), *class_ids.shape, model.num_features)
    support, random = SupportSet(mean.unsqueeze(2), mean), generator(0, "noise")
    read = model.recall
    assert read is not None
    if not gradient:
        return torch.no_grad()(lambda: read(support, memory, None, size.memory_samples, random))
    mean.requires_grad_()
    content = memory.content.requires_grad_()  # consolidation makes it part of the graph

    def recall_and_differentiate() -> None:
        model.zero_grad(set_to_none=True)
        mean.grad = content.grad = None
        slot_mask = memory.slot_mask(class_ids, model.settings.memory.mask)
        found: Recollection = read(support, memory, slot_mask, size.memory_samples, random)
        (found.samples.sum() + found.divergence.sum()).backward()

    return recall_and_differentiate


def consolidation(**sizes: int) -> Benchmark:
    """Update the memory by one batch, forward and backward."""
    size = Sizes(**sizes)
    model, memory, class_ids = _memory_parts(size)
    update = model.consolidation
    assert isinstance(update, SlotConsolidation)
    nodes = class_ids.flatten().repeat_interleave(size.shot + size.queries)
    features = uniform(generator(0, "features"), len(nodes), model.num_features)
    observations = Observations(features, nodes)

    def consolidate() -> SlotMemory:
        model.zero_grad(set_to_none=True)
        updated: SlotMemory = update(memory, observations, 1)
        updated.content.sum().backward()
        return updated

    return consolidate


def _memory_parts(sizes: Sizes) -> tuple[FewShotModel, SlotMemory, Tensor]:
    """Return a model, its memory, and the classes of a batch ``[T, N]``."""
    model = build_model(sizes, "vsm")
    memory = fill_memory(model, sizes.remembered)
    assert isinstance(memory, SlotMemory)
    return model, memory, episode_classes(sizes, 0)


def classifier(task: str, model: str, queries: int, way: int = 5, shot: int = 5) -> Benchmark:
    """Embed, classify or explain images of noise with a shipped model fitted to N · K others.

    The task ``use_together`` begins with features.
    """
    trained = load(model)
    channels, height, width = trained.encoder.input_shape
    shape = (way * shot + queries, height, width, channels)
    noise = list(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    examples, images = noise[: way * shot], noise[way * shot :]
    labels = [f"class {number}" for number in range(way) for _ in range(shot)]
    fitted = FewShotClassifier(trained).fit(examples, labels)
    tasks: dict[str, Benchmark] = {
        "embed_images": lambda: (trained.embed(examples), trained.embed(images)),
        "fit_and_predict": lambda: fitted.fit(examples, labels).predict(images),
        "predict": lambda: fitted.predict_proba(images),
        "explain": lambda: fitted.explain_all(images),
    }
    if task == "use_together":
        known, asked = (Embedded(trained.embed(part)) for part in (examples, images))
        return lambda: fitted.fit(known, labels, unlabeled=asked).predict_proba(asked)
    return tasks[task]


def write_images(model: str, folder: Path, way: int, shot: int, num_queries: int) -> None:
    """Write ``support/LABEL/*`` and ``queries/*``: blurred patterns, one per class, with noise.

    They are JPEGs of 640×480, or small gray PNGs for models of characters.
    """
    trained = load(model)
    if trained.preprocessing is None:
        raise BenchmarkError(f"model: {model} takes features, not images")
    ink, random = trained.preprocessing.ink, np.random.default_rng(0)
    width, height = (SIDE, SIDE) if ink else PHOTO_SIZE
    patterns = random.integers(0, 192, (way, 6, 8, 3))
    names = [f"support/class{number}/{k:04}" for number in range(way) for k in range(shot)]
    names += [f"queries/{number:04}" for number in range(num_queries)]
    for position, name in enumerate(names):
        number = position // shot if position < way * shot else position % way
        coarse = (patterns[number] + random.integers(0, 64, (6, 8, 3))).astype(np.uint8)
        blurred = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(blurred, np.int16)
        pixels = pixels + random.integers(-GRAIN, GRAIN + 1, (height, width, 1))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        path = folder / f"{name}{'.png' if ink else '.jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        (image.convert("L") if ink else image).save(path, quality=90)


def classify_files(model: str, folder: Path, times: int) -> Benchmark:
    """Classify all ``queries`` as one batch, ``times`` times, with a fitted classifier."""
    classifier = FewShotClassifier(load(model)).fit(*_support(folder))
    queries = sorted((folder / "queries").iterdir())

    def classify() -> None:
        for _ in range(times):
            classifier.predict_proba(queries)

    return classify


def expected_answers(model: str, folder: Path) -> list[dict[str, float]]:
    """Return the probability of each label, for every file of ``queries``."""
    classifier = FewShotClassifier(load(model)).fit(*_support(folder))
    names = classifier.classes_.tolist()
    rows = classifier.predict_proba(sorted((folder / "queries").iterdir())).tolist()
    return [dict(zip(names, row, strict=True)) for row in rows]


def _support(folder: Path) -> tuple[list[Path], list[str]]:
    examples = sorted((folder / "support").glob("*/*"))
    return examples, [path.parent.name for path in examples]
