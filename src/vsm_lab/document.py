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
class Plot:
    """A plot: its PNG or SVG file relative to the page, the content of it, and a caption."""

    file: str
    data: bytes
    caption: str


Block = Heading | Text | Table | Plot


def write_markdown(path: Path, blocks: Sequence[Block]) -> None:
    """Write the blocks as Markdown, and their plots beside it."""
    for block in blocks:
        if isinstance(block, Plot):
            with atomic_path(path.parent / block.file) as temporary:
                temporary.write_bytes(block.data)
    write_text(path, to_markdown(blocks))


def to_markdown(blocks: Sequence[Block]) -> str:
    """Return the blocks as Markdown; plots are links to their files."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return _escaped(block.text)
    if isinstance(block, Plot):
        return f"![{block.caption}]({block.file})\n\n*{_escaped(block.caption)}*"
    lines = [block.columns, ["---"] + ["---:"] * (len(block.columns) - 1), *block.rows]
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)


def _escaped(text: str) -> str:
    """Escape the characters that mean something in Markdown."""
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
    if isinstance(block, Plot):
        text = html.escape(block.caption)
        encoded = base64.b64encode(block.data).decode()
        source = f"data:{MEDIA_TYPES[Path(block.file).suffix]};base64,{encoded}"
        return f'<figure><img alt="{text}" src="{source}"><figcaption>{text}</figcaption></figure>'

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row("td", cells) for cells in block.rows)
    table = f"<table><thead>{row('th', block.columns)}</thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'
