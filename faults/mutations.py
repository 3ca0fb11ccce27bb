"""Random damage to files: their bytes, values or type.

A mutation changes a file in place and describes the change. Damaged files must be refused or leave
the answer unchanged. If the result is a valid file with another content, another answer is right.
"""

import json
import os
import re
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
import yaml

from faults.processes import CANARY

CANARY_FILE, CANARY_PIPE = f"{CANARY}.txt", f"{CANARY}.pipe"
RAW = "@@raw@@"  # replaced by text that no serializer writes
DEPTH = 200_000
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, "", "x", 0, 1, -1, 0.5, -0.5, 10**9, 10**30, 1e30, -1e30, 1e-30),
    *(float("nan"), float("inf"), float("-inf"), [None], {"a": None}, [[]], "nan", "1e5"),
    *(CANARY_FILE, CANARY_PIPE, f"../world/{CANARY_FILE}", "/dev/zero", "x" * 100_000),
    *("\x1b[31mred\x07", "=1+1", "<script>alert(1)</script>", "a\nb", "a\0b", "..", "\ud800"),
)
ODD_CELLS = (
    *("", '"', "\0", "=1+1", "\x1b[31m", "<script>", "x" * 100_000, "..", "/dev/zero", "a,b"),
    *("\udcff", "missing.png", "support", "\u202e", '"a\nb"'),
)
ODD_NAMES = (
    *(b"\x1b[31mred\x1b[0m\x07", b"<script>alert(1)<-script>", b"=cmd|' -C calc'!A0", b"@SUM(1)"),
    *(b"-rf", b"caf\xe9", b"\xff\xfe", b"a\nb", b"a\tb", b"\xe2\x80\xae", b"..png", b"x" * 250),
    *(b"[bold]name[-bold]", b"{seed}", b"%s%n"),
)
NESTED_FOLDERS = 900
DEEP_TEXTS = ("[" * DEPTH, "[" * DEPTH + "]" * DEPTH, '{"a": ' * DEPTH + "1" + "}" * DEPTH)
ALIASES = "[{}]".format(
    ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(9))
)
"""Nine aliases of nine aliases, nine times."""
ODD_YAML = (*DEEP_TEXTS, ALIASES, "!!python/object/apply:os.system ['true']", "*unknown", "&a [*a]")
ARRAY_HEADERS = {
    "shape": ("(-1, 8)", "(True, 8)", "(1000000000000, 8)", "(72,)", "(72, 8, 1)", "()", "'x'"),
    "descr": ("'|O'", "'<f2'", "'<U7'", "'>f4'", "'<f8'", "'<M8[s]'", "'x'", "[('a', '<f4')]"),
    "fortran_order": ("True", "1", "None"),
}


class Mutation(NamedTuple):
    """A change of a file, and whether another answer is right afterwards."""

    description: str
    may_differ: bool = False


Mutate = Callable[[Path, Random], Mutation]


def mutate_bytes(path: Path, random: Random) -> Mutation:
    """Edit the bytes of a file."""
    content, description = _edit(path.read_bytes(), random)
    path.write_bytes(content)
    return Mutation(description)


def _edit(content: bytes, random: Random) -> tuple[bytes, str]:
    """Flip a bit, or truncate, zero, repeat, append or replace bytes."""
    # Half of the time among the first bytes, where formats have their headers.
    size = min(len(content), 512) if random.random() < 0.5 else len(content)
    at, count = random.randrange(max(1, size)), random.choice([1, 16, 512, 4096])
    before, after, bit = content[:at], content[at:], 1 << random.randrange(8)
    edits = {
        "flip": before + bytes(byte ^ bit for byte in after[:1]) + after[1:],
        "truncate": content[: random.choice([0, 1, 7, at, max(0, len(content) - 1)])],
        "zero": before + bytes(min(count, len(after))) + after[count:],
        "repeat": before + after[:count] + after,
        "append": content + random.randbytes(count),
        "replace": random.randbytes(count),
    }
    edit = random.choice(["flip", "flip", *edits])
    return edits[edit], f"{edit} at byte {at}, {count} bytes"


