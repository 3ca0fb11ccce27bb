"""Batch norm over the images of all processes.

torch's ``SyncBatchNorm`` does not support the CPU. This one works on any device, sends one small
message per layer and direction, and leaves the arithmetic to torch's own kernels.
"""

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from vsm.system.distributed import Processes


class SynchronizedBatchNorm(_BatchNorm):
    """Batch norm of the full batch, of which this process holds an equal share.

    It takes over the parameters and buffers of a plain layer that :func:`can_be_synchronized`. In
    evaluation, and where running statistics are not tracked, it is the plain layer.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: _BatchNorm, processes: Processes) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum)
        self.processes = processes
        for name, parameter in layer.named_parameters():
            setattr(self, name, parameter)
        for name, buffer in layer.named_buffers():
            setattr(self, name, buffer)
        self.train(layer.training)

    def _check_input_dim(self, images: Tensor) -> None:
        """Accept what the plain layer accepts: ``[B, C, ...]``."""

    def forward(self, images: Tensor) -> Tensor:
        """Normalize ``[B, C, ...]`` and, while training, update the running statistics."""
        if not (self.training and self.track_running_stats):
            return super().forward(images)
        mean, variance = global_statistics(images.detach(), self.processes)
        with torch.no_grad():
            count = _count(images, self.processes)
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        normalized: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            images, self.weight, self.bias, mean, variance, self.eps, self.processes
        )
        return normalized


def can_be_synchronized(layer: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether ``layer`` is torch's batch norm with weights, running statistics and a momentum."""
    return (
        type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        and isinstance(layer, _BatchNorm)
        and layer.affine
        and layer.track_running_stats
        and layer.momentum is not None
    )


def synchronize_batch_norm(network: nn.Module, processes: Processes) -> None:
    """Replace every batch norm of ``network``; nothing changes for a single process."""
    if processes.count == 1:
        return
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if can_be_synchronized(child):
                setattr(module, name, SynchronizedBatchNorm(child, processes))


def unsynchronized_buffers(network: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers in which processes may drift apart: running statistics of plain layers."""
    for module in network.modules():
        if not isinstance(module, SynchronizedBatchNorm):
            yield from (one for one in module.buffers(recurse=False) if one.is_floating_point())


def global_statistics(images: Tensor, processes: Processes) -> tuple[Tensor, Tensor]:
    """Mean and variance ``[C]`` of every channel over all processes' ``[B, C, ...]``.

    The variance is that within shares plus that of the shares' means, which does not cancel as
    E[x²] − E[x]² would.
    """
    kind = torch.promote_types(images.dtype, torch.float32)
    unused = torch.zeros(2, images.shape[1], dtype=kind, device=images.device)
    own = torch.batch_norm_update_stats(images, unused[0], unused[1], 0.0)  # mean, variance: [C]
    means, variances = processes.all_gather(torch.stack(own).unsqueeze(0)).unbind(1)  # [count, C]
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


def _count(images: Tensor, processes: Processes) -> int:
    """Return how many values of a channel all shares hold together."""
    return images.numel() // images.shape[1] * processes.count


class _Normalize(torch.autograd.Function):
    """y = w·(x − mean)/√(variance + ε) + b, differentiated through mean and variance as well.

    With x̂ = (y − b)/w and n values of a channel in all shares:
    ∂x = w/√(variance + ε) · (∂y − Σ∂y/n − x̂·Σ(∂y·x̂)/n), where the sums run over all shares. The
    gradients of w and b are those of this share: they are averaged with all others later.
    """

    @staticmethod
    def forward(
        context: Any,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        processes: Processes,
    ) -> Tensor:
        context.save_for_backward(images, weight, mean, variance)
        context.eps, context.processes = eps, processes
        return F.batch_norm(images, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mean, variance = context.saved_tensors
        constants_held, weight_gradient, bias_gradient = torch.ops.aten.native_batch_norm_backward(
            gradient, images, weight, mean, variance, None, None, False, context.eps, [True] * 3
        )
        sums = context.processes.all_reduce(torch.stack([weight_gradient, bias_gradient]))
        through_variance, through_mean = sums / _count(images, context.processes)  # [C]
        scale = (variance + context.eps).rsqrt()
        slope = -weight * scale.square() * through_variance
        offset = -weight * scale * through_mean - slope * mean
        shape = (1, -1, *[1] * (images.ndim - 2))
        constants_held.addcmul_(images, slope.view(shape)).add_(offset.view(shape))
        return constants_held, weight_gradient, bias_gradient, None, None, None, None
