"""The paper's numbers: every cell that the package quotes against the LaTeX of its tables.

``paper_tables.tex`` holds the tables of results alone, so that the numbers can be checked in every
clone. Where the paper's full source lies beside the repository, the excerpt is compared with it.
"""

import re
from pathlib import Path

import pytest

from vsm_lab.paper.tables import Column, tables

EXCERPT = Path(__file__).with_name("paper_tables.tex").read_text(encoding="utf-8")
PAPER = (
    Path(__file__).parents[2]
    / "shared"
    / "paper"
    / "learning-to-learn-variational-semantic-memory.tex"
)
TABLES = [name for name in tables() if name.startswith("table")]
MACROS = {
    r"\mini": "miniImageNet",
    r"\tiered": "tieredImageNet",
    r"\cifarfs": "cifar-fs",
    r"\Omniglot": "Omniglot",
    r"\alpha": "α",
    r"\pm": "±",
    r"\%": "%",
}
DATASETS = {
    "miniImageNet": "mini-imagenet",
    "tieredImageNet": "tiered-imagenet",
    "cifar-fs": "cifar-fs",
    "Omniglot": "omniglot",
}


def plain(tex: str) -> str:
    """Return the words of a piece of LaTeX."""
    tex = re.sub(r"\\(cite|rowcolor)\{[^}]*\}", "", tex)
    for macro, word in MACROS.items():
        tex = tex.replace(macro, word)
    tex = re.sub(r"\\[a-zA-Z]+", " ", tex)
    return " ".join(re.sub(r"[{}$]", "", tex).replace("~", " ").replace("±", " ± ").split())


def tex_table(text: str, label: str) -> tuple[str, str]:
    """Return caption and tabular of the table with ``label``; the caption may be absent."""
    before, after = text.split(rf"\label{{{label}}}", 1)
    own = before.rsplit(r"\end{tabular}", 1)[-1]
    caption = own.rsplit(r"\caption{", 1)[1].rstrip().removesuffix("}") if "caption" in own else ""
    tabular = after.split(r"\begin{tabular}", 1)[1].split(r"\end{tabular}", 1)[0]
    return caption, tabular


def header_and_body(tabular: str) -> tuple[str, str]:
    """Split a tabular after its first rule below the header."""
    header, body = tabular.split(r"\bottomrule", 1)[0].split(r"\midrule", 1)
    return header, body


def tex_cell(tex: str) -> str | None:
    text = plain(tex)
    return None if text in ("-", "n/a") else text


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_every_table_is_the_papers(name: str) -> None:
    printed = tables()[name]
    _, tabular = tex_table(EXCERPT, printed.label)
    _, body = header_and_body(tabular)
    lines = [line.split("&") for line in body.split(r"\\") if plain(line)]
    rows = [row for row in printed.rows if row.in_paper]
    assert len(lines) == len(rows)
    for (title, *cells), row in zip(lines, rows, strict=True):
        assert row.title.startswith(plain(title))
        found = [tex_cell(cell) for cell in cells if plain(cell)]  # spacers between columns
        assert list(row.cells) == found
        for cell in filter(None, row.cells):
            assert all(float(word) > 0 for word in cell.split(" ± ") if word != "n/a")


@pytest.mark.parametrize("name", TABLES)
def test_every_column_is_the_papers(name: str) -> None:
    printed = tables()[name]
    caption, tabular = tex_table(EXCERPT, printed.label)
    header = plain(header_and_body(tabular)[0])
    known = "|".join(DATASETS)
    datasets = re.findall(known, header) or re.findall(known, plain(caption))
    ways = re.findall(r"(\d+)-way", header) or re.findall(r"(\d+)-way", caption) or ["5"]
    columns = [
        Column(DATASETS[datasets[at // 2]], int(ways[min(at // 2, len(ways) - 1)]), int(shot))
        for at, shot in enumerate(re.findall(r"(\d)-shot", header))
    ]
    assert printed.columns == tuple(columns)


def test_tables_are_numbered_in_the_papers_order() -> None:
    labels = re.findall(r"\\label\{(.*?)\}", EXCERPT)
    assert {f"table-{number}": label for number, label in enumerate(labels, 1)} == {
        name: tables()[name].label for name in TABLES
    }


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not beside the repository")
def test_the_excerpt_captions_and_numbers_are_those_of_the_full_paper() -> None:
    paper = PAPER.read_text(encoding="utf-8")
    for name in TABLES:
        printed = tables()[name]
        caption, tabular = tex_table(paper, printed.label)
        kept, excerpt = tex_table(EXCERPT, printed.label)
        assert excerpt.split() == tabular.split()
        assert kept in ("", caption)
        words = plain(caption).replace(" ", "").replace("\\small", "")
        assert printed.caption.replace(" ", "") == words
    for kind, environment in (("table", "table"), ("figure", "(?:wrap)?figure")):
        pattern = rf"\\begin{{{environment}\*?}}(.*?)\\end{{{environment}\*?}}"
        blocks = re.findall(pattern, paper, re.DOTALL)
        captions = [part for block in blocks for part in block.split(r"\caption")[1:]]
        for number, caption in enumerate(captions, 1):
            name = f"{kind}-{number}"
            if name in tables():
                assert rf"\label{{{tables()[name].label}}}" in caption
