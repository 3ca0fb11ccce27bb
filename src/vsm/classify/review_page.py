"""What a review found, as one HTML file with thumbnails and as CSV."""

import base64
import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps

from vsm.classify.review import Review
from vsm.data.images import FORMATS

SIDE = 112  # pixels of a thumbnail
FORMULA = ("=", "+", "-", "@", "\t", "\r")
STYLE = """
:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 70rem; padding: 0 1rem } h2 { margin-top: 2.5rem } .cards { display: flex;
flex-wrap: wrap; gap: 1rem } figure { margin: 0; width: 9.5rem; font-size: 13px;
overflow-wrap: anywhere } img { border-radius: 6px; display: block }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: left }
"""


def review_html(found: Review, pictures: Sequence[Path], root: Path, number: int) -> str:
    """Return a page that shows the ``number`` most striking findings of each kind."""
    show = _Shown(pictures, root)
    doubts = [
        show.card(
            [one.picture],
            f"<b>{_text(one.label)}</b> → {_text(one.suggestion)}?<br>"
            f"own label {one.probability:.1%}",
        )
        for one in found.doubts[:number]
    ]
    outliers = [
        show.card([one.picture], f"<b>{_text(one.label)}</b><br>score {one.score:.1f}")
        for one in found.outliers[:number]
    ]
    twins = [
        show.card([one.first, one.second], f"cosine {one.cosine:.3f}")
        for one in found.twins[:number]
    ]
    rows = "".join(
        f"<tr><td>{_text(one.first)}<td>{_text(one.second)}<td>{one.probability:.1%}"
        for one in found.confusable[:number]
    )
    count = f"{len(pictures):,} pictures of {len(found.labels):,} classes"
    return (
        f"<!doctype html><meta charset=utf-8><title>Review of {_text(root.name)}</title>"
        f"<style>{STYLE}</style><h1>Review of {_text(root.name)}</h1><p>{count}; every picture is "
        "judged by all others."
        + _section(f"Labels that may be wrong ({len(found.doubts):,})", doubts)
        + _section("Pictures that are like no class", outliers)
        + _section(f"Near duplicates ({len(found.twins):,} pairs)", twins)
        + f"<h2>Classes that are hard to tell apart</h2><table><tr><th>class<th>class<th>taken for "
        f"each other{rows}</table>\n"
    )


def review_csv(found: Review, pictures: Sequence[Path], root: Path) -> str:
    """Return a row for every picture: its label, what it may be, and how odd it is."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["picture", "label", "probability", "suggestion", "outlier_score", "twin"])
    doubts = {one.picture: one for one in found.doubts}
    scores = {one.picture: one for one in found.outliers}
    twins: dict[int, int] = {}
    for one in found.twins:
        twins.setdefault(one.second, one.first)
    place = {label: n for n, label in enumerate(found.labels.tolist())}
    for n, picture in enumerate(pictures):
        label = scores[n].label
        rows.writerow(
            [
                _cell(_name(picture, root)),
                _cell(label),
                f"{found.probabilities[n, place[label]]:.4f}",
                _cell(doubts[n].suggestion) if n in doubts else "",
                f"{scores[n].score:.3f}",
                _cell(_name(pictures[twins[n]], root)) if n in twins else "",
            ]
        )
    return text.getvalue()


class _Shown:
    """Makes thumbnails, each once."""

    def __init__(self, pictures: Sequence[Path], root: Path) -> None:
        self.pictures, self.root = pictures, root
        self._made: dict[int, str] = {}

    def card(self, numbers: Sequence[int], caption: str) -> str:
        images = "".join(f"<img src='{self._data(n)}' alt=''>" for n in numbers)
        names = "<br>".join(_text(_name(self.pictures[n], self.root)) for n in numbers)
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


def _section(title: str, cards: Sequence[str]) -> str:
    content = "".join(cards) or "<p>None."
    return f"<h2>{title}</h2><div class=cards>{content}</div>"


def _name(picture: Path, root: Path) -> str:
    return str(picture.relative_to(root) if picture.is_relative_to(root) else picture)


def _text(value: object) -> str:
    return html.escape(str(value))


def _cell(value: object) -> str:
    """Return a cell that no spreadsheet takes for a formula."""
    text = str(value)
    return f"'{text}" if text.startswith(FORMULA) else text
