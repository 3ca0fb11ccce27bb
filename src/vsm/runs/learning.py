"""Learning the Gaussian memory: one pass over labeled images, and no training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vsm.data import Dataset, Split, open_dataset
from vsm.data.dataset import Ids
from vsm.data.preprocessing import Preprocessing
from vsm.encoders.efficientnet_lite import VARIANTS
from vsm.encoders.pretrained import own_preprocessing, pretrained_preprocessing
from vsm.errors import MemoryFileError, RunError
from vsm.evaluation.evaluator import embed_images
from vsm.evaluation.memory_choice import (
    Choice,
    ClassFeatures,
    choose_read_settings,
    held_out_trials,
)
from vsm.evaluation.rejection import (
    EPISODES,
    SHOTS,
    WAYS,
    Thresholds,
    calibrate,
    calibrate_on_validation,
)
from vsm.memory import GaussianMemory, Memory, ReadSettings
from vsm.memory.named import EncoderIdentity, NamedMemory
from vsm.model import FewShotModel
from vsm.runs.checkpoints import load_backbone
from vsm.runs.class_rows import ClassRows
from vsm.runs.directory import RunDirectory
from vsm.runs.embedding import open_data
from vsm.runs.shipped import find_run
from vsm.runs.trained_model import TrainedModel, load, made_in_memory, store
from vsm.settings import (
    GaussianSettings,
    Inference,
    ModelSettings,
    RunSettings,
    is_frozen_encoder,
    own_code,
)
from vsm.system.devices import ON_CPU, Placement
from vsm.system.distributed import SINGLE_PROCESS, Processes
from vsm.system.progress import NULL_PROGRESS, Progress
from vsm.system.tensor_files import load_weights

ENCODER_SETTINGS = (
    "backbone", "channels", "keep_probability", "mirror", "shift", "adapter", "normalize_features",
)  # fmt: skip


class EncoderWeights(NamedTuple):
    """What makes features.

    Attributes:
        settings: of the model that it is a part of.
        weights: by their names in a model: ``backbone.…`` and ``adapter.…``.
        data: what it was trained on; None if there is nothing to train.
        source: where it came from.
        preprocessing: how it wants pictures; None: as those of the data it was trained on.
    """

    settings: ModelSettings
    weights: dict[str, Tensor]
    data: str | None
    source: str | None
    preprocessing: Preprocessing | None = None


MOST_FOLDS = 5  # of classes, in which thresholds are measured
CROP_PADDING = 32  # pixels that TensorFlow's evaluation of these networks cuts off

NO_ENCODER = EncoderWeights(ModelSettings(), {}, None, None)
"""For data that are features already."""


def open_encoder(
    source: str | Path,
    mirror: bool | None = None,
    backbone: str | None = None,
    with_adapter: bool = True,
    inference: Inference | None = None,
    shift: int | None = None,
) -> EncoderWeights:
    """Open the encoder of a run, of a pre-training, or of a shipped model; or a frozen one.

    Args:
        source: a directory, a name that ``vsm models`` lists, or the name of an encoder: one of
            ``FROZEN_ENCODERS``, ``hf:NAME``, ``timm:NAME``, ``onnx:FILE``, or ``module:attribute``.
        mirror: average features of images and their mirror images; None: as it was trained.
        backbone: the user's own code ``module:attribute``, named again to allow its import.
        with_adapter: keep the linear map that was trained on the features, if there is one.
        inference: as in :func:`vsm.load`, whose features are the same in any case.
        shift: average features of images moved by so many pixels too; None: as it was trained.
    """
    named = _resolved(str(source))
    if is_frozen_encoder(named) or own_code(named) is not None:
        settings = ModelSettings(backbone=named, mirror=bool(mirror), shift=shift or 0)
        if settings.own_backbone is None:
            prepared: Preprocessing | None = frozen_preprocessing(named)
        else:
            stored = own_preprocessing(named)
            prepared = None if stored is None else Preprocessing.from_dict(stored)
        return EncoderWeights(settings, {}, None, named, prepared)
    path = find_run(source)
    if RunDirectory(path).model.is_file():
        trained = load(source, backbone=backbone, inference=inference)
        parts = trained.model.state_dict().items()
        weights = {name: w for name, w in parts if name.startswith(("backbone.", "adapter."))}
        made = (trained.settings.data, str(source), trained.preprocessing)
        found = EncoderWeights(trained.settings.model, weights, *made)
    else:
        stored, known = load_backbone(path)
        chosen = {key: known[key] for key in ("backbone", "channels", "keep_probability")}
        weights = {f"backbone.{name}": weight for name, weight in stored.items()}
        found = EncoderWeights(ModelSettings(**chosen), weights, known["data"], str(source))
        own = found.settings.own_backbone
        if own is not None and own != backbone:
            raise RunError(
                f"{path} was trained with code that is not part of vsm, and loading it would run "
                f"that code; if you trust it, add --backbone {own}"
            )
    settings, weights = found.settings, found.weights
    if mirror is not None:
        settings = replace(settings, mirror=mirror)
    if shift is not None:
        settings = replace(settings, shift=shift)
    if not with_adapter:
        settings = replace(settings, adapter="none")
        weights = {name: w for name, w in weights.items() if not name.startswith("adapter.")}
    return found._replace(settings=settings, weights=weights)


def _resolved(name: str) -> str:
    """Return the name of an encoder; a path in it becomes one that is right in any folder."""
    kind, _, place = name.partition(":")
    is_there = bool(place) and is_frozen_encoder(name) and Path(place).expanduser().exists()
    return f"{kind}:{Path(place).expanduser().resolve()}" if is_there else name


def frozen_preprocessing(name: str) -> Preprocessing:
    """Return how an encoder of others wants pictures.

    EfficientNet-Lite wants the middle of them, as (x − 127) / 128.
    """
    if name not in VARIANTS:
        return Preprocessing.from_dict(pretrained_preprocessing(name))
    side = VARIANTS[name].side
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return Preprocessing(side, 3, crop=side / (side + CROP_PADDING), mean=mean, std=std)


def gaussian_model(
    encoder: EncoderWeights,
    data: str,
    input_shape: tuple[int, ...],
    settings: GaussianSettings,
    seed: int,
) -> FewShotModel:
    """Return a model that makes features as ``encoder`` does and reads class statistics."""
    chosen = {name: getattr(encoder.settings, name) for name in ENCODER_SETTINGS}
    run = RunSettings(
        data=data,
        method="vsm",
        seed=seed,
        init=encoder.source,
        model=ModelSettings(inference="gaussian", **chosen),
        gaussian=settings,
    )
    model = FewShotModel(run, input_shape)
    try:
        load_weights(model, {**model.state_dict(), **encoder.weights}, Path(encoder.source or data))
    except RunError as error:
        raise RunError(
            f"encoder: {encoder.source} does not take the images of {data}, {list(input_shape)}; "
            "was it trained on images of another size?"
        ) from error
    return model.eval()


RowsEmbedder = Callable[[ClassRows, int, Progress], ClassFeatures]
"""Embeds the rows that a seed draws, as :meth:`ClassRows.drawn` does."""


@dataclass(frozen=True)
class Learned:
    """A memory that was learned, how it is read, and when it should not answer."""

    memory: GaussianMemory
    choice: Choice
    thresholds: Thresholds | None


def class_features(
    model: FewShotModel, dataset: Dataset, split: Split, progress: Progress = NULL_PROGRESS
) -> ClassFeatures:
    """Embed a split once."""
    image_ids = torch.from_numpy(dataset.split_ids(split))
    features = embed_images(model, dataset, image_ids, progress).cpu()
    return ClassFeatures(features, dataset.class_sizes[dataset.classes(split)].tolist())


def learn_from_features(
    model: FewShotModel,
    known: ClassFeatures,
    class_ids: Tensor,
    validation: ClassFeatures | None,
    like: GaussianMemory | None = None,
    with_thresholds: bool = True,
    remembered: Callable[[Tensor, ReadSettings], GaussianMemory] | None = None,
) -> Learned:
    """Choose how to read the statistics of classes, and learn them.

    Args:
        model: of gaussian inference; its settings say what is not to be chosen.
        known: the classes to remember.
        class_ids: what the memory calls them ``[C]``.
        validation: other classes; None: the choice is made by leaving remembered ones out.
        like: a memory that it shall be possible to merge with.
        with_thresholds: measure rejection thresholds too, where validation classes are not given.
        remembered: gives the statistics of more rows than ``known``, by center and read settings.
    """
    settings, seed = model.settings.gaussian, model.settings.seed
    if not known.sizes:
        raise MemoryFileError("memory: there is no class to learn")
    if not known.features.isfinite().all():
        raise MemoryFileError(
            "features: some are infinite or not a number; is the encoder damaged, or an image?"
        )
    center = known.center if like is None else like.center.float()
    if like is not None:
        settings = replace(settings, normalization=like.read_settings.normalization)
    choice = choose_read_settings(
        known, validation, settings, seed, None if like is None else like.center.float()
    )
    if remembered is None:
        rows = class_ids.repeat_interleave(torch.tensor(known.sizes))
        memory = GaussianMemory.fit(
            known.features, rows, center, choice.read_settings, settings.exact_forgetting
        )
    else:
        memory = remembered(center, choice.read_settings)
    thresholds = None
    if validation is None and with_thresholds:
        thresholds = _thresholds(model, known, choice, center if like is not None else None)
    return Learned(memory, choice, thresholds)


def _thresholds(
    model: FewShotModel, known: ClassFeatures, choice: Choice, center: Tensor | None
) -> Thresholds | None:
    """Measure thresholds on remembered classes, in folds, each with the statistics of the others.

    Folds are just large enough for the largest tasks, since the memory in the end holds all.
    """
    folds = min(max(2, len(known.sizes) // WAYS[-1]), MOST_FOLDS)
    trials = held_out_trials(
        known,
        None,
        SHOTS,
        model.settings.seed,
        center,
        most_way=WAYS[-1],
        count=2 * EPISODES,
        folds=folds,
    )
    if not trials:
        return None
    memories = [trial.memory(choice.read_settings) for trial in trials]

    def episodes(shot: int) -> list[tuple[Memory | None, Tensor, Tensor]]:
        found: list[tuple[Memory | None, Tensor, Tensor]] = []
        for trial, memory in zip(trials, memories, strict=True):
            support, queries = (trial.others.features[rows] for rows in trial.episodes[shot])
            found.append((memory, support.to(model.device), queries.to(model.device)))
        return found

    return calibrate(model, episodes, list(trials[0].episodes), model.settings.seed)


def learn_memory(
    encoder: EncoderWeights,
    dataset: Dataset,
    settings: GaussianSettings,
    *,
    data: str | None = None,
    num_classes: int | None = None,
    like: NamedMemory | None = None,
    seed: int = 0,
    placement: Placement = ON_CPU,
    progress: Progress = NULL_PROGRESS,
    embed: RowsEmbedder = ClassRows.drawn,
    processes: Processes = SINGLE_PROCESS,
) -> TrainedModel:
    """Learn a memory of the training classes of ``dataset``, or of all if it is one whole.

    If the encoder was trained on the same data, validation classes decide how the memory is read.
    Where the features do not fit into memory, some of every class decide, and all are remembered.

    Args:
        encoder: makes the features.
        dataset: whose training classes are remembered.
        settings: of reading; what is unset is chosen.
        data: the name that opens the dataset; unset: its own.
        num_classes: remember the first so many only.
        like: a memory that it shall be possible to merge with.
        seed: of the episodes that decide.
        placement: where to compute.
        progress: counts images.
        embed: makes features of rows.
        processes: share the rows out; all of them learn the same memory.
    """
    data = dataset.name if data is None else data
    shape = dataset.input_shape
    if encoder.preprocessing is not None and len(shape) == 1:  # embedded already
        shape = encoder.preprocessing.input_shape
    model = gaussian_model(encoder, data, shape, settings, seed).place(placement)
    identity = EncoderIdentity.of(model.settings, model.state_dict())
    statistics = None if like is None else _statistics(like, identity)
    split: Split = "all" if "all" in dataset.splits else "train"
    classes = _first_classes(dataset.classes(split), num_classes, data)
    rows = ClassRows(model, dataset, classes, processes)
    decides = encoder.data == data and "validation" in dataset.splits
    known, validation = embed(rows, seed, progress), None
    if decides:
        others = replace(rows, classes=dataset.classes("validation"))
        validation = embed(others, seed, progress)
    remembered = None if rows.fit_at_once() else _in_parts(rows, settings, progress)
    learned = learn_from_features(
        model, known, torch.from_numpy(classes), validation, statistics, remembered=remembered
    )
    names = tuple(dataset.class_names[one] for one in learned.memory.slot_classes)
    named = named_memory(model, learned, names, int(rows.sizes.sum()))
    thresholds = learned.thresholds
    if decides:
        thresholds = calibrate_on_validation(model, learned.memory, dataset)
    prepared = encoder.preprocessing or Preprocessing.of(dataset)
    return replace(made_in_memory(model, named, thresholds), preprocessing=prepared)


def _first_classes(classes: Ids, count: int | None, data: str) -> Ids:
    """Return the first of the classes to remember of ``data``; None: all of them."""
    if count is not None and not 1 <= count <= len(classes):
        raise MemoryFileError(
            f"classes: expected 1 to {len(classes)}, the classes to remember of {data}, got {count}"
        )
    return classes[:count]


def _in_parts(
    rows: ClassRows, settings: GaussianSettings, progress: Progress
) -> Callable[[Tensor, ReadSettings], GaussianMemory]:
    """Return what learns of more rows than fit into memory."""
    if settings.exact_forgetting:
        raise MemoryFileError(
            "exact_forgetting: is not supported for so many images, whose features do not fit into "
            "memory; leave it out, or learn parts with --like and merge them"
        )
    return partial(rows.remembered, progress=progress)


def data_for(
    encoder: EncoderWeights,
    data: str,
    *,
    as_a_whole: bool = False,
    placement: Placement = ON_CPU,
    progress: Progress = NULL_PROGRESS,
    processes: Processes = SINGLE_PROCESS,
) -> Dataset:
    """Open ``data`` for an encoder, as :func:`vsm.runs.embedding.open_data` does for a model."""
    prepared = encoder.preprocessing
    shape = open_dataset(data).input_shape if prepared is None else prepared.input_shape
    model = gaussian_model(encoder, data, shape, GaussianSettings(), 0).place(placement)
    return open_data(
        model,
        prepared,
        encoder.data,
        data,
        as_a_whole=as_a_whole,
        progress=progress,
        processes=processes,
    )


def _statistics(like: NamedMemory, encoder: EncoderIdentity) -> GaussianMemory:
    like.require_encoder(encoder, "like")
    if like.memory.statistics is None:
        raise MemoryFileError("like: it holds no class statistics; learn it with vsm memory learn")
    return like.memory.statistics


def named_memory(
    model: FewShotModel, learned: Learned, names: tuple[str, ...], images: int
) -> NamedMemory:
    """Name what was learned, and keep how it was chosen to be read."""
    identity = EncoderIdentity.of(model.settings, model.state_dict())
    event = {
        "action": "learned",
        "data": model.settings.data,
        "classes": len(names),
        "images": images,
        "choice": learned.choice.as_dict(),
    }
    return NamedMemory(learned.memory, names, identity, (event,), model.settings.method)


def write_learned(trained: TrainedModel, output: Path) -> TrainedModel:
    """Write a learned memory as a run directory, and return the model that it holds."""
    run = RunDirectory(output)
    run.create(trained.settings)
    assert trained.memory is not None
    store(run, trained)
    trained.calibration.write(run.calibration, trained.encoder.fingerprint)
    with run.step_log(0) as log:
        log.write({"step": 0, **trained.memory.provenance[-1]})
    return replace(trained, name=str(output), path=output)
