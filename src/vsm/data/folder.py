"""Your own images: a folder with one folder of images per class, or a table of paths and labels.

A folder is either ``PATH/<class>/*.png``, whose classes are split 64 / 16 / 20 percent from seed 0,
or from another as ``PATH#7``; or ``PATH/{train,validation,test}/<class>``. Images are resized to
one square: their own if all share it and it is small, else 84×84.

A table is a CSV file with the columns ``path`` (or ``file``, ``filename``, ``image``) and ``label``
(or ``class``), in any order and among others. Relative paths are relative to the table.
"""

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from vsm.data.dataset import SPLITS, ClassLists, Split, all_classes, random_split
from vsm.data.images import (
    ImageFormat,
    decode_files,
    is_image_name,
    read_file,
    read_header,
    refuse_bombs,
)
from vsm.data.prepared import Preparation
from vsm.errors import DataError
from vsm.system.files import shortened

LARGEST_SIDE = 84
SPLIT_FOLDERS: dict[str, Split] = {
    **{split: split for split in SPLITS},
    "valid": "validation",
    "val": "validation",
}
PATHS, LABELS = ("path", "file", "filename", "image"), ("label", "class")  # columns of tables
MAX_TABLE_BYTES = 256 * 2**20
MAX_SHOWN = 80  # letters of a cell that messages quote

LabeledImage = tuple[Path, str, str]
"""A file, its label, which is empty if it is not known, and where that was found."""


def key(path: Path) -> str:
    """Return the name to store ``path`` under; it changes when any image changes."""
    lists, files = list_classes(path)
    root, _ = _parse_seed(path)
    digest = hashlib.sha256()
    for split, names in lists.items():
        for file in (file for name in names for file in files[name]):
            status = file.stat()
            name = file.relative_to(root).as_posix()
            digest.update(repr((split, name, status.st_size, status.st_mtime_ns)).encode())
    slug = "".join(letter if letter.isalnum() else "-" for letter in root.resolve().name)
    return f"folder-{slug}-{digest.hexdigest()[:12]}"


def list_classes(
    path: Path, merge_splits: bool = False
) -> tuple[ClassLists, dict[str, list[Path]]]:
    """Return the classes of each split of a folder, and the image files of each class.

    ``merge_splits`` puts all classes into one split ``all``; there may then be any number of them.
    """
    path, seed = _parse_seed(path)
    folders = _merged_folders(path) if merge_splits else _split_folders(path, seed)
    lists: ClassLists = {split: [] for split in folders}
    files: dict[str, list[Path]] = {}
    for split, folder in ((split, one) for split, found in folders.items() for one in found):
        if folder.name in files:
            first = next(s for s, names in lists.items() if folder.name in names)
            both = f"{first} and {split}"
            raise DataError(f"class {folder.name!r} is in two splits, {both}; keep one of them")
        lists[split].append(folder.name)
        files[folder.name] = _class_images(folder)
    return lists, files


def read(path: Path) -> Preparation:
    """Read a folder of class folders, split by its own folders or from the seed."""
    lists, files = list_classes(path)
    images = [image for name in all_classes(lists) for image in files[name]]
    form = _common_format(images)
    sizes = {name: len(found) for name, found in files.items()}
    origin = f"{path.resolve()}: {len(images):,} images of {len(files):,} classes"
    return Preparation(form.shape, lists, sizes, decode_files(images, form), origin)


def labeled_images(*sources: Path) -> tuple[list[Path], list[str]]:
    """Return the images of class folders or tables, each once, with their classes."""
    return _distinct(image for source in sources for image in _labeled_images(source))


def _labeled_images(source: Path) -> Iterator[LabeledImage]:
    if is_table(source):
        images, labels = read_table(source, "required")
        for image, label in zip(images, labels or (), strict=True):
            yield image, label, str(source)
        return
    folders = _folders(source)
    if not folders:
        raise DataError(f"folder: {source} has no class folders; add one for each class")
    for folder in folders:
        for image in _class_images(folder):
            yield image, folder.name, str(source)


def _distinct(images: Iterable[LabeledImage]) -> tuple[list[Path], list[str]]:
    """Return each image once, with its label."""
    found: dict[Path, LabeledImage] = {}
    for image, label, place in images:
        _, before, first = found.setdefault(image.resolve(), (image, label, place))
        if before != label:
            raise DataError(
                f"{image} is {_quoted(label)} in {place}, but {_quoted(before)} in {first}; keep "
                "one of them"
            )
    return [image for image, _, _ in found.values()], [label for _, label, _ in found.values()]


def images_below(path: Path) -> list[Path]:
    """Return all image files in ``path`` and its folders, those of a table, or a file itself."""
    if is_table(path):
        return read_table(path, "ignored")[0]
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder")
    found, pending, visited = [], [path], set()
    while pending:
        folder = pending.pop()
        status = folder.stat()
        if (status.st_dev, status.st_ino) not in visited:  # links may lead back
            visited.add((status.st_dev, status.st_ino))
            found += _images(folder)
            pending += reversed(_folders(folder))
    return found


