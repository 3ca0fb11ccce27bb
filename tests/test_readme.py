"""README is short, and every figure of its table comes from a result file."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?), (\d+)-way (\d+)-shot \| (.+) \| (.+) \| (.+) \|$", README, re.M)
STUDIES = {
    "Caltech-101, EfficientNet-Lite0": "photos",
    "CIFAR-FS, Conv4-64": "gaussian-cifar-fs",
    "Omniglot, Conv4-64": "gaussian-omniglot",
}
"""Which study of `studies` measured the rows of the table."""
TABLES_OF_THE_PAPER = {"CIFAR-FS, Conv4-64": "table-2", "Omniglot, Conv4-64": "table-7"}


def measured(study: str, way: int, shot: int, row: str) -> str:
    results = json.loads((ROOT / "studies" / study / "results.json").read_text(encoding="utf-8"))
    [found] = [c for c in results["conditions"] if (c["way"], c["shot"]) == (way, shot)]
    return f"{100 * found['rows'][row]['mean']:.1f} ± {100 * found['rows'][row]['ci95']:.1f}"


def published(table: str | None, way: int, shot: int, data: str) -> str:
    if table is None:
        return "–"
    paper = json.loads((ROOT / "src/vsm_lab/paper/paper.json").read_text(encoding="utf-8"))[table]
    column = paper["columns"].index({"data": data, "way": way, "shot": shot})
    [row] = [row for row in paper["rows"] if row["name"] == "vsm"]
    mean, interval = row["cells"][column].split(" ± ")
    return f"{float(mean):.1f} ± {float(interval):.1f}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:3]))
def test_every_figure_of_the_table_is_that_of_a_result_file(row: tuple[str, ...]) -> None:
    name, way, shot, *figures = row
    data = name.split(",")[0].lower()
    place = (int(way), int(shot))
    assert figures == [
        measured(STUDIES[name], *place, "same features, no memory"),
        measured(STUDIES[name], *place, "Gaussian memory"),
        published(TABLES_OF_THE_PAPER.get(name), *place, data),
    ]


def test_the_table_has_rows_and_the_page_is_short() -> None:
    assert len(ROWS) == README.count("-way")
    assert len(README.split()) <= 450
