"""One run in several processes.

Every process holds the full model and memory. The T tasks of a step are divided into contiguous
equal parts, gradients are averaged, and observations are gathered in the order of the processes.
So all of them make the same step, which is the step that one process would make.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from vsm.errors import ProcessLostError, SettingsError

TIMEOUT = timedelta(minutes=30)
"""Of collective operations: the others wait while the first process validates. A process that ends,
even by SIGKILL, is noticed at once."""


@dataclass(frozen=True)
class Processes:
    """This process among ``count``; all call every method together, a single one sends nothing."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files, prints and validates."""
        return self.rank == 0

    def share(self, num_tasks: int) -> range:
        """Return the places in a batch of ``num_tasks`` that this process computes."""
        if num_tasks % self.count:
            raise SettingsError(
                f"tasks: {num_tasks} tasks of a step cannot be shared evenly by {self.count} "
                f"processes; make tasks a multiple of {self.count}"
            )
        size = num_tasks // self.count
        return range(self.rank * size, (self.rank + 1) * size)

    def owned(self, positions: Tensor, total: int) -> Tensor:
        """Return a mask of the ``positions`` among ``total`` in this process's contiguous part."""
        return positions * self.count // max(total, 1) == self.rank

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of all processes' ``values``, bit-identical in each."""
        if self.count == 1:
            return values
        summed = values.clone(memory_format=torch.contiguous_format)
        _exchange(dist.all_reduce, summed)
        return summed

    def all_gather(self, rows: Tensor) -> Tensor:
        """Concatenate the ``rows [B, ...]`` of all processes in order: ``[count · B, ...]``."""
        if self.count == 1:
            return rows
        rows = rows.contiguous()
        parts = list(rows.new_empty(self.count, *rows.shape))
        _exchange(dist.all_gather, parts, rows)
        return torch.cat(parts)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each of ``tensors``, of one dtype, by its average, in one message for all."""
        tensors = list(tensors)
        if self.count == 1 or not tensors:
            return
        flat = self.all_reduce(torch.cat([tensor.flatten() for tensor in tensors])) / self.count
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients; which parameters have one must not depend on the process."""
        self.average(parameter.grad for parameter in parameters if parameter.grad is not None)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of the first process."""
        if self.count == 1:
            return
        for tensor in tensors:
            values = tensor.contiguous()
            _exchange(dist.broadcast, values, 0)
            tensor.copy_(values)

    def broadcast_value(self, value: float) -> float:
        """Return the first process's ``value``."""
        held = torch.tensor([value], dtype=torch.float64)
        self.broadcast([held])
        return held.item()

    def all_reduce_max(self, value: int) -> int:
        """Return the largest ``value`` of all processes."""
        held = torch.tensor([value])
        if self.count > 1:
            _exchange(dist.all_reduce, held, dist.ReduceOp.MAX)
        return int(held.item())

    def barrier(self) -> None:
        """Wait for all processes."""
        self.all_reduce_max(0)


SINGLE_PROCESS = Processes()


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join the other processes of this job, if ``torchrun`` announces them in the environment."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE_PROCESS
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise ProcessLostError(
            f"the processes of this job did not find each other ({error}); start them with torchrun"
        ) from error
    try:
        processes = Processes(dist.get_rank(), dist.get_world_size())
        processes.barrier()
        yield processes
    finally:
        dist.destroy_process_group()


def _exchange(collective: Callable[..., object], *arguments: object) -> None:
    try:
        collective(*arguments)
    except RuntimeError as error:
        raise ProcessLostError("a process of this job was lost") from error
