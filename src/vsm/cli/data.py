"""``vsm data``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse

from vsm.cli.arguments import add_action, add_json_argument
from vsm.cli.output import ProgressBar, print_json, print_table, say
from vsm.errors import DataError


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare what can be done with datasets."""
    actions = parser.add_subcommands(dest="action", required=True)

    add_json_argument(add_action(actions, "list", "What is known and what is prepared."))

    preparing = add_action(actions, "prepare", "Prepare a dataset for use, once.")
    preparing.add_argument("name", type=str, help="A name that `vsm data list` shows, or folder.")
    preparing.add_argument("--from", type=Path | None, help="A file or folder that you have.")
    preparing.add_argument("--download", action="store_true", help="Fetch the public files.")
    preparing.add_argument(
        "--allow_missing", action="store_true", help="Go without images that should be there."
    )
    add_json_argument(preparing)

    info = add_action(actions, "info", "Describe a prepared dataset.")
    info.add_argument(
        "name", type=str, help="A prepared dataset, glyphs, folder:PATH or features:PATH."
    )
    info.add_argument("--verify", action="store_true", help="Compare pixels with the checksum.")
    add_json_argument(info)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """List, prepare, or describe datasets."""
    parsed = parser.parse_args(arguments)
    actions = {"list": _list, "prepare": _prepare, "info": _info}
    actions[parsed.action](parsed[parsed.action])


def _list(chosen: jsonargparse.Namespace) -> None:
    from vsm.data import list_datasets

    rows = list_datasets()
    if chosen.json:
        print_json({"datasets": rows})
        return
    print_table(
        "datasets",
        ["name", "prepared", "size", "what it is"],
        [[row["name"], _state(row), _megabytes(row["bytes"]), row["title"]] for row in rows],
        words=True,
    )


def _state(row: dict[str, Any]) -> str:
    """Return whether a dataset is prepared, and if not, how to prepare it."""
    if row["prepared"]:
        return "yes"
    if row["name"] == "glyphs":
        return "when used"
    return "--from or --download" if row["download"] else "--from"


def _prepare(chosen: jsonargparse.Namespace) -> None:
    from vsm.data import describe, prepare

    with ProgressBar(quiet=chosen.json) as progress:
        location = prepare(
            chosen.name,
            chosen["from"],
            download=chosen.download,
            allow_missing=chosen.allow_missing,
            progress=progress,
        )
    is_folder = chosen.name == "folder" or chosen.name.startswith("folder:")
    dataset = describe(location.name if is_folder else chosen.name)
    if chosen.json:
        print_json(dataset)
        return
    size = f"{dataset['images']:,} images of {dataset['classes']:,} classes"
    say(f"{dataset['name']}: {size}, ready")


def _info(chosen: jsonargparse.Namespace) -> None:
    from vsm.data import describe, prepared

    dataset = describe(chosen.name)
    if chosen.verify and "sha256" not in dataset:
        raise DataError(f"verify: {dataset['name']} is read as it is and has no checksum")
    if chosen.verify and dataset["location"]:
        prepared.verify(Path(dataset["location"]).name)
        say(f"{dataset['name']}: every pixel is as it was prepared", file=sys.stderr)
    if chosen.json:
        print_json(dataset)
        return
    rows = [[key, _words(key, value)] for key, value in dataset.items()]
    print_table(dataset["name"], ["", ""], rows, words=True)


def _words(key: str, value: Any) -> str:
    """Format one entry for people."""
    if key == "bytes":
        return _megabytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words('', item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " × ".join(map(str, value)) if key == "image_shape" else ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:,.1f} MB"
