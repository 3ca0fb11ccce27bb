"""Damage to files, drawn at random: of their bytes, their values, their kind.

A generator changes one file in place and says what it did. Damage that its writer could not have
made must be refused or leave the answer as it was. If what was written is whole and merely
different, another answer is right.
"""

import json
import os
import re
import sqlite3
import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
import yaml

CANARY_FILE, CANARY_PIPE = "canary.txt", "canary.pipe"
RAW = "@@raw@@"
DEEP = 200_000


class Mutation(NamedTuple):
    """What was done to a file, and whether another answer is right thereafter."""

    what: str
    may_differ: bool = False


Mutate = Callable[[Path, Random], Mutation]


def any_of(*mutations: Mutate) -> Mutate:
    """Return a generator that is one of several, each time anew."""

    def mutate(path: Path, random: Random) -> Mutation:
        return random.choice(mutations)(path, random)

    return mutate


def harmless(mutate: Mutate) -> Mutate:
    """Return the same generator for files that people write: any answer to them is right."""

    def mutate_input(path: Path, random: Random) -> Mutation:
        return Mutation(mutate(path, random).what, may_differ=True)

    return mutate_input


# ------------------------------------------------------------------------------------- bytes


def in_bytes(path: Path, random: Random) -> Mutation:
    """Change bytes: flip bits, cut, fill with zeros, repeat, append, or all of it."""
    content = bytearray(path.read_bytes())
    change = random.choice([_flip, _flip, _flip, _cut, _zero, _repeat, _append, _replace])
    what = change(content, random)
    path.write_bytes(content)
    return Mutation(what)


def _flip(content: bytearray, random: Random) -> str:
    places = [_place(content, random) for _ in range(random.choice([1, 1, 1, 3]))]
    for place in places:
        if content:
            content[place] ^= 1 << random.randrange(8)
    return f"bits flipped at {places}"


def _place(content: bytearray, random: Random) -> int:
    """Return a place, half of the time in the first bytes, where formats have their headers."""
    most = max(1, len(content))
    return random.randrange(min(most, 512) if random.random() < 0.5 else most)


def _cut(content: bytearray, random: Random) -> str:
    length = random.choice([0, 1, 7, random.randrange(max(1, len(content))), len(content) - 1])
    del content[length:]
    return f"cut to {length} bytes"


def _zero(content: bytearray, random: Random) -> str:
    start = _place(content, random)
    size = random.choice([1, 16, 512, len(content)])
    content[start : start + size] = bytes(len(content[start : start + size]))
    return f"{size} zeros from {start}"


def _repeat(content: bytearray, random: Random) -> str:
    start = _place(content, random)
    block = content[start : start + random.choice([1, 16, 512])]
    content[start:start] = block
    return f"{len(block)} bytes repeated at {start}"


def _append(content: bytearray, random: Random) -> str:
    size = random.choice([1, 100, 5000])
    content += random.randbytes(size)
    return f"{size} bytes appended"


def _replace(content: bytearray, random: Random) -> str:
    content[:] = random.randbytes(random.choice([1, 8, 4096]))
    return f"{len(content)} random bytes instead"


def in_kind(path: Path, random: Random) -> Mutation:
    """Put something else in the place of the file."""
    kind = random.choice(["nothing", "folder", "pipe", "link to itself", "sparse"])
    if kind != "sparse":
        path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "sparse":
        os.truncate(path, 6 << 30)
    return Mutation(f"{kind} in its place")


# ------------------------------------------------------------------------------------- values

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, "", "x", 0, 1, -1, 0.5, -0.5, 10**9, 10**30, 1e30, -1e30, 1e-30),
    *(float("nan"), float("inf"), float("-inf"), [None], {"a": None}, [[]], "nan", "1e5"),
    *(CANARY_FILE, CANARY_PIPE, f"../world/{CANARY_FILE}", "/dev/zero", "x" * 100_000),
    *("\x1b[31mred\x07", "=1+1", "<script>alert(1)</script>", "a\nb", "a\0b", "..", "\ud800"),
)


