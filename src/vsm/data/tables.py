"""Your own images as a table: a CSV file with their paths and, if they have any, their labels.

The header names the columns, in any order and among others: ``path`` (or ``file``, ``filename``,
``image``) and ``label`` (or ``class``). Relative paths are relative to the table.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from vsm.errors import DataError

SUFFIX = ".csv"
PATHS, LABELS = ("path", "file", "filename", "image"), ("label", "class")
MOST_BYTES, MOST_ROWS = 256 * 2**20, 1_000_000
MOST_SHOWN = 80  # letters of a cell that messages quote


class ImageTable(NamedTuple):
    """The images that a table lists, each once; labels are None if it has none or are ignored."""

    images: list[Path]
    labels: list[str] | None


def is_table(path: Path) -> bool:
    """Whether ``path`` is a CSV file."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def read_table(path: Path, labels: Literal["required", "optional", "ignored"]) -> ImageTable:
    """Read a table; errors name the line.

    Args:
        path: of the CSV file: UTF-8, separated by commas.
        labels: whether there must be a column of labels, and whether it is read.
    """
    rows = _rows(path, _text(path))
    line, header = next(rows, (1, []))
    place, columns = f"{path}, line {line}", [name.strip().lower() for name in header]
    path_column = _column(place, columns, PATHS, required=True)
    label_column = -1
    if labels != "ignored":
        label_column = _column(place, columns, LABELS, required=labels == "required")
    found: dict[Path, tuple[Path, str, int]] = {}
    for line, row in rows:
        place = f"{path}, line {line}"
        if len(row) > len(columns):
            raise DataError(
                f"{place}: has {len(row)} cells, but the header {len(columns)}; put cells with "
                "commas in double quotes"
            )
        cells = [cell.strip() for cell in row] + [""] * (len(columns) - len(row))
        for name, column in (("path", path_column), ("label", label_column)):
            if column >= 0 and not cells[column]:
                raise DataError(f"{place}: the {name} is empty; fill it in, or remove the line")
        image = path.parent / cells[path_column]
        if not _is_file(image):
            raise DataError(
                f"{place}: there is no file {_shown(cells[path_column])}; paths are relative to "
                "the table"
            )
        label = cells[label_column] if label_column >= 0 else ""
        _, before, first = found.setdefault(image.resolve(), (image, label, line))
        if before != label:
            raise DataError(
                f"{place}: {image.name} is {_shown(label)} here, but {_shown(before)} in line "
                f"{first}; keep one of them"
            )
    if not found:
        raise DataError(f"{path}: has a header but no images; add a line for each")
    images, given, _ = zip(*found.values(), strict=True)
    return ImageTable(list(images), list(given) if label_column >= 0 else None)


def _text(path: Path) -> str:
    """Return the contents of a text file of at most ``MOST_BYTES``."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise DataError(
                f"{path}: has {size:,} bytes, but a table at most {MOST_BYTES:,}; split it"
            )
        content = path.read_bytes()
        bad = content.find(b"\0")
        if bad < 0:
            return content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        bad = error.start
    line = content.count(b"\n", 0, bad) + 1
    raise DataError(f"{path}, line {line}: is not UTF-8 text; save the table as CSV in UTF-8")


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines that are not blank, each with its number."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for count, row in enumerate(reader):
            if count > MOST_ROWS:
                raise DataError(f"{path}: has more than {MOST_ROWS:,} lines; split it")
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: is not CSV ({error}); check its quotes"
        ) from error


def _column(place: str, columns: Sequence[str], names: Sequence[str], required: bool) -> int:
    """Return the position of the column that has one of ``names``, or -1."""
    found = [position for position, name in enumerate(columns) if name in names]
    if len(found) > 1:
        both = " and ".join(repr(columns[position]) for position in found)
        raise DataError(f"{place}: has the columns {both}; keep one of them")
    if required and not found:
        raise DataError(
            f"{place}: expected a header with the column {names[0]!r}, separated by commas, got "
            + (_shown(",".join(columns)) if columns else "nothing")
        )
    return found[0] if found else -1


def _is_file(path: Path) -> bool:
    """Whether it is neither a device nor a pipe, which would never end, nor an invalid name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _shown(text: str) -> str:
    """Quote a text, or how it begins if it is long."""
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…")
