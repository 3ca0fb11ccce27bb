"""Your own pictures: a folder with one folder of images per class.

Either ``PATH/<class>/*.png``, whose classes are dealt 64 / 16 / 20 percent to train, validation
and test from seed 0, or from another as ``PATH#7``; or ``PATH/{train,validation,test}/<class>``.
Classes may differ in size. Images are resized to one square: their own if all share it and it is
small, else 84×84.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from vsm.data.dataset import SPLITS, Split
from vsm.data.images import ImageFormat, decode_files, inspect, is_image_name
from vsm.data.preparation import ClassLists, Preparation, dealt
from vsm.data.tables import is_table, read_table
from vsm.errors import DataError

LARGEST_SIDE = 84
SPLIT_FOLDERS: dict[str, Split] = {split: split for split in SPLITS} | {
    "valid": "validation",
    "val": "validation",
}


def key(path: Path) -> str:
    """Return the name to store ``path`` under; it changes when an image comes, goes or changes."""
    digest, (path, seed) = hashlib.sha256(), _located(path)
    for split, folders in _class_folders(path, seed).items():
        for file in (file for folder in folders for file in _images(folder)):
            status = file.stat()
            described = (split, file.relative_to(path).as_posix())
            digest.update(repr((*described, status.st_size, status.st_mtime_ns)).encode())
    slug = "".join(letter if letter.isalnum() else "-" for letter in path.resolve().name)
    return f"folder-{slug}-{digest.hexdigest()[:12]}"


def listed(path: Path, as_a_whole: bool = False) -> tuple[ClassLists, dict[str, list[Path]]]:
    """Return the classes of each split of a folder, and the image files of each class.

    Args:
        path: of class folders, or of folders ``train``, ``validation`` and ``test`` with them.
        as_a_whole: put all classes into one split ``all``; there may then be any number of them.
    """
    given: dict[Split, list[Path]]
    path, seed = _located(path)
    given = {"all": _all_class_folders(path)} if as_a_whole else _class_folders(path, seed)
    lists: ClassLists = {split: [f.name for f in folders] for split, folders in given.items()}
    files = {f.name: _images(f) for folders in given.values() for f in folders}
    images = [image for found in files.values() for image in found]
    if not images:
        raise DataError(f"folder: {path} has class folders but no images in them; add some")
    for name, found in files.items():
        if not found:
            raise DataError(f"class {name!r} has no images; add some or remove it")
    split_of: dict[str, Split] = {}
    for split, name in ((split, name) for split, names in lists.items() for name in names):
        if name in split_of:
            raise DataError(
                f"class {name!r} is in two splits, {split_of[name]} and {split}; keep it in one of "
                "them"
            )
        split_of[name] = split
    return lists, files


def read(path: Path) -> Preparation:
    """Read a folder of class folders, split by its own folders or from the seed."""
    lists, files = listed(path)
    images = [image for found in files.values() for image in found]
    form = _common_format(images)
    return Preparation(
        image_shape=form.shape,
        class_lists=lists,
        class_sizes={name: len(found) for name, found in files.items()},
        batches=decode_files(images, form),
        origin=f"{path.resolve()}: {len(images):,} images of {len(files):,} classes",
    )


def labeled_images(path: Path) -> tuple[list[Path], list[str]]:
    """Return the image files of all class folders of ``path``, and the class of each.

    There may be any number of classes, and no splits: this is for examples, not for training. A
    table of paths and labels does as well, see :mod:`vsm.data.tables`.
    """
    if is_table(path):
        listed_images, labels = read_table(path, "required")
        assert labels is not None
        return listed_images, labels
    images: list[Path] = []
    for folder in _folders(path):
        found = _images(folder)
        if not found:
            raise DataError(f"folder: {folder} has no images; add some, or remove it")
        images += found
    if not images:
        raise DataError(f"folder: {path} has no class folders; put the images of each class in one")
    return images, [image.parent.name for image in images]


def labeled_images_of(sources: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return what :func:`labeled_images` finds in all of ``sources``, every file once."""
    found: dict[Path, tuple[Path, str, Path]] = {}
    for source in sources:
        for image, label in zip(*labeled_images(source), strict=True):
            _, before, first = found.setdefault(image.resolve(), (image, label, source))
            if before != label:
                raise DataError(
                    f"{image} is {label!r} in {source}, but {before!r} in {first}; keep one of them"
                )
    return [image for image, _, _ in found.values()], [label for _, label, _ in found.values()]


def images_below(path: Path) -> list[Path]:
    """Return ``path`` itself if it is a file, or all image files in it and in its folders.

    Of a table of pictures, see :mod:`vsm.data.tables`, it returns those that it lists.
    """
    if is_table(path):
        return read_table(path, "ignored").pictures
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder")
    found, waiting, visited = [], [path], set()
    while waiting:
        folder = waiting.pop()
        status = folder.stat()
        if (status.st_dev, status.st_ino) not in visited:  # links may lead back
            visited.add((status.st_dev, status.st_ino))
            found += _images(folder)
            waiting += reversed(_folders(folder))
    return found


def _located(path: Path) -> tuple[Path, int]:
    """Return the folder, and the seed that its classes are dealt from."""
    name, mark, seed = path.name.rpartition("#")
    if mark and seed.isdecimal() and not path.exists():
        return path.with_name(name), int(seed)
    return path, 0


def _class_folders(path: Path, seed: int) -> dict[Split, list[Path]]:
    """Return the class folders of each split."""
    top = _folders(path)
    splits = [folder for folder in top if folder.name in SPLIT_FOLDERS and _folders(folder)]
    stray = [folder.name for folder in top if folder not in splits]
    if not splits:
        found = f"folder: {path} has {len(stray)} class folders"
        fix = "add classes, or check that this is the folder above them"
        lists = dealt(stray, found, fix, seed)
        return {split: [path / name for name in names] for split, names in lists.items()}
    if stray:
        raise DataError(
            f"folder: {path} has {stray[0]!r} beside {splits[0].name!r}; keep class folders inside "
            "train, validation and test only"
        )
    given: dict[Split, list[Path]] = {split: [] for split in SPLITS}
    for folder in splits:
        given[SPLIT_FOLDERS[folder.name]] += _folders(folder)
    if not given["train"]:
        raise DataError(f"folder: {path} has no 'train' folder beside {splits[0].name!r}; add one")
    return given


def _all_class_folders(path: Path) -> list[Path]:
    """Return the class folders of all splits."""
    top = _folders(path)
    return [
        folder
        for one in top
        for folder in (_folders(one) if one.name in SPLIT_FOLDERS and _folders(one) else [one])
    ]


def _folders(path: Path) -> list[Path]:
    return [f for f in _contents(path) if f.is_dir() and not f.name.startswith((".", "__"))]


def _images(folder: Path) -> list[Path]:
    return [file for file in _contents(folder) if is_image_name(file.name) and file.is_file()]


def _contents(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(
            f"folder: {path} is not a folder; give one with a folder of images per class"
        )
    try:
        return sorted(path.iterdir())
    except OSError as error:
        raise DataError(f"cannot list {path}: {error.strerror}; check its permissions") from error


def _common_format(images: list[Path]) -> ImageFormat:
    """Gray if every image is; as large as all of them if they agree and are small."""
    headers = {inspect(image) for image in images}
    gray = all(is_gray for is_gray, _, _ in headers)
    sizes = {(height, width) for _, height, width in headers}
    height, width = min(sizes)
    small_square = len(sizes) == 1 and height == width <= LARGEST_SIDE
    return ImageFormat(height if small_square else LARGEST_SIDE, 1 if gray else 3, upright=True)
