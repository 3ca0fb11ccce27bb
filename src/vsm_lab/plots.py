"""What all figures share; nothing here imports torch. Needs matplotlib."""

import io
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vsm.system.colors import COLORS, QUIET

if TYPE_CHECKING:
    from vsm.data import ImageDataset

RIGHT, WRONG = "#228833", "#cc3311"


def color_of(position: int) -> str:
    """Return the color of a class or row by its position."""
    return COLORS[position % len(COLORS)]


def png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def svg(figure: Figure, name: str) -> bytes:
    """Return a figure as SVG, the same bytes for the same figure and name."""
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def hide_spines(axes: Axes, *sides: str) -> None:
    """Leave out some of the lines around a plot."""
    for side in sides:
        axes.spines[side].set_visible(False)


def show_image(axes: Axes, dataset: "ImageDataset", image_id: int, frame: str = "") -> None:
    """Draw one image of a dataset, without ticks, in a thick frame if that has a color."""
    pixels = np.asarray(dataset.images[image_id])
    if pixels.shape[-1] == 1:
        axes.imshow(pixels[..., 0], cmap="gray_r", vmin=0, vmax=255, interpolation="bilinear")
    else:
        axes.imshow(pixels, interpolation="bilinear")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(frame or QUIET)
        spine.set_linewidth(2.5 if frame else 0.8)