def in_json(path: Path, random: Random) -> Mutation:
    """Change a value or a key of a JSON document."""
    document, what = _changed(json.loads(path.read_text(encoding="utf-8")), random)
    path.write_text(_json_text(document, random), encoding="utf-8", errors="surrogatepass")
    return Mutation(what)


def in_json_lines(path: Path, random: Random) -> Mutation:
    """Change a value or a key in one line of a file of JSON documents."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = random.randrange(len(lines))
    document, what = _changed(json.loads(lines[number]), random)
    lines[number] = _json_text(document, random)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    return Mutation(f"line {number + 1}: {what}")


def in_yaml(path: Path, random: Random) -> Mutation:
    """Change a value or a key of a YAML document."""
    document, what = _changed(yaml.safe_load(path.read_text(encoding="utf-8")), random)
    raws = (*_deep_texts(), BOMB, "!!python/object/apply:os.system ['true']", "*unknown", "&a [*a]")
    before = path.read_text(encoding="utf-8")
    comments = "".join(re.findall(r"^#.*\n", before, re.MULTILINE))
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True) + comments
    text = re.sub(f"['\"]?{RAW}['\"]?", lambda _: random.choice(raws), text)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return Mutation(what)


def in_signed_json(path: Path, random: Random) -> Mutation:
    """Change a value of a JSON document, and make its digest anew, as whoever writes it does."""
    mutation = in_json(path, random)
    text = path.read_text(encoding="utf-8", errors="surrogatepass")
    if len(text) > DEEP or '"digest"' not in text:
        return mutation
    document = json.loads(text)
    if not isinstance(document, dict) or document.pop("digest", None) is None:
        return mutation
    from vsm.system.documents import with_digest

    signed = json.dumps(with_digest(document))
    path.write_text(signed, encoding="utf-8", errors="surrogatepass")
    return Mutation(f"{mutation.what}, signed", may_differ=_is_finite(signed))


def in_signed_yaml(path: Path, random: Random) -> Mutation:
    """Change a value of a YAML document, as people do, who leave the line of its digest away."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    had_digest = text != path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    return Mutation(f"{in_yaml(path, random).what}, without digest", may_differ=had_digest)


def _is_finite(text: str) -> bool:
    return re.search(r"nan|inf\b|infinity", text, re.IGNORECASE) is None


BOMB = "[{}]".format(
    ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(9))
)
"""Nine aliases of nine aliases, nine times."""


def _deep_texts() -> tuple[str, ...]:
    return "[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a": ' * DEEP + "1" + "}" * DEEP


def _json_text(document: Any, random: Random) -> str:
    text = json.dumps(document, ensure_ascii=random.random() < 0.5)
    return text.replace(f'"{RAW}"', random.choice(_deep_texts()))


def _changed(document: Any, random: Random) -> tuple[Any, str]:
    """Return a document with one change, and say which."""
    places = list(_places(document, ()))
    where = random.choice(places) if random.random() < 0.9 else ()
    if not where:
        value = random.choice((*ODD_VALUES, RAW, [document], {"a": document}))
        return value, f"all of it is {_shown(value)}"
    container = document
    for key in where[:-1]:
        container = container[key]
    key, old = where[-1], container[where[-1]]
    name = ".".join(map(str, where))
    action = random.choice(["put", "put", "put", "drop", "rename", "nudge", "list", "raw"])
    if action == "drop":
        del container[key]
        return document, f"{name} is gone"
    if action == "rename" and isinstance(container, dict):
        container[random.choice(["x", f"{key}x", str(key)[:-1], "\x1b[31m"])] = container.pop(key)
        return document, f"{name} has another name"
    value = random.choice(ODD_VALUES)
    if action == "nudge":
        value = _nudged(old, random)
    elif action == "list":
        value = [old]
    elif action == "raw":
        value = RAW
    container[key] = value
    return document, f"{name} is {_shown(value)} instead of {_shown(old)}"


