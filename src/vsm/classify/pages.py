"""Reviews and suggestions for people: HTML pages with thumbnails, and CSV tables."""

import base64
import csv
import html
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from vsm.classify.labeling import Review, Suggestion
from vsm.data.images import read_file, thumbnail
from vsm.system.files import FORMULA, as_cell

SIDE = 112  # pixels of a thumbnail
STYLE = """
:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 70rem; padding: 0 1rem } h2 { margin-top: 2.5rem } .cards { display: flex;
flex-wrap: wrap; gap: 1rem } figure { margin: 0; width: 9.5rem; font-size: 13px;
overflow-wrap: anywhere } img { border-radius: 6px; display: block }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: left }
"""


def name_below(image: Path, root: Path) -> str:
    """Name an image relative to the folder that was given, if it lies there."""
    return str(image.relative_to(root) if image.is_relative_to(root) else image)


def review_html(found: Review, images: Sequence[Path], root: Path, number: int) -> str:
    """Return a page that shows the ``number`` most striking findings of each kind."""
    label_issues = [
        _card(
            [images[one.image]],
            root,
            f"<b>{_escaped(one.label)}</b> → {_escaped(one.suggestion)}?<br>"
            f"own label {one.probability:.1%}",
        )
        for one in found.label_issues[:number]
    ]
    outliers = [
        _card([images[n]], root, f"<b>{_escaped(label)}</b><br>score {score:.1f}")
        for n, label, score in found.outliers[:number]
    ]
    near_duplicates = [
        _card([images[first], images[second]], root, f"cosine {cosine:.3f}")
        for first, second, cosine in found.near_duplicates[:number]
    ]
    rows = "".join(
        f"<tr><td>{_escaped(first)}<td>{_escaped(second)}<td>{probability:.1%}"
        for first, second, probability in found.confusable[:number]
    )
    return _page(
        f"Review of {root.name}",
        f"{len(images):,} images of {len(found.labels):,} classes; every image is judged by all "
        "others.",
        _section(f"Labels that may be wrong ({len(found.label_issues):,})", label_issues)
        + _section("Images that are like no class", outliers)
        + _section(f"Near duplicates ({len(found.near_duplicates):,} pairs)", near_duplicates)
        + "<h2>Classes that are hard to tell apart</h2><table><tr><th>class<th>class<th>taken for "
        f"each other{rows}</table>",
    )


def review_csv(found: Review, images: Sequence[Path], root: Path) -> str:
    """Return a row for every image: its label, what it may be, and how odd it is."""
    suggestions = {one.image: as_cell(one.suggestion) for one in found.label_issues}
    duplicates = {
        two.second: as_cell(name_below(images[two.first], root))
        for two in reversed(found.near_duplicates)
    }
    place = {label: n for n, label in enumerate(found.labels.tolist())}
    return _csv(
        {
            "image": as_cell(name_below(images[n], root)),
            "label": as_cell(label),
            "probability": f"{found.probabilities[n, place[label]]:.4f}",
            "suggestion": suggestions.get(n, ""),
            "outlier_score": f"{score:.3f}",
            "near_duplicate": duplicates.get(n, ""),
        }
        for n, label, score in sorted(found.outliers)
    )


def suggestions_html(found: Sequence[Suggestion], images: Sequence[Path], root: Path) -> str:
    """Return a page that shows what was chosen, in its order, and why."""
    cards = [
        _card([images[one.image]], root, f"<b>{place}</b> {_escaped(one.reason)}")
        for place, one in enumerate(found, start=1)
    ]
    introduction = f"{len(found):,} of {len(images):,} images, the most useful first."
    return _page("Images to label next", introduction, _section("Suggestions", cards))


def suggestions_csv(found: Sequence[Suggestion], images: Sequence[Path], folder: Path) -> str:
    """Return a table that can be given as examples once its column ``label`` is filled in.

    Paths are relative to ``folder``, where the table will lie.
    """
    return _csv(
        {
            "path": _relative(images[one.image], folder),
            "label": "",
            "guess": as_cell(one.classes[0]),
            "probability": f"{one.probabilities[0]:.4f}",
            "novelty": f"{one.novelty:.4f}",
            "stands_for": one.stands_for,
            "gain": f"{one.gain:.3f}",
            "reason": one.reason,
        }
        for one in found
    )


def _page(title: str, introduction: str, body: str) -> str:
    """Return one HTML file; the title may be any text, the others are HTML."""
    return (
        f"<!doctype html><meta charset=utf-8><title>{_escaped(title)}</title>"
        f"<style>{STYLE}</style><h1>{_escaped(title)}</h1><p>{introduction}{body}\n"
    )


def _section(title: str, cards: Sequence[str]) -> str:
    return f"<h2>{title}</h2><div class=cards>{''.join(cards) or '<p>None.'}</div>"


def _card(images: Sequence[Path], root: Path, caption: str) -> str:
    """Show images above a caption, which is HTML, and their names."""
    shown = "".join(f"<img src='{_thumbnail(image)}' alt=''>" for image in images)
    names = "<br>".join(_escaped(name_below(image, root)) for image in images)
    return f"<figure>{shown}<figcaption>{caption}<br><small>{names}</small></figcaption></figure>"


def _thumbnail(path: Path) -> str:
    content = thumbnail(read_file(path), str(path), SIDE, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def _escaped(value: object) -> str:
    return html.escape(str(value))


def _csv(rows: Iterable[dict[str, object]]) -> str:
    listed = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(listed[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed)
    return text.getvalue()


def _relative(image: Path, folder: Path) -> str:
    """Return a path that leads from ``folder`` to the image, and is no formula."""
    try:
        path = os.path.relpath(image.absolute(), folder.absolute())
    except ValueError:  # another drive of Windows
        path = str(image.absolute())
    return os.path.join(os.curdir, path) if path.startswith(FORMULA) else path  # noqa: PTH118