def _parse_seed(path: Path) -> tuple[Path, int]:
    """Return the folder, and the seed that its classes are split with."""
    name, mark, seed = path.name.rpartition("#")
    if mark and seed.isdecimal() and not path.exists():
        return path.with_name(name), int(seed)
    return path, 0


def _split_folders(path: Path, seed: int) -> dict[Split, list[Path]]:
    """Return the class folders of each split."""
    top = _folders(path)
    splits = [folder for folder in top if folder.name in SPLIT_FOLDERS and _folders(folder)]
    stray = [folder.name for folder in top if folder not in splits]
    if not splits:
        lists = random_split(stray, seed=seed, source=f"folder: {path}")
        return {split: [path / name for name in names] for split, names in lists.items()}
    if stray:
        odd, split = stray[0], splits[0].name
        raise DataError(f"folder: {path} has {odd!r} beside {split!r}; move it into a split")
    given: dict[Split, list[Path]] = {split: [] for split in SPLITS}
    for folder in splits:
        given[SPLIT_FOLDERS[folder.name]] += _folders(folder)
    if not given["train"]:
        raise DataError(f"folder: {path} has no 'train' folder beside {splits[0].name!r}; add one")
    return given


def _merged_folders(path: Path) -> dict[Split, list[Path]]:
    """Return the class folders of all splits as one."""
    found = []
    for folder in _folders(path):
        below = _folders(folder) if folder.name in SPLIT_FOLDERS else []
        found += below or [folder]
    return {"all": found}


def _folders(path: Path) -> list[Path]:
    return [f for f in _contents(path) if f.is_dir() and not f.name.startswith((".", "__"))]


def _images(folder: Path) -> list[Path]:
    return [file for file in _contents(folder) if is_image_name(file.name) and file.is_file()]


def _class_images(folder: Path) -> list[Path]:
    images = _images(folder)
    if not images:
        raise DataError(f"folder: {folder} has no images; add some or remove it")
    return images


def _contents(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"folder: {path} is not a folder; expected one with a folder per class")
    try:
        return sorted(path.iterdir())
    except OSError as error:
        raise DataError(f"cannot list {path}: {error.strerror}; check its permissions") from error


def _common_format(images: list[Path]) -> ImageFormat:
    """Gray if every image is; as large as all of them if they agree and are small."""
    with refuse_bombs():
        headers = {read_header(image, str(image)) for image in images}
    gray = all(is_gray for is_gray, _, _ in headers)
    sizes = {(height, width) for _, height, width in headers}
    height, width = min(sizes)
    small_square = len(sizes) == 1 and height == width <= LARGEST_SIDE
    return ImageFormat(height if small_square else LARGEST_SIDE, 1 if gray else 3)


def is_table(path: Path) -> bool:
    """Whether ``path`` is a CSV file."""
    return path.suffix.lower() == ".csv" and path.is_file()


def read_table(
    path: Path, labels: Literal["required", "optional", "ignored"]
) -> tuple[list[Path], list[str] | None]:
    """Return the images that a table lists, each once, and their labels, if there are any.

    ``labels`` says whether there must be a column of labels, and whether it is read.
    """
    images, found = _distinct(_table_images(path, labels))
    if not images:
        raise DataError(f"{path}: has a header but no images; add a line for each")
    return images, found if any(found) else None


def _table_images(path: Path, labels: str) -> Iterator[LabeledImage]:
    rows = _rows(path)
    place, header = next(rows, (f"{path}, line 1", []))
    header = [name.lower() for name in header]
    columns = {"path": _column(place, header, PATHS, required=True)}
    if labels != "ignored":
        columns["label"] = _column(place, header, LABELS, required=labels == "required")
    for place, row in rows:
        if len(row) > len(header):
            raise DataError(
                f"{place}: has {len(row)} cells, but the header {len(header)}; put cells with "
                "commas in double quotes"
            )
        cells = [*row, *[""] * (len(header) - len(row))]
        found = {kind: cells[column] for kind, column in columns.items() if column is not None}
        for kind, cell in found.items():
            if not cell:
                raise DataError(f"{place}: the {kind} is empty; fill it in, or remove the line")
        image = path.parent / found["path"]
        if not os.path.isfile(image):  # noqa: PTH113 - false for invalid names, too
            name = _quoted(found["path"])
            raise DataError(f"{place}: there is no file {name}; paths are relative to the table")
        yield image, found.get("label", ""), place


def _rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the cells of lines that are not blank, each with its place for messages."""
    try:
        text = read_file(path, MAX_TABLE_BYTES).decode("utf-8-sig")
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


def _quoted(text: str) -> str:
    return repr(shortened(text, MAX_SHOWN))
