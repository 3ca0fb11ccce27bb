"""Loading trained models, encoders and memories; the one way to get them from files.

Every file is read once. A run directory says itself how inputs are prepared, so using it never
opens the dataset that it was trained on. Memory files are replaced atomically and changed under a
lock; :mod:`vsm.memory.named` has their format.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vsm.data import open_dataset
from vsm.data.images import Preprocessing
from vsm.encoders import Encoder, EncoderIdentity
from vsm.encoders.backbones import custom_preprocessing
from vsm.encoders.encoder import open_frozen
from vsm.errors import MemoryFileError, RunError
from vsm.evaluation.calibration import Calibration
from vsm.memory.named import NamedMemory, decode_memory, trained_memory
from vsm.model import FewShotModel
from vsm.runs.checkpoints import apply_pending, load_backbone, restored_state
from vsm.runs.directory import (
    CARD_NAME,
    MODELS,
    RunDirectory,
    find_run,
    is_shipped,
    read_card,
)
from vsm.runs.trained_model import TrainedModel
from vsm.settings import Inference, ModelSettings, RunSettings, is_frozen_encoder, own_code
from vsm.system.devices import ON_CPU, Placement
from vsm.system.files import exclusive_lock, is_sqlite, shortened
from vsm.system.tensor_files import load_tensors, load_weights, strip_prefix

Checkpoint = Literal["best", "last"]
EXPORTED = (".csv", ".npz")
"""What slots are written to for other programs."""
LARGE = 4096
"""Of a layer; models with larger ones are compared with their weights before they are made."""


def load(
    source: str | Path,
    *,
    memory: str | Path | None = None,
    backbone: str | Collection[str] | None = None,
    placement: Placement = ON_CPU,
    checkpoint: Checkpoint = "best",
    inference: Inference | None = None,
) -> TrainedModel:
    """Load a shipped model by its name, or a run directory by its path.

    Args:
        source: a name that ``vsm models`` lists, or a path.
        memory: a memory file in place of the model's own.
        backbone: the run's own code ``module:attribute``, named again to allow its import, or
            several that may be imported; for an encoder of others, where it is now.
        placement: the device of the model and its memory.
        checkpoint: the best model by validation, or the last state.
        inference: how prototypes are inferred; None: as training did, or by the Gaussian memory
            that it left if validation classes preferred it.
    """
    path = find_run(source)
    if path.is_file():
        raise RunError(
            f"model: {source} is a file; open a saved classifier with FewShotClassifier.load, or "
            "name a run directory"
        )
    run = RunDirectory(path)
    if inference in (None, "gaussian") and checkpoint == "best":
        run = run.used
    settings, card = trusted_settings(path, run.settings(), backbone), read_card(path)
    if inference not in (None, settings.inference):
        own = settings.inference
        raise RunError(f"inference: {source} infers prototypes by {own} inference, got {inference}")
    if checkpoint == "last" and card is not None:
        raise RunError(f"checkpoint: the model {card['name']} has no last state; leave it out")
    open_checkpoint = _load_last if checkpoint == "last" else _load_best
    trained = open_checkpoint(run, settings, str(source), placement)
    if card is not None:
        try:
            expected = EncoderIdentity.stored(card["encoder"])
        except TypeError as error:
            raise RunError(f"{path / CARD_NAME} is damaged: {shortened(error)}") from error
        _require_encoder(trained, expected, path / CARD_NAME)
    trained = replace(trained, path=path, card=card)
    return trained if memory is None else trained.with_memory(read_memory(Path(memory)), memory)


def _load_best(
    run: RunDirectory, settings: RunSettings, name: str, placement: Placement
) -> TrainedModel:
    weights, metadata = load_tensors(run.model)
    trained = restored_model(name, settings, weights, metadata, run.model, placement)
    calibration = Calibration.read(run.calibration, trained.encoder.fingerprint)
    trained = replace(trained, calibration=calibration)
    if not settings.uses_memory:
        return trained
    named = decode_memory(*load_tensors(run.memory), run.memory)
    if named.step != trained.step:
        raise RunError(
            f"{run.path}: model.safetensors is of step {trained.step} but memory.safetensors of "
            f"step {named.step}; the run was cut off between the two: resume it with --resume"
        )
    _require_encoder(trained, named.encoder, run.memory)
    return trained.with_memory(named, run.memory)


def _load_last(
    run: RunDirectory, settings: RunSettings, name: str, placement: Placement
) -> TrainedModel:
    tensors, metadata = load_tensors(run.resume)
    weights = strip_prefix(tensors, "model")
    trained = restored_model(name, settings, weights, metadata, run.resume, placement)
    state = restored_state(trained.model, tensors, metadata, run.resume)
    remembered = apply_pending(trained.model, state)
    if remembered is None:
        return trained
    try:
        class_names = metadata["class_names"]
        names = tuple(str(class_names[str(one)]) for one in remembered.slot_classes)
    except (KeyError, TypeError) as error:
        raise RunError(f"{run.resume} is damaged: it lacks the name of a class") from error
    named = trained_memory(settings, trained.encoder.identity, remembered, names, state.step)
    return replace(trained, memory=named)


def restored_model(
    name: str,
    settings: RunSettings,
    weights: dict[str, Tensor],
    metadata: Any,
    source: Path,
    placement: Placement,
) -> TrainedModel:
    """Make a model again from its weights and what :func:`input_metadata` said of it."""
    try:
        shape, stored = tuple(metadata["input_shape"]), metadata["preprocessing"]
        preprocessing = None if stored is None else Preprocessing.from_dict(stored)
        expected = EncoderIdentity.stored(metadata["encoder"]) if "encoder" in metadata else None
        step = metadata["step"]
        if not all(type(number) is int and number > 0 for number in (*shape, step + 1)):
            raise ValueError("input_shape and step are numbers")
        if len(shape) != 1 and (preprocessing is None or preprocessing.input_shape != shape):
            raise ValueError("preprocessing gives other inputs")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{source} does not say what its model needs ({shortened(repr(error))}): it was "
            "written by another version of vsm, or it is damaged; train it again"
        ) from error
    _require_size(settings, shape, weights, source)
    model = FewShotModel(settings, shape).place(placement)
    load_weights(model, weights, source)
    model.encoder.preprocessing = preprocessing
    if expected is not None and expected.fingerprint != model.encoder.fingerprint:
        raise RunError(
            f"{source} says that its encoder is {expected}, but it holds {model.encoder.identity}; "
            "was it changed?"
        )
    return TrainedModel(name, None, model.eval(), step=step)


def _require_size(
    settings: RunSettings, shape: tuple[int, ...], weights: dict[str, Tensor], source: Path
) -> None:
    """Refuse settings of a huge model that the weights are not of, before memory is asked for."""
    if max(settings.model.channels, settings.model.hidden_units, *shape) <= LARGE:
        return
    try:
        with torch.device("meta"):
            expected = FewShotModel(settings, shape).state_dict()
        fits = all(expected[name].shape == value.shape for name, value in weights.items())
    except (RuntimeError, KeyError, TypeError, OverflowError):
        fits = False
    if not fits:
        raise RunError(f"{source}: its weights do not fit its settings or data; was it exchanged?")


def open_encoder(
    source: str | Path | None,
    data: str,
    *,
    mirror: bool | None = None,
    shift: int | None = None,
    backbone: str | None = None,
    with_adapter: bool = True,
    placement: Placement = ON_CPU,
) -> Encoder:
    """Open the encoder of a run, of a pre-training, or of a shipped model; or a frozen one.

    Args:
        source: a directory, a name that ``vsm models`` lists, or the name of an encoder: one of
            ``FROZEN_ENCODERS``, ``hf:NAME``, ``timm:NAME``, ``onnx:FILE``, or ``module:attribute``;
            None: the data are features already.
        data: what is to be embedded; opened where its images say which inputs the encoder takes.
        mirror: as the setting ``model.mirror``; None: as it was trained.
        shift: as the setting ``model.shift``; None: as it was trained.
        backbone: the user's own code ``module:attribute``, named again to allow its import.
        with_adapter: keep the linear map that was trained on the features, if there is one.
        placement: where to compute.
    """
    if source is None:
        encoder = Encoder(ModelSettings(), open_dataset(data).input_shape, data)
    else:
        encoder = _open_encoder(str(source), data, backbone)
    encoder.place(placement)
    own = encoder.settings
    settings = replace(
        own,
        mirror=own.mirror if mirror is None else mirror,
        shift=own.shift if shift is None else shift,
        adapter=own.adapter if with_adapter else "none",
    )
    return encoder if settings == own else encoder.variant(settings)


def _open_encoder(source: str, data: str, backbone: str | None) -> Encoder:
    if is_frozen_encoder(source):
        kind, _, place = source.partition(":")
        path = Path(place).expanduser()
        return open_frozen(f"{kind}:{path.resolve()}" if place and path.exists() else source)
    if own_code(source) is not None:
        wanted = custom_preprocessing(source)
        shape = open_dataset(data).input_shape if wanted is None else wanted.input_shape
        return Encoder(ModelSettings(backbone=source), shape, None, wanted, source)
    path = find_run(source)
    if RunDirectory(path).model.is_file():
        encoder = load(source, backbone=backbone).encoder
        encoder.source = source
        return encoder
    weights, known = load_backbone(path)
    _require_trusted(path, known["backbone"], (backbone,))
    chosen = {key: known[key] for key in ("backbone", "channels", "keep_probability")}
    shape = tuple(known["input_shape"])
    encoder = Encoder(ModelSettings(**chosen), shape, known.get("data"), source=source)
    assert encoder.backbone is not None
    load_weights(encoder.backbone, weights, path)
    return encoder


def trusted_settings(
    path: Path, settings: RunSettings, backbone: str | Collection[str] | None
) -> RunSettings:
    """Refuse to import code that a file names, unless the caller named it as well.

    An encoder of others may have moved: then ``backbone`` says where to, and takes its place.
    """
    stored = settings.model.backbone
    if not isinstance(backbone, str):
        _require_trusted(path, stored, backbone or ())
    elif is_frozen_encoder(stored) and is_frozen_encoder(backbone):
        return replace(settings, model=replace(settings.model, backbone=backbone))
    elif backbone != stored:
        raise RunError(f"backbone: {path} was trained with {stored}, got {backbone}")
    return settings


def _require_trusted(path: Path, backbone: str, trusted: Collection[str | None]) -> None:
    if own_code(backbone) is not None and backbone not in trusted:
        raise RunError(
            f"{path} was trained with code that is not part of vsm, and loading it would run that "
            f"code; if you trust it, add --backbone {backbone} (in Python, backbone={backbone!r})"
        )


def _require_encoder(trained: TrainedModel, expected: EncoderIdentity, source: Path) -> None:
    """Refuse what belongs to another encoder's features."""
    if trained.encoder.fingerprint != expected.fingerprint:
        raise RunError(
            f"{source} belongs to the encoder {expected}, but model.safetensors beside it holds "
            f"{trained.encoder.identity}; was one of the two exchanged?"
        )


