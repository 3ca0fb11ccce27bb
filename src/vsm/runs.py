"""Run directories: what a training run leaves behind, loadable without pickle.

``config.yaml`` (settings), ``metrics.jsonl`` (one line a measurement), ``model.safetensors`` and
``memory.safetensors`` (the best by validation), ``resume.safetensors`` (the last state). Every
file is replaced atomically. The best pair is written before the resume state, so a run killed
between the two repeats that validation when it resumes.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vsm.configuration import settings_from_files, settings_to_yaml
from vsm.data import ImageDataset
from vsm.devices import ON_CPU, Placement
from vsm.errors import RunError
from vsm.files import atomic_path, write_text
from vsm.memory import Memory, Observations
from vsm.model import FewShotModel
from vsm.settings import RunSettings

Checkpoint = Literal["best", "last"]
METADATA_KEY = "vsm"
MEMORY_PARTS = ("content", "class_ids", "counts", "last_update")


@dataclass
class TrainingState:
    """All that changes while training, apart from the model's parameters and buffers.

    Attributes:
        step: steps done.
        memory: the stored memory, or nothing for methods without one.
        pending: the last step's observations, which the next step consolidates.
        best_step: step of the best validation so far; 0 before the first.
        best_accuracy: its accuracy.
    """

    step: int
    memory: Memory | None
    pending: Observations | None
    best_step: int = 0
    best_accuracy: float = -1.0


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run, by name."""

    path: Path

    @property
    def config(self) -> Path:
        """Settings."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Measurements, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """Weights of the best model by validation."""
        return self.path / "model.safetensors"

    @property
    def memory(self) -> Path:
        """Memory of the best model by validation."""
        return self.path / "memory.safetensors"

    @property
    def resume(self) -> Path:
        """The last state."""
        return self.path / "resume.safetensors"

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config.is_file()

    def create(self, settings: RunSettings) -> None:
        """Begin a run: write its settings and remove what an earlier run left."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"output: cannot make the folder {self.path}: {error.strerror}; choose another "
                "--output"
            ) from error
        for leftover in (self.metrics, self.model, self.memory, self.resume):
            leftover.unlink(missing_ok=True)
        write_text(self.config, settings_to_yaml(settings))

    def settings(self) -> RunSettings:
        """Read the run's settings, or say that there is no run."""
        if not self.exists():
            raise RunError(f"{self.path} is not a run directory: it has no config.yaml")
        return settings_from_files(self.config)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return every complete measurement; a line cut short by a kill is passed over."""
        if not self.metrics.is_file():
            return []
        rows = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows


def save_best(
    run: RunDirectory, model: FewShotModel, memory: Memory | None, step: int, names: tuple[str, ...]
) -> None:
    """Write the model for use, and its memory with the class names of its slots."""
    stamp = {"step": step, "method": model.settings.method}
    if memory is not None:
        slots = [names[class_id] for class_id in memory.class_ids.tolist()]
        _save(run.memory, _memory_tensors(memory), {**stamp, "class_names": slots})
    _save(run.model, dict(model.state_dict()), stamp)


def save_resume(
    run: RunDirectory, model: FewShotModel, optimiser: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Write all that is needed to go on bit for bit."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, values in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": value for name, value in values.items()}
    if state.memory is not None:
        tensors |= {f"memory.{k}": v for k, v in _memory_tensors(state.memory).items()}
    if state.pending is not None:
        tensors |= {"pending.features": state.pending.features}
        tensors |= {"pending.class_ids": state.pending.class_ids}
    progress = {
        "step": state.step,
        "best_step": state.best_step,
        "best_accuracy": state.best_accuracy,
    }
    _save(run.resume, tensors, progress)


def load_resume(
    run: RunDirectory, model: FewShotModel, optimiser: torch.optim.Optimizer | None
) -> TrainingState:
    """Put the last state into ``model`` and ``optimiser`` and return the rest of it."""
    tensors, progress = _load(run.resume)
    _fit(model, _below(tensors, "model"), run.resume)
    if optimiser is not None:
        _load_optimiser(optimiser, _below(tensors, "optimiser"))
    memory, pending = _below(tensors, "memory"), _below(tensors, "pending")
    return TrainingState(
        memory=Memory(**memory).to(model.device) if memory else None,
        pending=Observations(**pending).to(model.device) if pending else None,
        **progress,
    )


def _fit(model: FewShotModel, weights: dict[str, Tensor], source: Path) -> None:
    """Load weights, or say that they belong to other settings."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(
            f"{source}: its weights do not fit its settings or data ({reason}); was config.yaml or "
            "the file exchanged?"
        ) from error