def replace_file(path: Path, random: Random) -> Mutation:
    """Put something else in place of the file."""
    kind = random.choice(["nothing", "folder", "pipe", "link to itself", "sparse file"])
    _put(path, kind)
    return Mutation(f"{kind} instead")


def _put(path: Path, kind: str) -> None:
    """Put something that is no proper file where there may be one."""
    if kind == "sparse file":
        path.touch()
        os.truncate(path, 6 << 30)
        return
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "text":
        path.write_text("not an image")


# ------------------------------------------------------------------------------ JSON and YAML


def mutate_json(path: Path, random: Random) -> Mutation:
    """Change a value or a key of a JSON document, or of a line of a JSON lines file.

    A document with a digest may get a new one, as its author could do.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number, may_differ = random.randrange(len(lines)), False
    document, change = _change(json.loads(lines[number]), random)
    lines[number] = _json_text(document, random)
    sign = random.random() < 0.3 and isinstance(document, dict) and "digest" in document
    if sign and RAW not in json.dumps(document):
        from vsm.system.files import with_digest

        del document["digest"]
        lines[number] = json.dumps(with_digest(document))
        change = f"{change}, with a new digest"
        may_differ = re.search(r"nan|inf\b|infinity", lines[number], re.IGNORECASE) is None
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    return Mutation(f"line {number + 1}: {change}", may_differ)


def mutate_yaml(path: Path, random: Random) -> Mutation:
    """Change a value or a key of a YAML document; may remove the digest, as people do."""
    before = path.read_text(encoding="utf-8")
    comments = "".join(re.findall(r"^#.*\n", before, re.MULTILINE))
    document, change = _change(yaml.safe_load(before), random)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    unsigned = comments != "" and random.random() < 0.3
    text += "" if unsigned else comments
    text = re.sub(f"['\"]?{RAW}['\"]?", lambda _: random.choice(ODD_YAML), text)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return Mutation(f"{change}, without digest" if unsigned else change, unsigned)


def _json_text(document: Any, random: Random) -> str:
    text = json.dumps(document, ensure_ascii=random.random() < 0.5)
    return text.replace(f'"{RAW}"', random.choice(DEEP_TEXTS))


def _change(document: Any, random: Random) -> tuple[Any, str]:
    """Return a document with one change, and a description of it."""
    places = list(_places(document)) if isinstance(document, dict | list) else []
    if not places or random.random() < 0.1:
        value = random.choice((*ODD_VALUES, RAW, [document], {"a": document}))
        return value, f"all of it is {_shorten(value)}"
    name, container, key = random.choice(places)
    old = container[key]
    action = random.choice(["put", "put", "put", "drop", "rename", "nudge", "list", "raw"])
    if action == "drop":
        del container[key]
        return document, f"{name} is missing"
    if action == "rename" and isinstance(container, dict):
        container[random.choice(["x", f"{key}x", str(key)[:-1], "\x1b[31m"])] = container.pop(key)
        return document, f"{name} is renamed"
    others = {"nudge": _nudge(old, random), "list": [old], "raw": RAW}
    container[key] = others.get(action, random.choice(ODD_VALUES))
    return document, f"{name} is {_shorten(container[key])} instead of {_shorten(old)}"


def _nudge(old: Any, random: Random) -> Any:
    """Return another value of the same type."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return random.choice([old + 1, old - 1, old * 2, -old, old * 1000, type(old)(0)])
    if isinstance(old, str) and old:
        place = random.randrange(len(old))
        return old[:place] + random.choice("ax0 -") + old[place + 1 :]
    if isinstance(old, list) and old:
        return random.choice([old[1:], old + old[-1:], old[::-1]])
    return None


