"""Datasets by name: listing, preparing, opening and describing them.

``folder:PATH`` and ``glyphs`` are prepared when first opened; those of
:data:`vsm.data.published.CATALOG` once, from files that the user has or from a public download.
``features:PATH`` is read as it is.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from vsm.data import features, folder, glyphs, store
from vsm.data.augmentation import NO_AUGMENTATION, natural
from vsm.data.dataset import SPLITS, Dataset, FeatureDataset, ImageDataset, PixelNormalization
from vsm.data.downloads import fetch
from vsm.data.published import CATALOG, Entry
from vsm.errors import DataError
from vsm.system.progress import NULL_PROGRESS, Progress

FOLDER_PREFIX = "folder:"
STORED_FOLDER_PREFIX = "folder-"
FEATURES_PREFIX = "features:"
GRAY = PixelNormalization(mean=(0.5,), std=(0.5,))
IMAGENET = PixelNormalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def open_dataset(spec: str) -> Dataset:
    """Open images by the names of ``open_images``, or stored features by ``features:PATH``.

    Raises:
        DataError: if the name is unknown, or not prepared; says what to run.
    """
    if spec.startswith(FEATURES_PREFIX):
        return features.read(_path(spec, FEATURES_PREFIX))
    return open_images(spec)


def open_images(spec: str) -> ImageDataset:
    """Open ``glyphs``, a name of the catalog, or ``folder:PATH``.

    A folder that was prepared can also be opened by the name that :func:`list_datasets` gives it,
    as it was then.

    Raises:
        DataError: if the name is unknown, or not prepared; says what to run.
    """
    if spec.startswith(FEATURES_PREFIX):
        raise DataError(f"data: images are needed here, but {spec} holds features of an encoder")
    if spec == "glyphs":
        return glyphs.open_glyphs()
    if spec.startswith(FOLDER_PREFIX):
        path = _path(spec, FOLDER_PREFIX)
        return _open_folder(_prepare_folder(path, NULL_PROGRESS), f"folder:{path.resolve().name}")
    if spec.startswith(STORED_FOLDER_PREFIX) and store.is_prepared(spec):
        return _open_folder(spec, spec)
    entry = _entry(spec)
    if not store.is_prepared(spec):
        options = "--from PATH | --download" if entry.downloads else "--from PATH"
        raise DataError(
            f"data: {spec} is not prepared in {store.data_root()}; run "
            f"`vsm data prepare {spec} {options}`, where PATH is {entry.needs}"
        )
    return replace(store.read(spec), augmentation=entry.augmentation)


def prepare(
    name: str,
    source: Path | None = None,
    *,
    download: bool = False,
    allow_missing: bool = False,
    progress: Progress = NULL_PROGRESS,
) -> Path:
    """Prepare a dataset and return its folder; one that is prepared already is left as it is.

    Args:
        name: one of the catalog, ``glyphs``, ``folder`` (with ``source``) or ``folder:PATH``.
        source: the files to read.
        download: fetch public files in place of ``source``.
        allow_missing: go without images that should be there; the origin then says so.
        progress: receives reports.
    """
    if name == "folder":
        if source is None:
            raise DataError("data: prepare folder needs --from PATH, a folder of class folders")
        name = f"{FOLDER_PREFIX}{source}"
    if name.startswith(FOLDER_PREFIX):
        return store.data_root() / _prepare_folder(_path(name, FOLDER_PREFIX), progress)
    if name.startswith(FEATURES_PREFIX):
        raise DataError(f"data: {name} needs no preparation; use it with --data {name}")
    if name == "glyphs":
        return _location(glyphs.open_glyphs())
    entry = _entry(name)
    if store.is_prepared(name):
        store.read(name)  # an error if it is damaged
        return store.data_root() / name
    if source is not None and download:
        raise DataError("data: --from and --download exclude each other; give one of them")
    if source is None:
        source = _download(name, entry, download, progress)
    elif not source.expanduser().exists():
        raise DataError(f"data: {source} does not exist; check the path given with --from")
    with entry.read(source.expanduser(), allow_missing) as preparation:
        return store.write(name, preparation, entry.normalization, progress)


def describe(spec: str) -> dict[str, Any]:
    """Return what there is to know about a prepared dataset, ready for JSON.

    ``image_shape`` is (channels, height, width); ``splits`` counts classes; ``bytes`` and
    ``location`` are those of the prepared files. Features have ``num_features`` in place of what
    only images have.
    """
    dataset = open_dataset(spec)
    sizes = dataset.class_sizes
    found: dict[str, Any] = {
        "name": dataset.name,
        "classes": len(dataset.class_names),
        "class_sizes": {"smallest": int(sizes.min()), "largest": int(sizes.max())},
        "splits": {split: len(dataset.splits.get(split, ())) for split in SPLITS},
        "origin": dataset.origin,
    }
    if isinstance(dataset, FeatureDataset):
        num_rows, num_features = dataset.features.shape
        size = dataset.features.nbytes
        return found | {"rows": num_rows, "num_features": num_features, "bytes": size}
    assert isinstance(dataset, ImageDataset)
    location = _location(dataset)
    return found | {
        "images": len(dataset.images),
        "image_shape": list(dataset.image_shape),
        "normalization": asdict(dataset.normalization),
        "augmentation": asdict(dataset.augmentation),
        "bytes": dataset.images.nbytes,
        "sha256": store.read_index(location.name)["sha256"],
        "location": str(location),
    }


def list_datasets() -> list[dict[str, Any]]:
    """Return one row for every known dataset and every prepared folder, ready for JSON.

    Each has ``name``, ``title``, ``prepared``, ``location`` and ``bytes`` (both None if not
    prepared), ``needs`` (what ``--from`` expects) and ``download`` (whether there is one).
    """
    rows = [_row("glyphs", "glyphs-v*", "built-in procedural characters", "nothing")]
    for name, entry in CATALOG.items():
        rows.append(_row(name, name, entry.title, entry.needs, bool(entry.downloads)))
    for index in sorted(store.data_root().glob(f"{STORED_FOLDER_PREFIX}*/index.json")):
        name = index.parent.name
        try:
            title = str(store.read_index(name)["origin"])
        except DataError as error:
            title = str(error)
        rows.append(_row(name, name, title, "a folder of class folders"))
    return rows


def _row(name: str, stored: str, title: str, needs: str, download: bool = False) -> dict[str, Any]:
    found = sorted(path.parent for path in store.data_root().glob(f"{stored}/index.json"))
    return {
        "name": name,
        "title": title,
        "prepared": bool(found),
        "location": str(found[-1]) if found else None,
        "bytes": sum(file.stat().st_size for file in found[-1].iterdir()) if found else None,
        "needs": needs,
        "download": download,
    }


def _entry(name: str) -> Entry:
    try:
        return CATALOG[name]
    except KeyError:
        known = ", ".join(("glyphs", *CATALOG, "folder:PATH", "features:PATH"))
        raise DataError(f"data: unknown dataset {name!r}; known: {known}") from None


def _download(name: str, entry: Entry, wanted: bool, progress: Progress) -> Path:
    """Fetch the public files of ``entry`` and return the folder or file to read."""
    if not wanted:
        options = ", or --download" if entry.downloads else ""
        raise DataError(f"data: prepare {name} needs --from PATH, {entry.needs}{options}")
    if not entry.downloads:
        raise DataError(
            f"data: {name} has no public download; get it from its authors and pass --from PATH, "
            f"{entry.needs}"
        )
    downloads = store.data_root() / "downloads"
    files = [fetch(file, downloads, progress) for file in entry.downloads]
    return files[0]  # readers find a second part beside the first


def _path(spec: str, prefix: str) -> Path:
    path = spec.removeprefix(prefix)
    if not path:
        raise DataError(f"data: {prefix} needs a path, as in {prefix}PATH")
    return Path(path).expanduser()


def _prepare_folder(path: Path, progress: Progress) -> str:
    """Prepare the folder at ``path`` as it is now, and return the name it is stored under."""
    key = folder.key(path)
    if not store.is_prepared(key):
        preparation = folder.read(path)
        is_gray = preparation.image_shape[-1] == 1
        store.write(key, preparation, GRAY if is_gray else IMAGENET, progress)
    return key


def _open_folder(key: str, name: str) -> ImageDataset:
    dataset = store.read(key)
    channels, side, _ = dataset.image_shape
    augmentation = NO_AUGMENTATION if channels == 1 else natural(crop_padding=side // 10)
    return replace(dataset, name=name, augmentation=augmentation)


def _location(dataset: ImageDataset) -> Path:
    """Return the folder that a prepared dataset is mapped from."""
    assert isinstance(dataset.images, np.memmap)
    return Path(str(dataset.images.filename)).parent
