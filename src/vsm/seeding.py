"""All randomness: named generators derived from one seed, never global state.

A generator is a pure function of ``(seed, *names)``, for example ``(0, "noise", step)``. A resumed
run therefore needs no generator state: step 700 draws what step 700 always draws.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed that depends on every part and on their order."""
    key = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a CPU generator for the purpose that ``names`` spell out."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))


@contextmanager
def default_generator(seed: int, *names: str | int) -> Iterator[None]:
    """Seed torch's global generator inside the block and restore it after.

    Only for code that cannot be handed a generator: the initialisers of ``torch.nn`` modules.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, *names))
        yield
