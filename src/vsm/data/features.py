"""Stored features: what any encoder made of any data, a label for each row.

Either a ``.safetensors`` file or a folder, with the same parts:

- ``features``: floats ``[n, D]``.
- ``labels``: integers ``[n]``; in a folder also strings of fixed width, which are class names.
- ``class_names``, optional: a JSON list, the name of label 0, 1, …
- ``splits``, optional: integers ``[n]``, 0 train, 1 validation, 2 test, the same for all rows of a
  class; or a JSON object from class name to split. Without, classes are split as for folders.

Arrays are tensors, or files ``.npy``; JSON is metadata, or files ``.json``. Nothing here can run
code: numpy reads without pickle, and safetensors hold none.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch

from vsm.data.dataset import SPLITS, ClassLists, FeatureDataset, Ids, Split, random_split
from vsm.data.store import open_array
from vsm.errors import DataError, DocumentError
from vsm.system.documents import MOST_JSON_BYTES, parsed_json, read_file, shortened
from vsm.system.files import atomic_path

SUFFIX = ".safetensors"
ARRAYS, TABLES = ("features", "labels", "splits"), ("class_names", "splits")
CHECKED_AT_ONCE = 1 << 22  # values


class _Part(NamedTuple):
    """An array or a parsed JSON value, None if it is not there, and its place for messages."""

    value: Any
    place: str


def read(path: Path) -> FeatureDataset:
    """Open stored features; rows that lie class after class stay on disk until they are used.

    Rows are ordered by class: integers by value, names alphabetically. Rows of a class keep their
    order.

    Raises:
        DataError: naming the file and the row or class.
    """
    arrays, tables = _open(path)
    for part in ("features", "labels"):
        if arrays[part].value is None:
            raise DataError(f"features: {path} holds no {part}; add {arrays[part].place}")
    features = _checked_features(*arrays["features"])
    labels = _checked_labels(*arrays["labels"], len(features))
    values, class_ids, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    names = _class_names(*tables["class_names"], labels, values)
    splits = _splits(path, arrays["splits"], tables["splits"], names, class_ids)
    if not (class_ids[:-1] <= class_ids[1:]).all():
        features = features[np.argsort(class_ids, kind="stable")]
    ids = {name: position for position, name in enumerate(names)}
    return FeatureDataset(
        name=f"features:{path.resolve().name.removesuffix(SUFFIX)}",
        features=features,
        class_names=tuple(names),
        class_starts=np.cumsum([0, *sizes], dtype=np.int64),
        splits={
            split: np.asarray([ids[name] for name in splits[split]], dtype=np.int64)
            for split in SPLITS
            if splits[split]
        },
        origin=f"{path.resolve()}: {len(features):,} rows of {len(names):,} classes",
    )


def write(
    path: Path,
    features: npt.NDArray[np.floating[Any]],
    labels: npt.NDArray[np.integer[Any]],
    *,
    class_names: Sequence[str] | None = None,
    splits: Mapping[str, Split] | None = None,
) -> None:
    """Write features atomically as one safetensors file that :func:`read` reads.

    Args:
        path: ends in ``.safetensors``.
        features: ``[n, D]``.
        labels: ``[n]``, positions in ``class_names`` if that is given.
        class_names: the name of label 0, 1, …
        splits: the split of every class, by name.
    """
    tables = {"class_names": class_names and list(class_names), "splits": splits and dict(splits)}
    tensors = {
        "features": torch.from_numpy(np.ascontiguousarray(features)),
        "labels": torch.from_numpy(labels.astype(np.int64)),
    }
    metadata = {part: json.dumps(table) for part, table in tables.items() if table}
    with atomic_path(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata)


def _open(path: Path) -> tuple[dict[str, _Part], dict[str, _Part]]:
    """Return the parts that are arrays and those that are JSON."""
    if path.is_dir():
        arrays = {part: path / f"{part}.npy" for part in ARRAYS}
        tables = {part: path / f"{part}.json" for part in TABLES}
        texts = {
            part: read_file(file, MOST_JSON_BYTES) if file.is_file() else None
            for part, file in tables.items()
        }
        return (
            {part: _Part(_mapped(file), str(file)) for part, file in arrays.items()},
            {part: _parsed(texts[part], str(file)) for part, file in tables.items()},
        )
    if path.is_file() and path.suffix == SUFFIX:
        return _open_safetensors(path)
    problem = "is neither a folder nor a .safetensors file" if path.exists() else "does not exist"
    raise DataError(
        f"features: {path} {problem}; give a .safetensors file with features and labels, or a "
        "folder with features.npy and labels.npy"
    )


def _mapped(file: Path) -> npt.NDArray[Any] | None:
    try:
        return open_array(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: cannot be read as an array of numbers or strings ({error}); write it with "
            "numpy.save, without Python objects"
        ) from error


def _open_safetensors(path: Path) -> tuple[dict[str, _Part], dict[str, _Part]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        with safetensors.safe_open(path, "pt") as file:
            for part in set(ARRAYS) & set(file.keys()):
                tensor = file.get_tensor(part)
                is_bfloat16 = tensor.dtype == torch.bfloat16  # which numpy does not have
                arrays[part] = (tensor.float() if is_bfloat16 else tensor).numpy()
            metadata = file.metadata() or {}
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as safetensors ({shortened(error)})") from error
    return (
        {part: _Part(arrays.get(part), f"{path}, tensor {part!r}") for part in ARRAYS},
        {part: _parsed(metadata.get(part), f"{path}, metadata {part!r}") for part in TABLES},
    )


def _parsed(text: str | bytes | None, place: str) -> _Part:
    try:
        return _Part(None if text is None else parsed_json(text, place), place)
    except DocumentError as error:
        raise DataError(f"{place}: is not JSON ({error.reason})") from error


def _checked_features(features: npt.NDArray[Any], place: str) -> npt.NDArray[np.floating[Any]]:
    """Check features; the model reads float32, and they must be finite as that."""
    if features.ndim != 2 or features.dtype.kind != "f" or 0 in features.shape:
        raise DataError(
            f"{place}: expected floats [n, D] with at least one row, got {features.dtype} "
            f"{list(features.shape)}"
        )
    rows_at_once = max(1, CHECKED_AT_ONCE // features.shape[1])
    for start in range(0, len(features), rows_at_once):
        with np.errstate(over="ignore"):
            values = features[start : start + rows_at_once].astype(np.float32, copy=False)
        finite = np.isfinite(values).all(1)
        if not finite.all():
            raise DataError(
                f"{place}: row {start + int((~finite).argmax())} holds NaN, infinity or a number "
                "too large for float32; fix or remove it"
            )
    return features


def _checked_labels(labels: npt.NDArray[Any], place: str, num_rows: int) -> npt.NDArray[Any]:
    """Check labels, and return them as integers or text."""
    if labels.shape != (num_rows,) or labels.dtype.kind not in "iuUS":
        raise DataError(
            f"{place}: expected one integer or string for each of the {num_rows:,} rows of "
            f"features, got {labels.dtype} {list(labels.shape)}"
        )
    if labels.dtype.kind != "S":
        return np.asarray(labels)
    try:
        return np.char.decode(np.asarray(labels), "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: names are not UTF-8 ({error})") from error


def _class_names(
    table: Any, place: str, labels: npt.NDArray[Any], values: npt.NDArray[Any]
) -> list[str]:
    """Return the name of each of ``values``, the sorted distinct labels."""
    if table is None:
        return [str(value) for value in values]
    if labels.dtype.kind == "U":
        raise DataError(f"{place}: labels are names already; remove it, or store integer labels")
    if not isinstance(table, list) or not all(isinstance(name, str) for name in table):
        raise DataError(f"{place}: expected a list of strings, the names of label 0, 1, …")
    repeated = [name for name, count in Counter(table).items() if count > 1]
    if repeated:
        raise DataError(f"{place}: the name {repeated[0]!r} is there twice; names must differ")
    for value in (values[0], values[-1]):
        if not 0 <= value < len(table):
            raise DataError(
                f"{place}: has names for labels 0 to {len(table) - 1}, but row "
                f"{int((labels == value).argmax())} has label {value}"
            )
    return [table[value] for value in values]


def _splits(
    path: Path, numbers: _Part, table: _Part, names: list[str], class_ids: Ids
) -> ClassLists:
    if numbers.value is not None and table.value is not None:
        raise DataError(
            f"features: splits are given twice, by {numbers.place} and by {table.place}; remove "
            "one of them"
        )
    if numbers.value is not None:
        return _numbered_splits(*numbers, names, class_ids)
    if table.value is not None:
        return _named_splits(*table, names)
    return random_split(names, source=f"features: {path}")


def _numbered_splits(
    numbers: npt.NDArray[Any], place: str, names: list[str], class_ids: Ids
) -> ClassLists:
    """Collect the split of every class from those of its rows, which must agree."""
    if numbers.shape != class_ids.shape or numbers.dtype.kind not in "iu":
        raise DataError(
            f"{place}: expected integers [{len(class_ids)}], one per row, got {numbers.dtype} "
            f"{list(numbers.shape)}"
        )
    unknown = (numbers < 0) | (numbers >= len(SPLITS))
    if unknown.any():
        row = int(unknown.argmax())
        raise DataError(
            f"{place}: row {row} has split {numbers[row]}; known: 0 train, 1 validation, 2 test"
        )
    _, first_rows = np.unique(class_ids, return_index=True)
    of_class = numbers[first_rows]  # [num_classes]
    differs = numbers != of_class[class_ids]
    if differs.any():
        row = int(differs.argmax())
        first = first_rows[class_ids[row]]
        raise DataError(
            f"{place}: class {names[class_ids[row]]!r} is in two splits, {SPLITS[numbers[first]]} "
            f"in row {first} and {SPLITS[numbers[row]]} in row {row}; keep it in one of them"
        )
    return {
        split: [name for name, chosen in zip(names, of_class, strict=True) if chosen == number]
        for number, split in enumerate(SPLITS)
    }


def _named_splits(table: Any, place: str, names: list[str]) -> ClassLists:
    if not isinstance(table, dict):
        raise DataError(f"{place}: expected an object from class name to split")
    for name, split in table.items():
        if split not in SPLITS:
            known = ", ".join(SPLITS)
            raise DataError(f"{place}: class {name!r} has split {split!r}; known: {known}")
    if differing := sorted(table.keys() ^ set(names)):
        problem = "has no rows" if differing[0] in table else "has no split"
        raise DataError(f"{place}: class {differing[0]!r} {problem}; give each class both")
    return {split: [name for name in names if table[name] == split] for split in SPLITS}
