"""Where a run computes: its device, and the precision of its backbone.

Both belong to the machine, not to the run: they are chosen when a command starts and are not stored
with its settings. Generators stay on the CPU whatever the device, and what they draw is moved.
"""

import os
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vsm.errors import SettingsError

Precision = Literal["auto", "float32", "bfloat16"]
FUSED_DEVICES = ("cpu", "cuda", "mps")
"""Where torch's optimizers change all parameters in one operation."""


@dataclass(frozen=True)
class Placement:
    """Where tensors live and how the backbone computes."""

    device: torch.device
    precision: torch.dtype = torch.float32
    """Of the backbone's products; all that has to do with probability is float32."""

    @property
    def options(self) -> str:
        """Options for a command to compute here, if it would not by default."""
        name = "mps" if self.device.type == "mps" else str(self.device)
        usual, device = choose_placement(), ""
        if usual.device != self.device:
            usual, device = choose_placement(name), f" --device {name}"
        if usual.precision == self.precision:
            return device
        return f"{device} --precision {str(self.precision).removeprefix('torch.')}"


ON_CPU = Placement(torch.device("cpu"))
TILE_LEAF = 0x1D  # of CPUID: the sizes of AMX's tiles


def choose_placement(device: str = "auto", precision: Precision = "auto") -> Placement:
    """Choose where to compute: ``auto`` is a GPU if there is one, and bfloat16 if that has it."""
    chosen = _device(device)
    if precision == "auto":
        bfloat16 = chosen.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return Placement(chosen, torch.bfloat16 if bfloat16 else torch.float32)
    if precision == "bfloat16" and chosen.type == "cpu":
        avoid_unusable_amx()
    return Placement(chosen, getattr(torch, precision))


def avoid_unusable_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Keep oneDNN from using AMX where a virtual machine hides the CPUID leaf of tile sizes.

    There the first large product in bfloat16 would be an illegal instruction. This has an effect
    only before oneDNN computes anything; the user's own choice of instructions is kept.
    """
    try:
        described = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return
    level = re.search(r"^cpuid level\s*: (\d+)$", described, re.MULTILINE)
    if level and int(level[1]) < TILE_LEAF and re.search(r"\bamx_tile\b", described):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,2})?", name):
        raise SettingsError(f"device: expected auto, cpu, cuda, cuda:N or mps, got {name!r}")
    device = torch.device(name)
    if name not in ("cpu", "cuda") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingsError(f"device: several processes cannot share {name}; use auto, cuda or cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise SettingsError("device: mps is not available here; use auto or cpu")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise SettingsError(
            f"device: {name} asked for, but torch finds {count or 'no'} GPUs; use auto or cpu"
        )
    if device.index is not None:
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if 1 < count <= local_rank:
        raise SettingsError(
            f"device: this machine has {count} GPUs, too few for process {local_rank} of those "
            f"started on it; start at most {count}, or use --device cpu"
        )
    return torch.device("cuda", min(local_rank, count - 1))  # its own, or the only one it sees


def send(values: Tensor, device: torch.device) -> Tensor:
    """Move ``values`` from the CPU; to a GPU through pinned memory, without waiting for it."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def computing_in(precision: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Let matrix products and convolutions inside the block compute in ``precision``."""
    if precision == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, precision)
