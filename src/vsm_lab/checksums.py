"""What identifies the pixels of a dataset, as part of the names of jobs that train on it."""

from collections.abc import Mapping
from pathlib import Path

from vsm.data import open_dataset, store
from vsm.data.catalog import FOLDER_PREFIX
from vsm.data.folder import key as folder_key
from vsm.data.glyphs import GENERATOR_VERSION
from vsm.data.published import CATALOG
from vsm.errors import DataError

UNPREPARED = "not prepared"


def data_checksum(data: str, remembered: Mapping[str, str]) -> str:
    """Return the checksum of a dataset: now, or when it was last there.

    Raises:
        DataError: if there is no dataset of that name.
    """
    if data == "glyphs":
        return f"generator version {GENERATOR_VERSION}"
    if data.startswith(FOLDER_PREFIX):
        path = Path(data.removeprefix(FOLDER_PREFIX))
        try:
            return folder_key(path)
        except DataError:
            return remembered.get(data, UNPREPARED)
    if store.is_prepared(data):
        return str(store.read_index(data)["sha256"])
    if data not in CATALOG:
        open_dataset(data)  # says which there are
    return remembered.get(data, UNPREPARED)
