"""Your own images: a folder with one folder of images per class.

Either ``PATH/<class>/*.png``, whose classes are split 64 / 16 / 20 percent into train, validation
and test from seed 0, or from another as ``PATH#7``; or ``PATH/{train,validation,test}/<class>``.
Classes may differ in size. Images are resized to one square: their own if all share it and it is
small, else 84×84.
"""

import hashlib
from pathlib import Path

from vsm.data.dataset import SPLITS, ClassLists, Split, all_classes, random_split
from vsm.data.images import ImageFormat, decode_files, is_image_name, read_header, refuse_bombs
from vsm.data.store import Preparation
from vsm.data.tables import is_table, read_table
from vsm.errors import DataError

LARGEST_SIDE = 84
SPLIT_FOLDERS: dict[str, Split] = {split: split for split in SPLITS} | {
    "valid": "validation",
    "val": "validation",
}


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

    Args:
        path: of class folders, or of folders ``train``, ``validation`` and ``test`` with them.
        merge_splits: put all classes into one split ``all``; there may then be any number of them.
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
        files[folder.name] = _images(folder)
    if not any(files.values()):
        raise DataError(f"folder: {path} has class folders but no images in them; add some")
    for name, found in files.items():
        if not found:
            raise DataError(f"class {name!r} has no images; add some or remove it")
    return lists, files


def read(path: Path) -> Preparation:
    """Read a folder of class folders, split by its own folders or from the seed."""
    lists, files = list_classes(path)
    images = [image for name in all_classes(lists) for image in files[name]]
    form = _common_format(images)
    return Preparation(
        image_shape=form.shape,
        class_lists=lists,
        class_sizes={name: len(found) for name, found in files.items()},
        batches=decode_files(images, form),
        origin=f"{path.resolve()}: {len(images):,} images of {len(files):,} classes",
    )


def labeled_images(*sources: Path) -> tuple[list[Path], list[str]]:
    """Return the image files of all class folders of ``sources``, each once, with their classes.

    There may be any number of classes, and no splits: this is for examples, not for training.
    A source may also be a table of paths and labels, see :mod:`vsm.data.tables`.
    """
    found: dict[Path, tuple[Path, str, Path]] = {}
    for source in sources:
        for image, label in _labeled_images(source):
            _, before, first = found.setdefault(image.resolve(), (image, label, source))
            if before != label:
                raise DataError(
                    f"{image} is {label!r} in {source}, but {before!r} in {first}; keep one of them"
                )
    return [image for image, _, _ in found.values()], [label for _, label, _ in found.values()]


def _labeled_images(source: Path) -> list[tuple[Path, str]]:
    if is_table(source):
        table = read_table(source, "required")
        return list(zip(table.images, table.labels or (), strict=True))
    folders = {folder: _images(folder) for folder in _folders(source)}
    for folder, images in folders.items():
        if not images:
            raise DataError(f"folder: {folder} has no images; add some, or remove it")
    if not folders:
        raise DataError(f"folder: {source} has no class folders; add one for each class")
    return [(image, folder.name) for folder, images in folders.items() for image in images]


def images_below(path: Path) -> list[Path]:
    """Return all image files in ``path`` and its folders, those of a table, or a file itself."""
    if is_table(path):
        return read_table(path, "ignored").images
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
