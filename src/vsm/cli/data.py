"""``vsm data``."""

import sys
from dataclasses import field
from pathlib import Path
from typing import Any

from vsm.cli.arguments import Actions, JsonOption
from vsm.cli.output import ProgressBar, in_words, print_json, print_table, say
from vsm.errors import DataError


class List(JsonOption):
    """What is known and what is prepared."""

    def __call__(self) -> None:
        from vsm.data import list_datasets

        rows = list_datasets()
        if self.json:
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


class Prepare(JsonOption):
    """Prepare a dataset for use, once."""

    name: str = field(kw_only=False)
    """A name that `vsm data list` shows, or folder."""
    from_: Path | None = None
    """A file or folder that you have."""
    download: bool = False
    """Fetch the public files."""
    allow_missing: bool = False
    """Go without images that should be there."""

    def __call__(self) -> None:
        from vsm.data import describe, prepare

        with ProgressBar(quiet=self.json) as progress:
            location = prepare(
                self.name,
                self.from_,
                download=self.download,
                allow_missing=self.allow_missing,
                progress=progress,
            )
        is_folder = self.name == "folder" or self.name.startswith("folder:")
        dataset = describe(location.name if is_folder else self.name)
        if self.json:
            print_json(dataset)
            return
        size = f"{dataset['images']:,} images of {dataset['classes']:,} classes"
        say(f"{dataset['name']}: {size}, ready")


class Info(JsonOption):
    """Describe a prepared dataset."""

    name: str = field(kw_only=False)
    """A prepared dataset, glyphs, folder:PATH or features:PATH."""
    verify: bool = False
    """Compare pixels with the checksum."""

    def __call__(self) -> None:
        from vsm.data import describe, prepared

        dataset = describe(self.name)
        if self.verify and "sha256" not in dataset:
            raise DataError(f"verify: {dataset['name']} is read as it is and has no checksum")
        if self.verify and dataset["location"]:
            prepared.verify(Path(dataset["location"]).name)
            say(f"{dataset['name']}: every pixel is as it was prepared", file=sys.stderr)
        if self.json:
            print_json(dataset)
            return
        shown = {**dataset, "bytes": _megabytes(dataset["bytes"])}
        rows = [[key, in_words(value)] for key, value in shown.items()]
        print_table(dataset["name"], ["", ""], rows, words=True)


COMMANDS = {"data": Actions({"list": List, "prepare": Prepare, "info": Info})}


def _megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:,.1f} MB"
