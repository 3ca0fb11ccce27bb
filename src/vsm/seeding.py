"""All randomness: named generators derived from one seed, never global state.

A generator is a pure function of ``(seed, *names)``, for example ``(0, "noise", step)``, so that a
resumed run needs no generator state. A batch of tasks draws from one generator per task, keyed by
the task's place in the full batch: it meets the same noise in whichever process it is computed.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

Randomness = torch.Generator | Sequence[torch.Generator]
"""One generator for all, or one for each equal part of the first axis."""


@lru_cache(maxsize=64, typed=True)  # one classifier fits many tasks with one seed
def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed that depends on every part and on their order."""
    key = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a CPU generator for the purpose that ``names`` spell out."""
    return torch.Generator().manual_seed(derive_seed(seed, *names))


@contextmanager
def default_generator(seed: int, *names: str | int) -> Iterator[None]:
    """Seed torch's global generator inside the block, for code that takes none; then restore it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, *names))
        yield


def task_generators(seed: int, purpose: str, step: int, tasks: range) -> list[torch.Generator]:
    """Return one generator for each of ``tasks``, which count from the start of the full batch."""
    return [generator(seed, purpose, step, task) for task in tasks]


def normal(random: Randomness, *shape: int) -> Tensor:
    """Draw standard normal numbers."""
    return _fill(random, torch.empty(shape), lambda part, one: part.normal_(generator=one))


def uniform(random: Randomness, *shape: int) -> Tensor:
    """Draw uniform numbers from [0, 1)."""
    return _fill(random, torch.empty(shape), lambda part, one: part.uniform_(generator=one))


def bernoulli(random: Randomness, probability: float, *shape: int) -> Tensor:
    """Draw 1 with ``probability``, rounded to the nearest 1/65,536, and 0 otherwise; as integers.

    One byte is drawn where 256ths tell the probability, two elsewhere: far faster than floats.
    """
    generators = _sharing(random, shape[0])
    kind, bits = (torch.int8, 8) if probability * 2**8 % 1 == 0 else (torch.int16, 16)
    count = math.prod(shape) // len(generators)
    words = torch.empty(len(generators), -(-count * bits // 64), dtype=torch.int64)
    for part, one in zip(words, generators, strict=True):
        part.random_(-(2**63), None, generator=one)
    least = 2 ** (bits - 1) - round(probability * 2**bits)
    ones = words.view(kind).ge_(least) if least < 2 ** (bits - 1) else words.view(kind).zero_()
    return ones[:, :count].reshape(shape)


def integers(random: Randomness, below: int, *shape: int) -> Tensor:
    """Draw integers from 0 to ``below`` - 1."""
    empty = torch.empty(shape, dtype=torch.int64)
    return _fill(random, empty, lambda part, one: part.random_(below, generator=one))


def categorical(random: Randomness, weights: Tensor, count: int) -> Tensor:
    """Draw positions with replacement by each row of ``weights [B, A]``: ``[B, count]``."""
    chances = weights.detach().cpu()
    drawn = [
        torch.multinomial(part, count, replacement=True, generator=one)
        for part, one in _parts(random, chances)
    ]
    return torch.cat(drawn).to(weights.device)


def _fill(
    random: Randomness, values: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor]
) -> Tensor:
    for part, one in _parts(random, values):
        fill(part, one)
    return values


def _parts(random: Randomness, values: Tensor) -> Iterator[tuple[Tensor, torch.Generator]]:
    """Pair each generator with its equal share of the first axis."""
    generators = _sharing(random, len(values))
    return zip(values.tensor_split(len(generators)), generators, strict=True)


def _sharing(random: Randomness, rows: int) -> Sequence[torch.Generator]:
    """Return the generators that share ``rows`` evenly."""
    generators = [random] if isinstance(random, torch.Generator) else random
    if rows % len(generators):
        raise ValueError(f"random: {len(generators)} generators cannot share {rows} rows evenly")
    return generators
