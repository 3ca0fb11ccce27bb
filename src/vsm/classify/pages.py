"""Reviews and suggestions for people: HTML pages with thumbnails, and CSV tables."""

import base64
import csv
import html
import io
import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps

from vsm.classify.review import Review
from vsm.classify.suggestion import Suggestion
from vsm.data.images import FORMATS
from vsm.system.files import FORMULA, as_cell

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

    def __init__(self, images: Sequence[Path], root: Path) -> None:
        self.images, self.root = images, root
        self._made: dict[int, str] = {}

    def card(self, numbers: Sequence[int], caption: str) -> str:
        """Show the images at these positions above a caption, which is HTML, and their names."""
        images = "".join(f"<img src='{self._data(n)}' alt=''>" for n in numbers)
        names = "<br>".join(escaped(name_below(self.images[n], self.root)) for n in numbers)
        return (
            f"<figure>{images}<figcaption>{caption}<br><small>{names}</small></figcaption></figure>"
        )

    def _data(self, number: int) -> str:
        if number not in self._made:
            with Image.open(self.images[number], formats=FORMATS) as opened:
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


def name_below(image: Path, root: Path) -> str:
    """Name an image as it lies in the folder that was given, if it lies there."""
    return str(image.relative_to(root) if image.is_relative_to(root) else image)


def escaped(value: object) -> str:
    """Return text that HTML does not take for markup."""
    return html.escape(str(value))


def review_html(found: Review, images: Sequence[Path], root: Path, number: int) -> str:
    """Return a page that shows the ``number`` most striking findings of each kind."""
    show = Thumbnails(images, root)
    label_issues = [
        show.card(
            [one.image],
            f"<b>{escaped(one.label)}</b> → {escaped(one.suggestion)}?<br>"
            f"own label {one.probability:.1%}",
        )
        for one in found.label_issues[:number]
    ]
    outliers = [
        show.card([one.image], f"<b>{escaped(one.label)}</b><br>score {one.score:.1f}")
        for one in found.outliers[:number]
    ]
    near_duplicates = [
        show.card([one.first, one.second], f"cosine {one.cosine:.3f}")
        for one in found.near_duplicates[:number]
    ]
    rows = "".join(
        f"<tr><td>{escaped(one.first)}<td>{escaped(one.second)}<td>{one.probability:.1%}"
        for one in found.confusable[:number]
    )
    count = f"{len(images):,} images of {len(found.labels):,} classes"
    return page(
        f"Review of {root.name}",
        f"{count}; every image is judged by all others.",
        section(f"Labels that may be wrong ({len(found.label_issues):,})", label_issues)
        + section("Images that are like no class", outliers)
        + section(f"Near duplicates ({len(found.near_duplicates):,} pairs)", near_duplicates)
        + "<h2>Classes that are hard to tell apart</h2><table><tr><th>class<th>class<th>taken for "
        f"each other{rows}</table>",
    )


def review_csv(found: Review, images: Sequence[Path], root: Path) -> str:
    """Return a row for every image: its label, what it may be, and how odd it is."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["picture", "label", "probability", "suggestion", "outlier_score", "twin"])
    label_issues = {one.image: one for one in found.label_issues}
    scores = {one.image: one for one in found.outliers}
    twins: dict[int, int] = {}
    for one in found.near_duplicates:
        twins.setdefault(one.second, one.first)
    place = {label: n for n, label in enumerate(found.labels.tolist())}
    for n, image in enumerate(images):
        label = scores[n].label
        rows.writerow(
            [
                as_cell(name_below(image, root)),
                as_cell(label),
                f"{found.probabilities[n, place[label]]:.4f}",
                as_cell(label_issues[n].suggestion) if n in label_issues else "",
                f"{scores[n].score:.3f}",
                as_cell(name_below(images[twins[n]], root)) if n in twins else "",
            ]
        )
    return text.getvalue()


def suggestions_html(found: Sequence[Suggestion], images: Sequence[Path], root: Path) -> str:
    """Return a page that shows what was chosen, in its order, and why."""
    show = Thumbnails(images, root)
    cards = [
        show.card([one.image], f"<b>{place}</b> {escaped(one.reason)}")
        for place, one in enumerate(found, start=1)
    ]
    introduction = f"{len(found):,} of {len(images):,} images, the most useful first."
    return page("Images to label next", introduction, section("Suggestions", cards))


def suggestions_csv(found: Sequence[Suggestion], images: Sequence[Path], folder: Path) -> str:
    """Return a table that can be given as examples once its column ``label`` is filled in.

    Paths are relative to ``folder``, where the table will lie.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    columns = ["guess", "probability", "novelty", "stands_for", "gain", "reason"]
    rows.writerow(["path", "label", *columns])
    for one in found:
        rows.writerow(
            [
                _relative(images[one.image], folder),
                "",
                as_cell(one.classes[0]),
                f"{one.probabilities[0]:.4f}",
                f"{one.novelty:.4f}",
                one.stands_for,
                f"{one.gain:.3f}",
                one.reason,
            ]
        )
    return text.getvalue()


def _relative(image: Path, folder: Path) -> str:
    """Return a path that leads from ``folder`` to the image, and is no formula."""
    try:
        path = os.path.relpath(image.absolute(), folder.absolute())
    except ValueError:  # another drive of Windows
        path = str(image.absolute())
    return os.path.join(os.curdir, path) if path.startswith(FORMULA) else path  # noqa: PTH118
