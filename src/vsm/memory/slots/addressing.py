"""Where to look in the memory: Eq. 9."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.settings import MemorySettings

EPSILON = 1e-6  # no length is taken to be less
DEFAULT_SCALE = {"cosine": 30.0, "dot": 1.0}


class Addressing(nn.Module):
    """λ_a = softmax_a(scale · g(M_a, S)), with g the cosine or the dot product.

    Raw dot products of many post-ReLU features saturate to one-hot, and cosines alone are almost
    uniform; hence the cosine with a learnable scale that starts sharp. Post-ReLU features also
    share a large common part, which makes every cosine close to one: by default they are compared
    relative to the mean of all slots that are not masked, so that a masked slot has no influence.

    Two controls measure what addressing is worth: equal weights for all slots, and equally sharp
    weights that belong to other slots (half the memory further on).
    """

    def __init__(self, settings: MemorySettings) -> None:
        super().__init__()
        self.similarity = settings.addressing
        self.center = settings.center_addressing
        self.control = settings.control
        scale = settings.addressing_scale or DEFAULT_SCALE[settings.addressing]
        self.log_scale = nn.Parameter(
            torch.tensor(math.log(scale)), requires_grad=settings.learn_addressing_scale
        )

    def forward(self, support_mean: Tensor, content: Tensor, slot_mask: Tensor | None) -> Tensor:
        """Eq. 9: return λ ``[T, N, A]``; a row whose slots are all masked is zero throughout.

        Args:
            support_mean: ``[T, N, D]``.
            content: M ``[A, D]``.
            slot_mask: boolean ``[T, N, A]``, slots that may not be addressed, or None.
        """
        num_slots = content.shape[0]
        is_centered = self.center and num_slots > 0
        if is_centered:
            center = content.mean(0)
            support_mean, content = support_mean - center, content - center
        if is_centered and slot_mask is not None:
            similarity = self._about_visible(support_mean, content, ~slot_mask)
        elif self.similarity == "cosine":
            similarity = F.normalize(support_mean, dim=-1) @ F.normalize(content, dim=-1).mT
        else:
            similarity = support_mean @ content.mT
        logits = self.log_scale.exp() * similarity
        if self.control == "uniform":
            logits = torch.zeros_like(logits)
        elif self.control == "permuted":
            logits = logits.roll(num_slots // 2, -1)
        if slot_mask is not None:
            logits = logits.masked_fill(slot_mask, -torch.inf)
        return masked_softmax(logits)

    def _about_visible(self, support: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        """Compare relative to the mean of each class's visible slots: ``[T, N, A]``.

        Products are expanded, since a center for each class would make slots ``[T, N, A, D]``. As
        ``support [T, N, D]`` and ``slots [A, D]`` are relative to the mean of all, nothing cancels.
        """
        counts = visible.sum(-1, keepdim=True).clamp_min(1)
        center = visible.to(slots) @ slots / counts  # [T, N, D]
        support = support - center
        dot: Tensor = support @ slots.mT - (support * center).sum(-1, keepdim=True)
        if self.similarity == "dot":
            return dot
        squares = slots.square().sum(-1) - 2 * (center @ slots.mT)
        squares = squares + center.square().sum(-1, keepdim=True)  # |M_a - center|² [T, N, A]
        lengths = squares.clamp_min(EPSILON**2).sqrt()
        cosine: Tensor = dot / (lengths * support.norm(dim=-1, keepdim=True).clamp_min(EPSILON))
        return cosine


def masked_softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis; rows of −∞ only become zeros, with finite gradients."""
    all_masked = torch.isneginf(logits).all(-1, keepdim=True)
    return logits.masked_fill(all_masked, 0.0).softmax(-1).masked_fill(all_masked, 0.0)


def entropy(weights: Tensor) -> Tensor:
    """Return −Σ λ log λ in nats over the last axis: ``[...]``."""
    total: Tensor = torch.special.entr(weights).sum(-1)
    return total