def _load_optimiser(optimiser: torch.optim.Optimizer, saved: dict[str, Tensor]) -> None:
    """Put saved moments into ``optimiser``, each in the memory layout of its parameter.

    The fused Adam walks parameter and moments by address, so a channels-last weight needs
    channels-last moments.
    """
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in saved.items():
        index, name = key.split(".", 1)
        parameter = parameters[int(index)]
        laid_out = torch.empty_like(parameter).copy_(value) if value.ndim else value
        moments.setdefault(int(index), {})[name] = laid_out.detach()
    groups = optimiser.state_dict()["param_groups"]
    optimiser.load_state_dict({"state": moments, "param_groups": groups})


@dataclass(frozen=True)
class TrainedModel:
    """A model and its memory, ready for use.

    Attributes:
        settings: of the run that trained it.
        model: in evaluation mode.
        memory: read-only; nothing for methods without one.
        slot_names: the class name of each slot.
        step: the training step it was saved at.
    """

    settings: RunSettings
    model: FewShotModel
    memory: Memory | None
    slot_names: tuple[str, ...]
    step: int

    def with_slots(self, count: int) -> "TrainedModel":
        """Return the same model with the first ``count`` slots of its memory; 0 empties it."""
        if self.memory is None:
            return self
        slots = torch.arange(min(count, len(self.memory)), device=self.memory.class_ids.device)
        kept = self.memory.keep(slots)
        return replace(self, memory=kept, slot_names=self.slot_names[:count])


def load_run(
    path: Path,
    dataset: ImageDataset,
    checkpoint: Checkpoint = "best",
    placement: Placement = ON_CPU,
) -> TrainedModel:
    """Load the best model of a run, or its last state with pending observations applied.

    Args:
        path: the run directory.
        dataset: what the run was trained on; gives the image shape and class names.
        checkpoint: which of the two.
        placement: where the model and its memory go.
    """
    run = RunDirectory(path)
    settings = run.settings()
    model = FewShotModel(settings, dataset.image_shape).place(placement)
    if checkpoint == "last":
        state = load_resume(run, model, None)
        model.eval()
        memory = settled_memory(model, state)
        step = state.step
        slots = [] if memory is None else memory.class_ids.tolist()
        names = tuple(dataset.class_names[class_id] for class_id in slots)
        return TrainedModel(settings, model, memory, names, step)
    weights, stamp = _load(run.model)
    _fit(model, weights, run.model)
    model.eval()
    if not settings.uses_memory:
        return TrainedModel(settings, model, None, (), stamp["step"])
    parts, memory_stamp = _load(run.memory)
    if "class_names" not in memory_stamp:
        raise RunError(f"{run.memory} does not hold a memory; was it exchanged?")
    if memory_stamp["step"] != stamp["step"]:
        raise RunError(
            f"{path}: model.safetensors is of step {stamp['step']} but memory.safetensors of step "
            f"{memory_stamp['step']}; the run was cut off between the two: resume it with --resume"
        )
    names = tuple(memory_stamp["class_names"])
    memory = Memory(**parts).to(model.device)
    return TrainedModel(settings, model, memory, names, stamp["step"])


@torch.no_grad()
def settled_memory(model: FewShotModel, state: TrainingState) -> Memory | None:
    """Return the memory with pending observations applied; the state keeps them pending."""
    if state.memory is None or state.pending is None:
        return state.memory
    settled: Memory = model.consolidation(state.memory, state.pending, state.step)
    return settled


def _memory_tensors(memory: Memory) -> dict[str, Tensor]:
    return {part: getattr(memory, part) for part in MEMORY_PARTS}


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix.``, without it."""
    start = f"{prefix}."
    return {key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)}


def _save(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write tensors and facts; facts go under one key, since several would have no fixed order."""
    with atomic_path(path) as temporary:
        safetensors.torch.save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            temporary,
            {METADATA_KEY: json.dumps(facts, ensure_ascii=False)},
        )


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise RunError(f"{path} is missing: the run has not saved it yet, or it was moved")
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
            return tensors, json.loads((file.metadata() or {})[METADATA_KEY])
    except KeyError:
        raise RunError(
            f"{path} was not written by vsm: it has no {METADATA_KEY!r} metadata"
        ) from None
    except (safetensors.SafetensorError, ValueError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
