"""Stored features: the output of any encoder for any data, with a label for each row.

Either a ``.safetensors`` file or a folder, with the same parts:

- ``features``: floats ``[n, D]``.
- ``labels``: integers ``[n]``; in a folder also strings of fixed width, which are class names.
- ``class_names``, optional: a JSON list, the name of label 0, 1, …
- ``splits``, optional: a JSON object from class name to split. Without it, classes are split as
  for folders.

Arrays are tensors, or files ``.npy``; JSON is metadata, or files ``.json``. Reading
them runs no code.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vsm.data.dataset import SPLITS, ClassLists, FeatureDataset, Split, class_index, random_split
from vsm.data.prepared import open_array
from vsm.errors import ClassifierError, ClassifierTypeError, DataError, DocumentError, VsmError
from vsm.system.files import MAX_JSON_BYTES, atomic_path, parse_json, read_file, shortened

SUFFIX = ".safetensors"
ARRAYS, TABLES = ("features", "labels", "splits"), ("class_names", "splits")
VALUES_PER_CHECK = 1 << 22

Arrays = dict[str, npt.NDArray[Any]]
Texts = dict[str, str | bytes]


def read(path: Path) -> FeatureDataset:
    """Open stored features; rows that lie class after class stay on disk until they are used.

    Classes are ordered: integers by value, names alphabetically. Rows of a class keep their order.
    """
    if path.is_dir():
        arrays, texts = _read_folder(path)
    elif path.is_file() and path.suffix == SUFFIX:
        arrays, texts = _read_safetensors(path)
    else:
        problem = "is not a folder or a .safetensors file" if path.exists() else "does not exist"
        raise DataError(
            f"features: {path} {problem}; give a .safetensors file with features and labels, or a "
            "folder with features.npy and labels.npy"
        )
    for part in ("features", "labels"):
        if part not in arrays:
            raise DataError(f"features: {path} holds no {part}; add {part}.npy or a tensor")
    if "splits" in arrays:
        raise DataError(f"{path / 'splits'}: an array; store a JSON object, class name to split")
    features, labels = arrays["features"], np.asarray(arrays["labels"])
    _check_features(features, path / "features")
    if labels.shape != features.shape[:1] or labels.dtype.kind not in "iuU":
        raise DataError(
            f"{path / 'labels'}: expected integers or strings [{len(features)}], got "
            f"{labels.dtype} {list(labels.shape)}"
        )
    values, class_ids, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    names = [str(value) for value in values]
    if "class_names" in texts:
        names = _class_names(_parse(texts, "class_names", path), labels, values, path)
    if "splits" in texts:
        lists = _splits(_parse(texts, "splits", path), names, path / "splits")
    else:
        lists = random_split(names, source=f"features: {path}")
    if not (class_ids[:-1] <= class_ids[1:]).all():
        features = features[np.argsort(class_ids, kind="stable")]
    return FeatureDataset(
        name=f"features:{path.resolve().name.removesuffix(SUFFIX)}",
        features=features,
        origin=f"{path.resolve()}: {len(features):,} rows of {len(names):,} classes",
        **class_index(dict(zip(names, sizes, strict=True)), lists),
    )


def write(
    path: Path,
    features: npt.NDArray[np.floating[Any]],
    labels: npt.NDArray[np.integer[Any]],
    *,
    class_names: Sequence[str] | None = None,
    splits: Mapping[str, Split] | None = None,
) -> None:
    """Write features ``[n, D]`` and labels ``[n]`` atomically as a safetensors file.

    Labels are positions in ``class_names``, if these are given. ``splits`` are by class name.
    """
    tables = {"class_names": class_names and list(class_names), "splits": splits and dict(splits)}
    tensors = {
        "features": torch.from_numpy(np.ascontiguousarray(features)),
        "labels": torch.from_numpy(labels.astype(np.int64)),
    }
    metadata = {part: json.dumps(table) for part, table in tables.items() if table}
    with atomic_path(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata)


def _read_folder(path: Path) -> tuple[Arrays, Texts]:
    arrays: Arrays = {}
    for file in (path / f"{part}.npy" for part in ARRAYS):
        try:
            arrays[file.stem] = open_array(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise DataError(
                f"{file}: cannot be read as an array of numbers or strings ({error}); write it "
                "with numpy.save, without Python objects"
            ) from error
    tables = [path / f"{part}.json" for part in TABLES]
    return arrays, {t.stem: read_file(t, MAX_JSON_BYTES) for t in tables if t.is_file()}


def _read_safetensors(path: Path) -> tuple[Arrays, Texts]:
    arrays: Arrays = {}
    try:
        with safetensors.safe_open(path, "pt") as file:
            for part in set(ARRAYS) & set(file.keys()):
                tensor = file.get_tensor(part)
                is_bfloat16 = tensor.dtype == torch.bfloat16  # which numpy does not have
                arrays[part] = (tensor.float() if is_bfloat16 else tensor).numpy()
            return arrays, file.metadata() or {}
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as safetensors ({shortened(error)})") from error


def _parse(texts: Texts, part: str, path: Path) -> Any:
    try:
        return parse_json(texts[part], path / part)
    except DocumentError as error:
        raise DataError(f"{path / part}: is not JSON ({error.reason})") from error


def _check_features(features: npt.NDArray[Any], place: Path) -> None:
    if features.ndim != 2 or features.dtype.kind != "f" or 0 in features.shape:
        found = f"{features.dtype} {list(features.shape)}"
        raise DataError(f"{place}: expected floats [n, D] with at least one row, got {found}")
    num_rows = max(1, VALUES_PER_CHECK // features.shape[1])
    for start in range(0, len(features), num_rows):
        with np.errstate(over="ignore"):
            values = features[start : start + num_rows].astype(np.float32, copy=False)
        _refuse_non_finite(values, str(place), DataError, start)


def _refuse_non_finite(
    rows: npt.NDArray[np.float32], place: str, error: type[VsmError], start: int = 0
) -> None:
    """Raise ``error`` if some row is not finite as float32; the first has number ``start``."""
    finite = np.isfinite(rows).all(1)
    if not finite.all():
        row = start + int((~finite).argmax())
        raise error(
            f"{place}: row {row} holds NaN, infinity or a number too large for float32; fix it"
        )


def _class_names(
    table: Any, labels: npt.NDArray[Any], values: npt.NDArray[Any], path: Path
) -> list[str]:
    """Return the name of each of ``values``, the sorted distinct labels."""
    place = path / "class_names"
    if labels.dtype.kind == "U":
        raise DataError(f"{place}: labels are names already; remove it, or store integer labels")
    if not isinstance(table, list) or not all(isinstance(name, str) for name in table):
        raise DataError(f"{place}: expected a list of strings, the names of label 0, 1, …")
    repeated = [name for name, count in Counter(table).items() if count > 1]
    if repeated:
        raise DataError(f"{place}: the name {repeated[0]!r} appears twice; names must differ")
    for value in (values[0], values[-1]):
        if not 0 <= value < len(table):
            row, last = int((labels == value).argmax()), len(table) - 1
            raise DataError(f"{place}: names labels 0 to {last}, but row {row} has label {value}")
    return [table[value] for value in values]


def _splits(table: Any, names: list[str], place: Path) -> ClassLists:
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


def as_features(rows: Any, width: int | None = None) -> Tensor:
    """Check features ``[n, D]`` of any array type, and return them as float32."""
    if hasattr(rows, "tocsr"):
        raise ClassifierError("features: sparse input is not supported; use its toarray()")
    given = rows.detach().cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    expected = "expected numbers [n, D]; this classifier takes features, not images"
    if given.dtype.kind == "c":
        raise ClassifierError(f"features: Complex data not supported, got {given.dtype}")
    if given.dtype.kind not in "fiuO":
        raise ClassifierError(f"features: got {given.dtype} {list(given.shape)}, {expected}")
    if given.ndim != 2:
        raise ClassifierError(
            f"features: expected rows [n, D], got {list(given.shape)}. Reshape your data; one row "
            "is features[None]"
        )
    if not given.shape[1]:
        raise ClassifierError(
            f"features: 0 feature(s) (shape=({len(given)}, 0)) while a minimum of 1 is required."
        )
    if width is not None and given.shape[1] != width:
        raise ClassifierError(
            f"features: X has {given.shape[1]} features, but FewShotClassifier is expecting "
            f"{width} features as input"
        )
    try:
        with np.errstate(over="ignore"):  # named below
            features = given.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise ClassifierTypeError(f"features: {expected} ({error})") from error
    _refuse_non_finite(features, "features", ClassifierError)
    return torch.from_numpy(features)
