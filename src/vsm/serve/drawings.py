"""Pictures of remembered characters that the project draws itself and may therefore show."""

import io
import re
from functools import cache

import numpy as np
from PIL import Image

from vsm.data.dataset import Pixels
from vsm.data.glyphs import NUM_ALPHABETS, SEED, draw_alphabet
from vsm.runs.trained_model import TrainedModel

NAME = re.compile(r"alphabet(\d\d)/character(\d\d)")
SIDE = 84  # pixels of a picture, three for each of a drawing
DATA = "glyphs"


def draws_classes_of(trained: TrainedModel) -> bool:
    """Tell whether the classes that a model was trained with can be drawn."""
    return trained.settings.data == DATA


def is_drawn(name: str) -> bool:
    """Tell whether a class of the dataset ``glyphs`` may have this name."""
    found = NAME.fullmatch(name)
    return found is not None and int(found[1]) < sum(NUM_ALPHABETS.values())


def picture_of(name: str) -> bytes | None:
    """Return a PNG of a character of the dataset ``glyphs``; None if there is none of this name."""
    found = NAME.fullmatch(name)
    if found is None or not is_drawn(name):
        return None
    characters = _alphabet(int(found[1]))
    if int(found[2]) >= len(characters):
        return None
    image = Image.fromarray(255 - characters[int(found[2])])  # dark ink on white paper
    content = io.BytesIO()
    image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(content, "PNG")
    return content.getvalue()


@cache
def _alphabet(number: int) -> Pixels:
    """Return the first drawing of every character, ``[n, H, W]``."""
    return np.ascontiguousarray(draw_alphabet(SEED, number)[:, 0, ..., 0])
