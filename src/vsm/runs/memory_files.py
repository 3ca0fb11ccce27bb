"""Memory files, which are replaced atomically and changed under a lock.

The ``memory.safetensors`` of a run directory is one; :mod:`vsm.memory.named` has the format.
"""

from collections.abc import Callable
from pathlib import Path

from vsm.errors import MemoryFileError, RunError
from vsm.memory.named import NamedMemory, decode_memory
from vsm.runs.directory import RunDirectory
from vsm.runs.shipped import MODELS, is_shipped
from vsm.system.files import exclusive_lock, is_sqlite
from vsm.system.tensor_files import load_tensors

EXPORTED = (".csv", ".npz")
"""What slots are written to for other programs."""


def memory_path(path: Path) -> Path:
    """Return the file of a memory: the file itself, or that of a run or of a shipped model."""
    folder = MODELS / path if is_shipped(path) else path
    return RunDirectory(folder).used.memory if folder.is_dir() else folder


def own_memory_path(path: Path) -> Path:
    """Return the file of a memory to change, which must not be that of a shipped model."""
    file = memory_path(path)
    if MODELS.resolve() in file.resolve().parents:
        raise MemoryFileError(
            f"memory: {path} ships with vsm and stays as it is; begin a file of your own with "
            f"vsm memory add FILE --images FOLDER --model {path}"
        )
    return file


def read_memory(path: Path) -> NamedMemory:
    """Read a memory file, or that of a run directory or of a shipped model's name.

    Raises:
        RunError: if there is none, or it is damaged.
    """
    file = memory_path(path)
    if not file.is_file():
        raise RunError(
            f"memory: {path} holds none; give a run of a method with memory, a name that vsm "
            "models lists, or a file"
        )
    try:
        return decode_memory(*load_tensors(file), file)
    except RunError:
        if is_sqlite(file):
            raise MemoryFileError(
                f"memory: {file} is a store; write its memory to a file with vsm memory export "
                f"{file} FILE.safetensors, and use that"
            ) from None
        if file.suffix in EXPORTED:
            raise MemoryFileError(
                f"memory: {file} is for other programs and cannot be read back; give a memory file "
                "as vsm memory export writes it to FILE.safetensors, a run directory, or a name "
                "that vsm models lists"
            ) from None
        raise


def update_memory(
    path: Path,
    change: Callable[[NamedMemory], NamedMemory],
    beginning: NamedMemory | None = None,
) -> NamedMemory:
    """Replace a memory file, or that of a run directory, by ``change(memory)`` under a lock.

    If ``change`` raises, the file stays as it is. ``beginning`` is the memory to change if there is
    no file yet.
    """
    file = own_memory_path(path)
    if beginning is None and not file.is_file():
        raise RunError(f"memory: {path} holds none; give a run of a method with memory, or a file")
    with exclusive_lock(file):
        current = beginning if beginning and not file.is_file() else read_memory(file)
        changed = change(current)
        changed.write(file)
    return changed
