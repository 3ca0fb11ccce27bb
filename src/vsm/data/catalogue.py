"""Which datasets there are, by name."""

from vsm.data import glyphs
from vsm.data.dataset import ImageDataset
from vsm.errors import DataError


def open_dataset(name: str) -> ImageDataset:
    """Open the dataset called ``name``, preparing it first where nothing needs to be fetched."""
    if name == "glyphs":
        return glyphs.open_glyphs()
    raise DataError(f"data: unknown dataset {name!r}; known: glyphs")
