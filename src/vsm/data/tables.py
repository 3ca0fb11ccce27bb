"""Your own pictures as a table: a CSV file with their paths and, if they have any, their labels.

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

Asked = Literal["required", "optional", "ignored"]


class PictureTable(NamedTuple):
    """The pictures that a table lists, each once; labels are None if it has none, or none count."""

    pictures: list[Path]
    labels: list[str] | None


def is_table(path: Path) -> bool:
    """Tell whether ``path`` is a file that is named as a table is."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def read_table(path: Path, labels: Asked) -> PictureTable:
    """Read a table, or say in which line it is wrong.

    Args:
        path: of the CSV file: UTF-8, separated by commas.
        labels: whether there must be a column of labels, and whether it is read.
    """
    rows = _rows(path, _text(path))
    line, header = next(rows, (1, []))
    place, columns = f"{path}, line {line}", [name.strip().lower() for name in header]
    path_column = _column(place, columns, PATHS)
    if path_column is None:
        raise _lacks(place, header, "path")
    label_column = None if labels == "ignored" else _column(place, columns, LABELS)
    if label_column is None and labels == "required":
        raise _lacks(place, header, "label")
    found: dict[Path, tuple[Path, str, int]] = {}
    for line, row in rows:
        if len(row) > len(columns):
            raise DataError(
                f"{path}, line {line}: has {len(row)} cells, but the header {len(columns)}; put "
                "cells with commas in double quotes"
            )
        picture = _picture(path, line, _cell(row, path_column))
        label = "" if label_column is None else _cell(row, label_column)
        if label_column is not None and not label:
            raise DataError(
                f"{path}, line {line}: the label is empty; fill it in, or remove the line"
            )
        _, before, first = found.setdefault(picture.resolve(), (picture, label, line))
        if before != label:
            raise DataError(
                f"{path}, line {line}: {picture.name} is {_shown(label)} here, but "
                f"{_shown(before)} in line {first}; keep one of them"
            )
    if not found:
        raise DataError(f"{path}: has a header but no pictures; add a line for each")
    pictures = [picture for picture, _, _ in found.values()]
    if label_column is None:
        return PictureTable(pictures, None)
    return PictureTable(pictures, [label for _, label, _ in found.values()])


def _text(path: Path) -> str:
    """Return the contents of a file if they are text of a reasonable size."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise DataError(
                f"{path}: has {size:,} bytes, but a table at most {MOST_BYTES:,}; split it"
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: is not UTF-8 text; save the table as CSV in UTF-8"
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"{path}, line {line}: is not text; save the table as CSV in UTF-8")
    return text


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


def _column(place: str, columns: Sequence[str], names: Sequence[str]) -> int | None:
    """Return where the column is that has one of ``names``."""
    found = [position for position, name in enumerate(columns) if name in names]
    if len(found) > 1:
        both = " and ".join(repr(columns[position]) for position in found)
        raise DataError(f"{place}: has the columns {both}; keep one of them")
    return found[0] if found else None


def _lacks(place: str, header: Sequence[str], name: str) -> DataError:
    shown = _shown(",".join(header)) if header else "nothing"
    return DataError(
        f"{place}: expected a header with the column {name!r}, separated by commas, got {shown}"
    )


def _shown(text: str) -> str:
    """Quote a text, or how it begins if it is long."""
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…")


def _cell(row: Sequence[str], position: int) -> str:
    return row[position].strip() if position < len(row) else ""


def _picture(path: Path, line: int, given: str) -> Path:
    """Return the file that a cell names, relative to the table."""
    if not given:
        raise DataError(f"{path}, line {line}: the path is empty; fill it in, or remove the line")
    picture = path.parent / given
    try:
        there = picture.is_file()  # neither a device nor a pipe, which would never end
    except (OSError, ValueError):
        there = False
    if not there:
        raise DataError(
            f"{path}, line {line}: there is no file {_shown(given)}; paths are relative to the "
            "table"
        )
    return picture
