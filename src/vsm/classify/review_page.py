"""What a review found, as one HTML file with thumbnails and as CSV."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from vsm.classify.pages import Thumbnails, escaped, name_below, page, section
from vsm.classify.review import Review
from vsm.system.files import as_cell


def review_html(found: Review, pictures: Sequence[Path], root: Path, number: int) -> str:
    """Return a page that shows the ``number`` most striking findings of each kind."""
    show = Thumbnails(pictures, root)
    doubts = [
        show.card(
            [one.picture],
            f"<b>{escaped(one.label)}</b> → {escaped(one.suggestion)}?<br>"
            f"own label {one.probability:.1%}",
        )
        for one in found.doubts[:number]
    ]
    outliers = [
        show.card([one.picture], f"<b>{escaped(one.label)}</b><br>score {one.score:.1f}")
        for one in found.outliers[:number]
    ]
    twins = [
        show.card([one.first, one.second], f"cosine {one.cosine:.3f}")
        for one in found.twins[:number]
    ]
    rows = "".join(
        f"<tr><td>{escaped(one.first)}<td>{escaped(one.second)}<td>{one.probability:.1%}"
        for one in found.confusable[:number]
    )
    count = f"{len(pictures):,} pictures of {len(found.labels):,} classes"
    return page(
        f"Review of {root.name}",
        f"{count}; every picture is judged by all others.",
        section(f"Labels that may be wrong ({len(found.doubts):,})", doubts)
        + section("Pictures that are like no class", outliers)
        + section(f"Near duplicates ({len(found.twins):,} pairs)", twins)
        + "<h2>Classes that are hard to tell apart</h2><table><tr><th>class<th>class<th>taken for "
        f"each other{rows}</table>",
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
                as_cell(name_below(picture, root)),
                as_cell(label),
                f"{found.probabilities[n, place[label]]:.4f}",
                as_cell(doubts[n].suggestion) if n in doubts else "",
                f"{scores[n].score:.3f}",
                as_cell(name_below(pictures[twins[n]], root)) if n in twins else "",
            ]
        )
    return text.getvalue()
