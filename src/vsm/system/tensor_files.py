"""Tensors and metadata in safetensors files.

Metadata is one JSON object under one key, since several keys would have no fixed order. It holds a
digest of itself and of all tensors, which is checked when a file is opened. Files are replaced
atomically, and nothing is pickled.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from vsm.errors import DocumentError, RunError
from vsm.system.files import DIGEST_KEY, atomic_path, digest_of, parse_json, shortened

METADATA_KEY = "vsm"
TENSORS_KEY = "tensors"
MAY_BE_INFINITE = "reading"
"""A tensor of settings, in which infinity is one of the choices."""


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write tensors and metadata; a full disk is an ``OSError``, as with any other file."""
    stored: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        laid_out = tensor.detach().cpu().contiguous()
        storage = laid_out.untyped_storage().data_ptr()  # safetensors refuses tied weights
        stored[name] = laid_out.clone() if storage in seen else laid_out
        seen.add(storage)
    signed = {**metadata, DIGEST_KEY: _digest(stored, metadata)}
    text = json.dumps(signed, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    with atomic_path(path) as temporary:
        try:
            safetensors.torch.save_file(stored, temporary, {METADATA_KEY: text})
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(path)) from error


def load_tensors(
    path: Path, must_be_finite: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and metadata; an error says what is wrong with the file."""
    if not path.is_file():
        raise RunError(f"{path} is missing: the run has not saved it yet, or it was moved")
    if not os.access(path, os.R_OK):  # safetensors would call the file missing
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    try:
        with safetensors.safe_open(path, "pt") as file:
            # Cloned, since the last bit of a matrix product may depend on the alignment of its
            # operands, and a file aligns them otherwise than torch does.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            metadata = parse_json((file.metadata() or {})[METADATA_KEY], path, verify=False)
    except KeyError:
        raise RunError(f"{path} has no {METADATA_KEY!r} metadata: vsm did not write it") from None
    except DocumentError as error:
        raise RunError(f"{path} is damaged: its metadata {error.reason}") from error
    except (safetensors.SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        raise RunError(f"{path} is damaged: {shortened(error)}") from error
    if not isinstance(metadata, dict):
        raise RunError(f"{path} is damaged: its metadata is not a JSON object")
    stored = metadata.pop(DIGEST_KEY, None)
    if stored is not None and stored != _digest(tensors, metadata):
        raise RunError(f"{path} was changed or damaged: its digest is wrong; put back a copy")
    for name, tensor in tensors.items() if must_be_finite else ():
        allowed = name.rpartition(".")[2] == MAY_BE_INFINITE
        if (tensor.isnan() if allowed else ~tensor.isfinite()).any():
            raise RunError(f"{path} is damaged: its tensor {shortened(name)} is not finite")
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Return a SHA-256 of metadata and of names, types, shapes and all bytes of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest_of({METADATA_KEY: metadata, TENSORS_KEY: digest.hexdigest()})


def fingerprint(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Return a SHA-256 of metadata and of the single-precision values of floating-point tensors."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point():
            digest.update(f"\n{name} {list(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def strip_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix.``, without it."""
    start = f"{prefix}."
    return {key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)}


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Load weights, or say that they belong to other settings."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = shortened(str(error).splitlines()[-1])
        raise RunError(
            f"{source}: its weights do not fit its settings or data ({reason}); was config.yaml or "
            "the file exchanged?"
        ) from error


def learning_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of a model and the moments of its optimizer, by name."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        kept = {name: value for name, value in values.items() if value is not None}
        tensors |= {f"optimizer.{index}.{name}": value for name, value in kept.items()}
    return tensors


def restore_learning(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], source: Path
) -> None:
    """Put what :func:`learning_tensors` named back into a model and its optimizer."""
    load_weights(model, strip_prefix(tensors, "model"), source)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in strip_prefix(tensors, "optimizer").items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise RunError(f"{source} is damaged: it has no parameter for {shortened(key)}")
        parameter = parameters[int(index)]
        if value.ndim and value.shape != parameter.shape:
            raise RunError(f"{source} is damaged: {shortened(key)} has another shape")
        # In the memory layout of its parameter, since fused optimizers walk both by address.
        laid_out = torch.empty_like(parameter).copy_(value) if value.ndim else value
        moments.setdefault(int(index), {})[name] = laid_out.detach()
    # SGD has moments of all parameters or of none; Adam may have none where no gradient came.
    is_partial = isinstance(optimizer, torch.optim.SGD) and 0 < len(moments) < len(parameters)
    if is_partial or len({frozenset(of_one) for of_one in moments.values()}) > 1:
        raise RunError(f"{source} is damaged: some moments of the optimizer are missing")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
