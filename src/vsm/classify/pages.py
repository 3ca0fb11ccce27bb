"""Parts of the pages and tables that people get: thumbnails, cards and safe cells."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps

from vsm.data.images import FORMATS

SIDE = 112  # pixels of a thumbnail
STYLE = """
:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 70rem; padding: 0 1rem } h2 { margin-top: 2.5rem } .cards { display: flex;
flex-wrap: wrap; gap: 1rem } figure { margin: 0; width: 9.5rem; font-size: 13px;
overflow-wrap: anywhere } img { border-radius: 6px; display: block }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: left }
"""


class Thumbnails:
    """Makes thumbnails, each once."""

    def __init__(self, pictures: Sequence[Path], root: Path) -> None:
        self.pictures, self.root = pictures, root
        self._made: dict[int, str] = {}

    def card(self, numbers: Sequence[int], caption: str) -> str:
        """Show the pictures at these positions above a caption, which is HTML, and their names."""
        images = "".join(f"<img src='{self._data(n)}' alt=''>" for n in numbers)
        names = "<br>".join(escaped(name_below(self.pictures[n], self.root)) for n in numbers)
        return (
            f"<figure>{images}<figcaption>{caption}<br><small>{names}</small></figcaption></figure>"
        )

    def _data(self, number: int) -> str:
        if number not in self._made:
            with Image.open(self.pictures[number], formats=FORMATS) as opened:
                opened.draft("RGB", (2 * SIDE, 2 * SIDE))
                image = ImageOps.exif_transpose(opened).convert("RGB")
            image.thumbnail((SIDE, SIDE))
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=80)
            encoded = base64.b64encode(buffer.getvalue()).decode()
            self._made[number] = f"data:image/jpeg;base64,{encoded}"
        return self._made[number]


def page(title: str, introduction: str, body: str) -> str:
    """Return one HTML file; the title may be any text, the others are HTML."""
    return (
        f"<!doctype html><meta charset=utf-8><title>{escaped(title)}</title>"
        f"<style>{STYLE}</style><h1>{escaped(title)}</h1><p>{introduction}{body}\n"
    )


def section(title: str, cards: Sequence[str]) -> str:
    """Return cards under a heading."""
    content = "".join(cards) or "<p>None."
    return f"<h2>{title}</h2><div class=cards>{content}</div>"


def name_below(picture: Path, root: Path) -> str:
    """Name a picture as it lies in the folder that was given, if it lies there."""
    return str(picture.relative_to(root) if picture.is_relative_to(root) else picture)


def escaped(value: object) -> str:
    """Return text that HTML does not take for markup."""
    return html.escape(str(value))