def memory_path(path: Path) -> Path:
    """Return the file of a memory: the file itself, or that of a run or of a shipped model."""
    folder = MODELS / path if is_shipped(path) else path
    return RunDirectory(folder).used.memory if folder.is_dir() else folder


def own_memory_path(path: Path) -> Path:
    """Return the file of a memory to change, which must not be that of a shipped model."""
    file = memory_path(path)
    if MODELS.resolve() in file.resolve().parents:
        raise MemoryFileError(
            f"memory: {path} ships with vsm and stays as it is; begin a file of your own with "
            f"vsm memory add FILE --images FOLDER --model {path}"
        )
    return file


def read_memory(path: Path) -> NamedMemory:
    """Read a memory file, or that of a run directory or of a shipped model's name."""
    file = memory_path(path)
    if not file.is_file():
        raise RunError(
            f"memory: {path} holds none; give a run of a method with memory, a name that vsm "
            "models lists, or a file"
        )
    try:
        return decode_memory(*load_tensors(file), file)
    except RunError:
        if is_sqlite(file):
            raise MemoryFileError(
                f"memory: {file} is a store; write its memory to a file with vsm memory export "
                f"{file} FILE.safetensors, and use that"
            ) from None
        if file.suffix in EXPORTED:
            raise MemoryFileError(
                f"memory: {file} is for other programs and cannot be read back; give a file as "
                "vsm memory export writes it to FILE.safetensors, a run directory, or a model"
            ) from None
        raise


def update_memory(
    path: Path,
    change: Callable[[NamedMemory], NamedMemory],
    beginning: NamedMemory | None = None,
) -> NamedMemory:
    """Replace a memory file, or that of a run directory, by ``change(memory)`` under a lock.

    If ``change`` raises, the file stays as it is. ``beginning`` is the memory to change if there is
    no file yet.
    """
    file = own_memory_path(path)
    if beginning is None and not file.is_file():
        raise RunError(f"memory: {path} holds none; give a run of a method with memory, or a file")
    with exclusive_lock(file):
        current = beginning if beginning and not file.is_file() else read_memory(file)
        changed = change(current)
        changed.write(file)
    return changed