def _places(document: Any, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the container and the key of every value inside a document."""
    keys = list(document) if isinstance(document, dict) else range(len(document[:50]))
    for key in keys:
        yield f"{above}{key}", document, key
        if isinstance(document[key], dict | list):
            yield from _places(document[key], f"{above}{key}.")


def _shorten(value: Any) -> str:
    text = "deep nesting or aliases" if value == RAW else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


# --------------------------------------------------------------------------- tensors and arrays


def mutate_tensor_header(path: Path, random: Random) -> Mutation:
    """Change names, shapes, types, offsets or metadata in the header of a safetensors file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    metadata = header.get("__metadata__", {})
    if metadata and random.random() < 0.7:
        key = random.choice(sorted(metadata))
        document, change = _change(json.loads(metadata[key]), random)
        metadata[key] = _json_text(document, random)
        change = f"metadata {key}: {change}"
    else:
        header, change = _change(header, random)
    text = _json_text(header, random).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return Mutation(change)


def mutate_tensors(path: Path, random: Random) -> Mutation:
    """Rewrite a safetensors file with a changed tensor or metadata, and a new digest."""
    from vsm.system.tensor_files import save_tensors

    with safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        metadata = dict(file.metadata() or {})
    document = json.loads(metadata["vsm"]) if "vsm" in metadata else None
    if document is not None and random.random() < 0.3:
        changed, change = _change(json.loads(metadata["vsm"]), random)
        if isinstance(changed, dict) and RAW not in json.dumps(changed):
            changed.pop("digest", None)
            save_tensors(path, tensors, changed)
            return Mutation(f"metadata with a new digest: {change}", may_differ=True)
    change, finite = _change_tensor(tensors, random)
    if document is None:
        safetensors.torch.save_file(tensors, path, metadata)
    else:
        document.pop("digest", None)
        save_tensors(path, tensors, document)
    return Mutation(change, may_differ=finite)


def _change_tensor(tensors: dict[str, torch.Tensor], random: Random) -> tuple[str, bool]:
    """Change one tensor; return a description, and whether all numbers may be valid."""
    name = random.choice(sorted(tensors))
    old = tensors[name]
    actions = ["number", "number", "all numbers", "shape", "type", "rows", "drop", "rename"]
    action, finite = random.choice(actions), True
    if action in ("drop", "rename"):
        del tensors[name]
        if action == "rename":
            tensors[random.choice([f"{name}x", "x", name[1:] or "y"])] = old
    elif action == "shape":
        new = random.choice([old.flatten(), old[None], old.reshape(-1, 1)])
        tensors[name] = new.contiguous()
    elif action == "type":
        kinds = [torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8]
        tensors[name] = old.to(random.choice(kinds))
    elif action == "rows" and old.ndim:
        tensors[name] = old[random.choice([0, 1]) :][:-1].clone()
    elif old.numel():
        numbers = [float("nan"), float("inf"), 1e30, -1e30, -1.0, 0.0]
        number = random.choice(numbers if old.is_floating_point() else [0, -1, 100])
        new = tensors[name] = old.clone().contiguous()
        place = random.randrange(old.numel())
        (new.view(-1) if action == "all numbers" else new.view(-1)[place]).fill_(number)
        # ε and β of a memory's read settings may be infinite.
        finite = bool(np.isfinite(number)) or (name == "reading" and number == float("inf"))
        action = f"{action} {number}"
    return f"tensor {name}: {action}", finite


def mutate_array_header(path: Path, random: Random) -> Mutation:
    """Change the shape, type or order in the header of a ``.npy`` file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<H", content[8:10])
    text = content[10 : 10 + size].decode("latin-1")
    key = random.choice(sorted(ARRAY_HEADERS))
    value = random.choice((*ARRAY_HEADERS[key], "None"))
    pattern = rf"('{key}': )(\([^)]*\)|'[^']*'|\w+)"
    text = re.sub(pattern, lambda match: match[1] + value, text).rstrip()
    text += " " * (-(len(text) + 11) % 64) + "\n"
    header = content[:8] + struct.pack("<H", len(text)) + text.encode("latin-1")
    path.write_bytes(header + content[10 + size :])
    return Mutation(f"{key} is {value}")


def mutate_array(path: Path, random: Random) -> Mutation:
    """Change a number of a ``.npy`` file."""
    array = np.load(path, allow_pickle=False)
    place = random.randrange(array.size)
    numbers = [float("nan"), float("inf"), 1e30, -1] if array.dtype.kind == "f" else [0, 1, 100]
    number = random.choice(numbers)
    array.reshape(-1)[place] = number
    np.save(path, array)
    return Mutation(f"number {place} is {number}", may_differ=bool(np.isfinite(number)))


# --------------------------------------------------------------- databases, tables and folders


def mutate_database(path: Path, random: Random) -> Mutation:
    """Change a cell of an SQLite file, or drop a row or a table."""
    with closing(sqlite3.connect(path)) as database, database:
        query = "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'"
        table = random.choice(sorted(name for (name,) in database.execute(query)))
        action = random.choice(["cell"] * 8 + ["rows", "table", "version"])
        if action == "table":
            database.execute(f'DROP TABLE "{table}"')
            return Mutation(f"table {table} is missing", may_differ=True)
        if action == "rows":
            database.execute(f'DELETE FROM "{table}"')
            return Mutation(f"table {table} is empty", may_differ=True)
        if action == "version":
            database.execute(f"PRAGMA user_version = {random.choice([-1, 99])}")
            return Mutation("another version")
        columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
        column = random.choice(columns)
        found = database.execute(f'SELECT "{column}" FROM "{table}" LIMIT 1').fetchone()
        value, may_differ = _odd_cell(None if found is None else found[0], random)
        try:
            database.execute(f'UPDATE OR REPLACE "{table}" SET "{column}" = ?', (value,))
        except (sqlite3.Error, OverflowError, UnicodeEncodeError):
            return Mutation(f"{table}.{column} cannot be {_shorten(value)}")
        return Mutation(f"{table}.{column} is {_shorten(value)}", may_differ)


def _odd_cell(old: Any, random: Random) -> tuple[Any, bool]:
    """Return another value of a cell, and whether it may be intended."""
    if isinstance(old, bytes) and old and random.random() < 0.6:
        return _edit(old, random)[0], False
    odd = [
        one for one in ODD_VALUES if isinstance(one, str | int | float | None) and one != "\ud800"
    ]
    return random.choice([*odd, b"", b"x"]), True


def mutate_table(path: Path, random: Random) -> Mutation:
    """Change a cell of a CSV file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number, value = random.randrange(len(lines)), random.choice(ODD_CELLS)
    cells = lines[number].split(",")
    cells[random.randrange(len(cells))] = value
    lines[number] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    return Mutation(f"line {number + 1} has the cell {_shorten(value)}", may_differ=True)


def rename_to_bytes(path: Path, name: bytes) -> None:
    """Rename a file or folder to a name that may be invalid UTF-8."""
    parent = os.fsencode(path.parent)
    os.rename(os.fsencode(path), os.path.join(parent, name))  # noqa: PTH104, PTH118 - bytes


def mutate_folder(path: Path, random: Random) -> Mutation:
    """Change a folder of class folders: names, links, nesting, odd files."""
    folder, name = random.choice(sorted(path.iterdir())), random.choice(ODD_NAMES)
    image = random.choice(sorted(folder.iterdir()))
    actions = ("class", "class", "file", "links", "nested", "missing", "empty", "odd")
    action = random.choice(actions)
    if action == "class":
        rename_to_bytes(folder, name)
    elif action == "file":
        rename_to_bytes(image, name[:200] + b".png")
    elif action == "links":
        (folder / "again").symlink_to(random.choice([path, folder, Path("again")]))
        (path / "again").symlink_to(random.choice([path.parent, path, folder]))
    elif action == "nested":
        _nest(folder, image)
    elif action in ("missing", "empty"):
        shutil.rmtree(folder)
        if action == "empty":
            folder.mkdir()
    else:
        action = random.choice(["pipe", "folder", "text", "sparse file"])
        _put(folder / "odd.png", action)
    return Mutation(f"{action} {name!r} in {folder.name}", may_differ=True)


def _nest(folder: Path, image: Path) -> None:
    here = os.getcwd()  # noqa: PTH109 - the path grows longer than paths may be
    try:
        os.chdir(folder)
        for _ in range(NESTED_FOLDERS):
            os.mkdir("d")  # noqa: PTH102 - as above
            os.chdir("d")
        shutil.copy(image, "deep.png")
    finally:
        os.chdir(here)
