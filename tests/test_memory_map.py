"""The image of a memory: every slot is there, in its place, and names do not touch."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.text import Annotation
from torch.nn import functional as F

from vsm.encoders import EncoderIdentity
from vsm.errors import MemoryFileError
from vsm.memory import SlotMemory
from vsm.memory.named import NamedMemory
from vsm.runs.memory_map import MOST_NAMES, draw_memory_map, write_memory_map
from vsm.seeding import generator


def memory_of(names: list[str], num_features: int = 6) -> NamedMemory:
    """A memory whose slots grow: the n-th has n + 1 samples."""
    count, random = len(names), generator(0, "slots", len(names))
    content = torch.randn(count, num_features, generator=random) * torch.arange(num_features, 0, -1)
    ids = torch.arange(count)
    slots = SlotMemory(content, ids, ids + 1, ids)
    return NamedMemory(slots, tuple(names), EncoderIdentity("mine", "0" * 64), (), "vsm")


def test_slots_lie_on_their_principal_axes_and_grow_with_their_samples() -> None:
    memory = memory_of([f"class {n}" for n in range(40)])
    [dots] = [
        part
        for part in draw_memory_map(memory, "a title").axes[0].collections
        if isinstance(part, PathCollection)
    ]
    places = np.asarray(dots.get_offsets())
    directions = F.normalize(memory.slots.content - memory.slots.content.mean(0), dim=-1).double()
    covariance = np.cov(directions.numpy().T)
    largest = np.linalg.eigvalsh(covariance)[::-1][:2]
    np.testing.assert_allclose(places.var(0, ddof=1), largest, rtol=1e-4)
    np.testing.assert_allclose(np.cov(places.T)[0, 1], 0, atol=1e-6)
    sizes = dots.get_sizes()
    assert (np.diff(sizes) >= 0).all()
    assert sizes[39] == pytest.approx(2 * sizes[19])


@pytest.mark.parametrize("names", [[f"class {n}" for n in range(40)], ["group/x"] * 600])
def test_names_do_not_touch_and_are_not_too_many(names: list[str]) -> None:
    figure = draw_memory_map(memory_of([f"{name}_{n}" for n, name in enumerate(names)]), "a title")
    [axes] = figure.axes
    figure.draw_without_rendering()
    texts = [part for part in axes.texts if isinstance(part, Annotation)]
    assert 10 < len(texts) <= MOST_NAMES + 1
    assert (texts[0].get_text() == "group") == ("/" in names[0])
    boxes = [text.get_window_extent() for text in texts]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)


def test_names_are_no_formulas(tmp_path: Path) -> None:
    write_memory_map(memory_of(["$5^$", "b", "c_$"]), tmp_path / "map.svg", "of $x^$")
    assert (tmp_path / "map.svg").is_file()


def test_what_is_no_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryFileError, match="at least three slots, got 2"):
        write_memory_map(memory_of(["a", "b"]), tmp_path / "map.png", "a title")
    with pytest.raises(MemoryFileError, match=r"ends in \.png, \.svg, \.pdf, got .*map\.jpg"):
        write_memory_map(memory_of(["a", "b", "c"]), tmp_path / "map.jpg", "a title")
    assert not list(tmp_path.iterdir())
