"""YAML and JSON documents, which are untrusted.

Only regular files of limited size are read; nesting and aliases are counted before anything is
built; messages quote no value in full. What the package writes holds a digest of the rest, which is
checked when it is read; documents that people write have none.
"""

import hashlib
import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vsm.errors import DocumentError
from vsm.system.files import write_text

MOST_YAML_BYTES, MOST_JSON_BYTES = 2**20, 256 * 2**20
MOST_DEPTH = 300  # of brackets within brackets; what merged memories came from is nested, too
MOST_ALIASES = 100
MOST_LETTERS = 300  # of a message
DIGEST_KEY = "digest"
_DIGEST_LINE = re.compile(r"# digest of the lines above: ([0-9a-f]{64})\n\Z")
_NESTED = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


def shortened(message: object, most: int = MOST_LETTERS) -> str:
    """Return a message in one line, without the middle of what is long."""
    line = " ".join(str(message).split())
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the contents of a regular file of at most ``most_bytes``."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for somebody to write to it
        raise DocumentError(path, "is not a regular file")
    if status.st_size > most_bytes:
        raise DocumentError(path, f"has {status.st_size:,} bytes, but at most {most_bytes:,}")
    with path.open("rb") as file:
        return file.read(most_bytes)


def read_json(path: Path) -> Any:
    """Return what a JSON file holds, without its digest, which must be right if there is one."""
    return parsed_json(read_file(path, MOST_JSON_BYTES), path)


def parsed_json(text: str | bytes, source: Path | str, verify: bool = True) -> Any:
    """Return what a JSON text holds; ``verify`` checks and removes a digest if there is one."""
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        _require_shallow_json(text, source)
        value = json.loads(text)
    except RecursionError as error:
        raise DocumentError(source, "is nested too deeply") from error
    except ValueError as error:
        raise DocumentError(source, _said(error, "JSON")) from error
    if not verify or not isinstance(value, dict) or DIGEST_KEY not in value:
        return value
    stored = value.pop(DIGEST_KEY)
    if stored != digest_of(value):
        raise DocumentError(source, "was changed: its digest belongs to other contents")
    return value


def _require_shallow_json(text: str, source: Path | str) -> None:
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return
    depth = 0
    for found in _NESTED.finditer(text):  # strings, which are passed over, and brackets
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > MOST_DEPTH:
            raise DocumentError(source, f"is nested deeper than {MOST_DEPTH} levels")


def read_object(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds if it is an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DocumentError(path, f"holds no JSON object but {_kind(value)}")
    return value


def write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON object with its digest atomically."""
    write_text(path, json.dumps(with_digest(value), ensure_ascii=False, indent=indent) + "\n")


def with_digest(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object and the digest of it; ready for JSON."""
    return {**value, DIGEST_KEY: digest_of(value)}


def digest_of(value: Mapping[str, Any]) -> str:
    """Return a SHA-256 of an object as JSON keeps it, whatever the order of its keys."""
    kept = json.loads(json.dumps(value))  # where keys are strings
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def finite(value: Any) -> Any:
    """Return plain values with null in place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_digest_line(text: str) -> str:
    """Return lines of YAML and, as a comment, the digest of them."""
    return f"{text}# digest of the lines above: {hashlib.sha256(text.encode()).hexdigest()}\n"


def read_yaml(path: Path, verify: bool = True) -> Any:
    """Return what a YAML file holds; ``verify`` checks the digest in its last line, if any."""
    try:
        text = read_file(path, MOST_YAML_BYTES).decode("utf-8")
        _require_small_yaml(text, path)
        found = _DIGEST_LINE.search(text) if verify else None
        if found and with_digest_line(text[: found.start()]) != text:
            hint = "undo that, or remove its last line to keep the change"
            raise DocumentError(path, f"was changed or damaged; {hint}")
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise DocumentError(path, "is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        raise DocumentError(path, _said(error, "YAML")) from error


def read_mapping(path: Path, verify: bool = True) -> dict[str, Any]:
    """Return what a YAML file holds if it is a mapping from names."""
    value = read_yaml(path, verify)
    if not isinstance(value, dict):
        raise DocumentError(path, f"expected a mapping, as in 'way: 5', got {_kind(value)}")
    for name in value:
        if not isinstance(name, str):
            raise DocumentError(path, f"expected names of settings, got {shortened(repr(name))}")
    return value


def _require_small_yaml(text: str, path: Path) -> None:
    """Count levels and aliases while nothing is built yet; the parser of events needs no stack."""
    depth, aliases, anchored = 0, 0, []
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if event.anchor is not None:
                anchored.append(depth)
        elif isinstance(event, yaml.CollectionEndEvent):
            if anchored and anchored[-1] == depth:
                anchored.pop()
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if anchored:  # each level of which would multiply what the levels below stand for
                raise DocumentError(path, "has an alias within what another alias stands for")
        if depth > MOST_DEPTH or aliases > MOST_ALIASES:
            what = f"{MOST_DEPTH} levels" if depth > MOST_DEPTH else f"{MOST_ALIASES} aliases"
            raise DocumentError(path, f"has more than {what}")


def _said(error: Exception, kind: str) -> str:
    if isinstance(error, DocumentError):
        return error.reason
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text (byte {error.start})"
    return f"is no {kind}: {shortened(error)}"


def _kind(value: object) -> str:
    kinds = {str: "a text", list: "a list", dict: "an object", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads ``1e-3`` as a number, and a date as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - of PyYAML
        first: [pair for pair in pairs if pair[0].rpartition(":")[2] not in ("timestamp", "float")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*(?:[eE][-+]?\d+)?"
        r"|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"
    ),
    list("-+0123456789."),
)
