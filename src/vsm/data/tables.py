"""Your own images as a table: a CSV file with their paths and, optionally, their labels.

The header names the columns, in any order and among others: ``path`` (or ``file``, ``filename``,
``image``) and ``label`` (or ``class``). Relative paths are relative to the table.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from vsm.errors import DataError, DocumentError
from vsm.system.documents import read_file, shortened

SUFFIX = ".csv"
PATHS, LABELS = ("path", "file", "filename", "image"), ("label", "class")
MAX_BYTES = 256 * 2**20
MAX_SHOWN = 80  # letters of a cell that messages quote


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
    rows = _rows(path)
    place, header = next(rows, (f"{path}, line 1", []))
    header = [name.lower() for name in header]
    path_column = _column(place, header, PATHS, required=True)
    label_column = None
    if labels != "ignored":
        label_column = _column(place, header, LABELS, required=labels == "required")
    found: dict[Path, tuple[Path, str, str]] = {}
    for place, row in rows:
        if len(row) > len(header):
            raise DataError(
                f"{place}: has {len(row)} cells, but the header {len(header)}; put cells with "
                "commas in double quotes"
            )
        cells = [*row, *[""] * (len(header) - len(row))]
        for column, kind in ((path_column, "path"), (label_column, "label")):
            if column is not None and not cells[column]:
                raise DataError(f"{place}: the {kind} is empty; fill it in, or remove the line")
        image, label = path.parent / cells[path_column or 0], cells[label_column or 0]
        if not _is_file(image):
            name = _quoted(cells[path_column or 0])
            raise DataError(f"{place}: there is no file {name}; paths are relative to the table")
        _, before, first = found.setdefault(image.resolve(), (image, label, place))
        if label_column is not None and before != label:
            raise DataError(
                f"{place}: {image.name} is {_quoted(label)} here, but {_quoted(before)} in "
                f"{first.rpartition(', ')[2]}; keep one of them"
            )
    if not found:
        raise DataError(f"{path}: has a header but no images; add a line for each")
    images, given, _ = zip(*found.values(), strict=True)
    return ImageTable(list(images), None if label_column is None else list(given))


def _rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the cells of lines that are not blank, each with its place for messages."""
    try:
        text = read_file(path, MAX_BYTES).decode("utf-8-sig")
    except DocumentError as error:
        raise DataError(f"{error}; split it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: is not UTF-8 text; save it as UTF-8") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any("\0" in cell for cell in cells):
                raise csv.Error("a NUL character")
            if any(cells):
                yield f"{path}, line {reader.line_num}", cells
    except csv.Error as error:
        line = reader.line_num
        raise DataError(f"{path}, line {line}: is not CSV ({error}); check its quotes") from error


def _column(place: str, header: Sequence[str], names: Sequence[str], required: bool) -> int | None:
    """Return the position of the column that has one of ``names``."""
    found = [position for position, name in enumerate(header) if name in names]
    if len(found) > 1:
        both = " and ".join(repr(header[position]) for position in found)
        raise DataError(f"{place}: has the columns {both}; keep one of them")
    if required and not found:
        raise DataError(
            f"{place}: expected a header with the column {names[0]!r}, separated by commas, got "
            + (_quoted(",".join(header)) if header else "nothing")
        )
    return found[0] if found else None


def _is_file(path: Path) -> bool:
    """Whether it is neither a device nor a pipe, which would never end, nor an invalid name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _quoted(text: str) -> str:
    return repr(shortened(text, MAX_SHOWN))
