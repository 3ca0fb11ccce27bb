"""An encoder that others trained: used as it is, and its weights stay where they are."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from vsm.errors import BackboneError
from vsm.seeding import Randomness


class FrozenEncoder(nn.Module):
    """Wraps a network so that it is a backbone without parameters.

    A run directory of a model with such a backbone holds none of its weights, but at most their
    digest, so that other weights under the same name are noticed.

    Attributes:
        network: maps images ``[B, C, H, W]`` to features ``[B, D]``.
        num_features: D.
        name: for messages.
        digest: of the weights, ``[32]`` bytes; not there where the name stands for them.
    """

    network: nn.Module
    digest: Tensor

    def __init__(
        self, network: nn.Module, num_features: int, name: str, digest: bytes | None = None
    ) -> None:
        super().__init__()
        object.__setattr__(self, "network", network.eval().requires_grad_(False))  # not a child
        self.num_features = num_features
        self.name = name
        if digest is not None:
            self.register_buffer("digest", torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    def forward(self, images: Tensor, random: Randomness | None = None) -> Tensor:  # noqa: ARG002 - contract
        """Map images ``[B, C, H, W]`` to features ``[B, num_features]``."""
        features: Tensor = self.network(images)
        return features

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """Move with the model that it is a part of."""
        self.network._apply(fn, recurse)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        """Refuse the digest of other weights."""
        stored, own = state_dict.get(f"{prefix}digest"), self._buffers.get("digest")
        if stored is not None and own is not None and not torch.equal(stored.cpu(), own.cpu()):
            raise BackboneError(
                f"encoder: {self.name} has other weights than those whose features were "
                f"remembered (SHA-256 {_hex(own)}, not {_hex(stored)}); use the version that it was"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)


def _hex(digest: Tensor) -> str:
    return bytes(digest.tolist()).hex()[:12]