def _nudged(old: Any, random: Random) -> Any:
    """Return a value of the same type nearby."""
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


def _places(document: Any, above: tuple[Any, ...]) -> Any:
    """Yield the path of every value but the whole."""
    inside: Any = ()
    if isinstance(document, dict):
        inside = document.items()
    elif isinstance(document, list):
        inside = enumerate(document[:50])
    for key, value in inside:
        yield (*above, key)
        yield from _places(value, (*above, key))


def _shown(value: Any) -> str:
    text = "deep nesting or aliases" if value == RAW else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


# ------------------------------------------------------------------------------------- tensors


def in_tensor_header(path: Path, random: Random) -> Mutation:
    """Change the header of a safetensors file: names, shapes, types, places or metadata."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    metadata = header.get("__metadata__", {})
    if metadata and random.random() < 0.7:
        key = random.choice(sorted(metadata))
        document, what = _changed(json.loads(metadata[key]), random)
        metadata[key] = _json_text(document, random)
        what = f"metadata {key}: {what}"
    else:
        header, what = _changed(header, random)
    text = _json_text(header, random).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return Mutation(what)


def in_tensors(path: Path, random: Random) -> Mutation:
    """Write a safetensors file anew, as the program itself does, with a tensor changed."""
    with safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        metadata = dict(file.metadata() or {})
    if "vsm" in metadata and random.random() < 0.3:
        document, what = _changed(json.loads(metadata["vsm"]), random)
        if isinstance(document, dict) and RAW not in json.dumps(document):
            document.pop("digest", None)
            _write_tensors(path, tensors, document)
            return Mutation(f"metadata, signed: {what}", may_differ=True)
    name = random.choice(sorted(tensors))
    change = random.choice([_put, _put, _put, _reshape, _retype, _cut_rows, _drop])
    what = change(tensors, name, random)
    if "vsm" in metadata:
        metadata = json.loads(metadata["vsm"])
        metadata.pop("digest", None)
        _write_tensors(path, tensors, metadata)
    else:
        safetensors.torch.save_file(tensors, path, metadata)
    return Mutation(f"tensor {name} {what}", may_differ=not what.startswith("holds non-finite"))


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    from vsm.system.tensor_files import save_tensors

    save_tensors(path, tensors, metadata)


def _put(tensors: dict[str, torch.Tensor], name: str, random: Random) -> str:
    tensor = tensors[name] = tensors[name].clone().contiguous()
    number = random.choice([float("nan"), float("inf"), 1e30, -1e30, -1.0, 0.0])
    if not tensor.is_floating_point():
        number = random.choice([0, -1, 100])
    everywhere = random.random() < 0.3
    if tensor.numel() == 0:
        return "is empty as it was"
    if everywhere:
        tensor.fill_(number)
    else:
        tensor.view(-1)[random.randrange(tensor.numel())] = number
    kind = "holds" if np.isfinite(number) else "holds non-finite"
    return f"{kind} {number}{' everywhere' if everywhere else ''}"


def _reshape(tensors: dict[str, torch.Tensor], name: str, random: Random) -> str:
    old = tensors[name]
    tensors[name] = random.choice([old.flatten(), old[None], old.reshape(-1, 1)]).contiguous()
    return f"has the shape {list(tensors[name].shape)}"


def _retype(tensors: dict[str, torch.Tensor], name: str, random: Random) -> str:
    kind = random.choice([torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8])
    tensors[name] = tensors[name].to(kind)
    return f"is of {kind}"


def _cut_rows(tensors: dict[str, torch.Tensor], name: str, random: Random) -> str:
    if tensors[name].ndim:
        tensors[name] = tensors[name][random.choice([0, 1]) :][:-1].clone()
    return f"is cut to {list(tensors[name].shape)}"


def _drop(tensors: dict[str, torch.Tensor], name: str, random: Random) -> str:
    tensor = tensors.pop(name)
    if random.random() < 0.5:
        return "is gone"
    tensors[random.choice([f"{name}x", "x", name[1:] or "y"])] = tensor
    return "has another name"


# ------------------------------------------------------------------------------------- arrays

SHAPES = ("(-1, 8)", "(True, 8)", "(1000000000000, 8)", "(72,)", "(72, 8, 1)", "()", "'x'", "None")
TYPES = ("'|O'", "'<f2'", "'<U7'", "'>f4'", "'<f8'", "'<M8[s]'", "'x'", "[('a', '<f4')]", "None")


def in_array_header(path: Path, random: Random) -> Mutation:
    """Change what the header of a ``.npy`` file says of its shape, type or order."""
    content = path.read_bytes()
    (size,) = struct.unpack("<H", content[8:10])
    text = content[10 : 10 + size].decode("latin-1")
    key = random.choice(["shape", "descr", "fortran_order"])
    value = random.choice({"shape": SHAPES, "descr": TYPES}.get(key, ("True", "1", "None")))
    pattern = rf"('{key}': )(\([^)]*\)|'[^']*'|\w+)"
    text = re.sub(pattern, lambda match: match[1] + value, text).rstrip()
    text += " " * (-(len(text) + 11) % 64) + "\n"
    header = content[:8] + struct.pack("<H", len(text)) + text.encode("latin-1")
    path.write_bytes(header + content[10 + size :])
    return Mutation(f"{key} is {value}")


def in_array(path: Path, random: Random) -> Mutation:
    """Change a number of a ``.npy`` file."""
    array = np.load(path, allow_pickle=False)
    place = random.randrange(array.size)
    numbers = [float("nan"), float("inf"), 1e30, -1] if array.dtype.kind == "f" else [0, 1, 100]
    number = random.choice(numbers)
    array.reshape(-1)[place] = number
    np.save(path, array)
    return Mutation(f"number {place} is {number}", may_differ=bool(np.isfinite(number)))


# ------------------------------------------------------------------------------------- others


def in_database(path: Path, random: Random) -> Mutation:
    """Change a cell of an SQLite file, or drop a row or a table."""
    with closing(sqlite3.connect(path)) as database, database:
        names = [
            n for (n,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        table = random.choice([n for n in sorted(names) if not n.startswith("sqlite_")])
        action = random.choice(["cell"] * 8 + ["rows", "table", "version"])
        if action == "table":
            database.execute(f'DROP TABLE "{table}"')
            return Mutation(f"table {table} is gone", may_differ=True)
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
            return Mutation(f"{table}.{column} cannot be {_shown(value)}")
        return Mutation(f"{table}.{column} is {_shown(value)}", may_differ)


def _odd_cell(old: Any, random: Random) -> tuple[Any, bool]:
    """Return another value of a cell, and whether it is one that might be meant."""
    if isinstance(old, bytes) and old and random.random() < 0.6:
        content = bytearray(old)
        random.choice([_flip, _cut, _zero])(content, random)
        return bytes(content), False
    odd = [
        one for one in ODD_VALUES if isinstance(one, str | int | float | None) and one != "\ud800"
    ]
    return random.choice([*odd, b"", b"x"]), True


def in_table(path: Path, random: Random) -> Mutation:
    """Change a cell, a line or the header of a CSV file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = random.randrange(len(lines))
    cells = lines[number].split(",")
    odd = ["", '"', "\0", "=1+1", "\x1b[31m", "<script>", "x" * 100_000, "..", "/dev/zero", "a,b"]
    odd += ["\udcff", "missing.png", "support", "\u202e", '"a\nb"']
    value = random.choice(odd)
    cells[random.randrange(len(cells))] = value
    lines[number] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    return Mutation(f"line {number + 1} has the cell {_shown(value)}", may_differ=True)


def choose(paths: Sequence[Path], random: Random) -> Path:
    """Return one of several files; their names may hold digests of where they are."""
    return random.choice(sorted(paths, key=lambda path: (path.stat().st_size, path)))
