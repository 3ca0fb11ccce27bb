"""A page as a list of blocks, and the same blocks as Markdown and as one HTML file."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vsm.system.files import atomic_path, write_text

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
h2 { margin-top: 2.6rem; border-bottom: 1px solid #ddd } img { max-width: 100% }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: 1rem 0; font-size: 14px }
th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap }
th { white-space: normal } th:first-child, td:first-child { text-align: left }
thead th { border-bottom: 2px solid #444 } tbody tr:nth-child(even) { background: #f5f7fa }
figcaption { color: #555 } figure { margin: 1rem 0 }
"""
MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells of text; the first column names the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def grouped_table(columns: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]]) -> Table:
    """Return a table of groups of rows; the name of a group stands before its first row."""
    named = [
        ["" if position else name, *row]
        for name, rows in groups.items()
        for position, row in enumerate(rows)
    ]
    return Table(columns, named)


@dataclass(frozen=True)
class Picture:
    """A picture, ``<folder>/<name><ending>`` beside the Markdown.

    Attributes:
        name: of its file, without ending.
        data: of its file; None for one that is there already.
        caption: below it, and the alternative text.
        folder: relative to the page.
        ending: ``.png`` or ``.svg``.
    """

    name: str
    data: bytes | None
    caption: str
    folder: str = "figures"
    ending: str = ".png"

    @property
    def file(self) -> str:
        """Path relative to the page."""
        return f"{self.folder}/{self.name}{self.ending}".removeprefix("./")


Block = Heading | Text | Table | Picture


def write_markdown(path: Path, blocks: Sequence[Block]) -> None:
    """Write the blocks as Markdown, and their pictures beside it."""
    for block in blocks:
        if isinstance(block, Picture) and block.data is not None:
            with atomic_path(path.parent / block.file) as temporary:
                temporary.write_bytes(block.data)
    write_text(path, to_markdown(blocks))


def to_markdown(blocks: Sequence[Block]) -> str:
    """Return the blocks as Markdown; pictures are links to their files."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return _escaped(block.text)
    if isinstance(block, Picture):
        return f"![{block.caption}]({block.file})\n\n*{_escaped(block.caption)}*"
    lines = [block.columns, ["---"] + ["---:"] * (len(block.columns) - 1), *block.rows]
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)


def _escaped(text: str) -> str:
    """Keep stars and bars from meaning anything to Markdown."""
    return text.replace("|", "\\|").replace("*", "\\*")


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """Return the blocks as an HTML page that needs no other file."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style>\n" + "\n".join(map(_html, blocks)) + "\n</html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Picture):
        text = html.escape(block.caption)
        encoded = base64.b64encode(block.data or b"").decode()
        source = f"data:{MEDIA_TYPES[block.ending]};base64,{encoded}"
        return f'<figure><img alt="{text}" src="{source}"><figcaption>{text}</figcaption></figure>'
    head = "".join(f"<th>{html.escape(column)}</th>" for column in block.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in block.rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
