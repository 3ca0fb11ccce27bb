"""Suggestions as one HTML file with thumbnails, and as a table to fill in."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from vsm.classify.pages import Thumbnails, escaped, page, section
from vsm.classify.suggestion import Suggestion
from vsm.system.files import FORMULA, as_cell


def suggestions_html(found: Sequence[Suggestion], pictures: Sequence[Path], root: Path) -> str:
    """Return a page that shows what was chosen, in its order, and why."""
    show = Thumbnails(pictures, root)
    cards = [
        show.card([one.picture], f"<b>{place}</b> {escaped(one.reason)}")
        for place, one in enumerate(found, start=1)
    ]
    introduction = f"{len(found):,} of {len(pictures):,} pictures, the most useful first."
    return page("Pictures to label next", introduction, section("Suggestions", cards))


def suggestions_csv(found: Sequence[Suggestion], pictures: Sequence[Path], folder: Path) -> str:
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
                _relative(pictures[one.picture], folder),
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


def _relative(picture: Path, folder: Path) -> str:
    """Return a path that leads from ``folder`` to the picture, and is no formula."""
    try:
        path = os.path.relpath(picture.absolute(), folder.absolute())
    except ValueError:  # another drive of Windows
        path = str(picture.absolute())
    return os.path.join(os.curdir, path) if path.startswith(FORMULA) else path  # noqa: PTH118
