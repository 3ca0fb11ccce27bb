"""Maps: remembered classes in the plane. Drawing one needs matplotlib."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from vsm.errors import MemoryFileError
from vsm.memory.named import NamedMemory
from vsm.system.colors import COLORS, QUIET
from vsm.system.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 10.0, 150  # inches, dots per inch
SUFFIXES = (".png", ".svg", ".pdf")
DOTS, LARGEST_DOT, SMALLEST_DOT = 20_000.0, 90.0, 7.0  # square points: all together, and each
MOST_LINES, MOST_NAMES = 1000, 120
NAME_SIZE, GROUP_SIZE = 7.0, 9.0  # points
LETTER_WIDTH, BOLD_LETTER_WIDTH, LINE_HEIGHT = 0.58, 0.68, 1.2  # of a name's size
Points = npt.NDArray[np.float64]


def principal_plane(points: Tensor) -> tuple[Tensor, Tensor, list[float]]:
    """Return the center of points ``[n, D]``, two principal axes ``[D, 2]``, and their shares."""
    center = points.mean(0)
    _, scales, axes = torch.linalg.svd(points - center, full_matrices=False)
    shares = scales.square() / scales.square().sum().clamp_min(1e-12)
    return center, axes[:2].T, shares[:2].tolist()


def map_coordinates(points: Tensor, memory: NamedMemory | None) -> Tensor:
    """Place points ``[n, D]``, in the coordinates of a memory, in the plane: float64 ``[n, 2]``.

    They are the first two coordinates of class statistics, or else the principal axes.
    """
    points = points.double()
    if memory is None or memory.memory.statistics is None:
        center, plane, _ = principal_plane(points)
        points = (points - center) @ plane
    return F.pad(points, (0, max(0, 2 - points.shape[1])))[:, :2]


def write_memory_map(memory: NamedMemory, path: Path, title: str) -> None:
    """Draw a memory of at least three classes to a file, whose ending says how; atomically."""
    if path.suffix not in SUFFIXES:
        raise MemoryFileError(
            f"plot: expected a file that ends in {', '.join(SUFFIXES)}, got {path}"
        )
    figure = draw_memory_map(memory, title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=DPI)


def draw_memory_map(memory: NamedMemory, title: str) -> "Figure":
    """Show every slot as a dot, and names where they fit.

    Places are the two principal axes of the slots' directions from their mean. A dot's area is in
    proportion to the samples that went into it. Lines lead to nearest neighbors in all dimensions,
    if there are not too many. Names of the form ``group/class`` give a color to every group.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    slots, names = memory.slots, memory.names
    if len(slots) < 3:
        raise MemoryFileError(f"plot: a map needs at least three slots, got {len(slots)}")
    directions = F.normalize(slots.content - slots.content.mean(0), dim=-1)
    center, plane, shares = principal_plane(directions)
    places = ((directions - center) @ plane).double().numpy()
    extent = np.ptp(places, 0)
    height = WIDTH * min(max(extent[1] / max(extent[0], 1e-12), 0.5), 1.3)
    figure = Figure(figsize=(WIDTH, height + 0.5), layout="constrained")
    axes = figure.add_subplot()
    if len(slots) <= MOST_LINES:
        nearest = (directions @ directions.mT).fill_diagonal_(-torch.inf).argmax(1).numpy()
        lines = np.stack([places, places[nearest], np.full_like(places, np.nan)], 1)  # [A, 3, 2]
        axes.plot(*lines.reshape(-1, 2).T, color="#999999", lw=0.5, alpha=0.5, zorder=0)
    has_groups = all("/" in name for name in names)
    groups = [name.partition("/")[0] if has_groups else "" for name in names]
    counts = slots.counts.double().numpy()
    largest = min(DOTS / len(counts), LARGEST_DOT)
    areas = np.maximum(counts / max(counts.max(), 1) * largest, SMALLEST_DOT)
    hues = {group: COLORS[n % (len(COLORS) - 1)] for n, group in enumerate(sorted(set(groups)))}
    dots: dict[str, Any] = {"s": areas, "c": [hues[group] for group in groups]}
    axes.scatter(*places.T, **dots, alpha=0.75, linewidths=0.3, edgecolors="white")
    _frame(axes, shares, title)
    figure.draw_without_rendering()  # settles the size of the axes, in which names fit or do not
    labels = _Labels(axes)
    for group in sorted(set(groups) - {""}, key=lambda one: -groups.count(one)):
        members = [n for n, other in enumerate(groups) if other == group]
        labels.write(np.median(places[members], 0), 0.0, group, hues[group], bold=True)
    for slot in np.argsort(-areas, kind="stable").tolist():
        if len(labels.boxes) < MOST_NAMES:
            labels.write(places[slot], areas[slot], names[slot], "#333333")
    return figure


def _frame(axes: "Axes", shares: list[float], title: str) -> None:
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08, 0.03)
    axes.set(xticks=[], yticks=[])
    for axis, share in zip((axes.xaxis, axes.yaxis), shares, strict=True):
        axis.set_label_text(f"{share:.0%} of the variance", fontsize=8, color="#666666")
    for spine in axes.spines.values():
        spine.set_color(QUIET)
    axes.set_title(title, fontsize=11, parse_math=False)


class _Labels:
    """Writes names; one that would touch another is left out."""

    def __init__(self, axes: "Axes") -> None:
        self._axes = axes
        self._dots_per_point = axes.figure.dpi / 72
        self._extent = axes.get_window_extent().extents
        self.boxes = np.zeros((0, 4))  # left, bottom, right, top, in dots

    def write(self, place: Points, area: float, name: str, color: str, bold: bool = False) -> None:
        """Write right of, left of, above or below a dot, wherever it fits first."""
        from matplotlib.patheffects import withStroke  # noqa: PLC0415 - an extra

        text = name.replace("_", " ")
        points, letter = (GROUP_SIZE, BOLD_LETTER_WIDTH) if bold else (NAME_SIZE, LETTER_WIDTH)
        dots = points * self._dots_per_point
        size = np.asarray([letter * len(text), LINE_HEIGHT]) * dots
        gap = math.sqrt(area / math.pi) * self._dots_per_point + 0.3 * dots
        middle = self._axes.transData.transform(place)
        for direction in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            at = middle + np.asarray(direction) * (size / 2 + gap)
            low, high = at - size / 2, at + size / 2
            is_inside = (low > self._extent[:2]).all() and (high < self._extent[2:]).all()
            if is_inside and ((self.boxes[:, :2] > high) | (self.boxes[:, 2:] < low)).any(1).all():
                break
        else:
            return
        self.boxes = np.vstack([self.boxes, [*low, *high]])
        self._axes.annotate(
            text,
            tuple(self._axes.transData.inverted().transform(at)),
            ha="center",
            va="center",
            color=color,
            size=points,
            weight="bold" if bold else "normal",
            path_effects=[withStroke(linewidth=2, foreground="white")],
            parse_math=False,  # a dollar sign in a name is just that
        )
