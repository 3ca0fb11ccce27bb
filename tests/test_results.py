"""Pages of studies are rendered from result files, and docs/results.md quotes nothing else."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vsm.cli import main

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "studies"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
MEASURED = sorted(path.parent.name for path in STUDIES.glob("*/results.json"))
LINK = re.compile(r"\]\(\.\./studies/([\w-]+)\.md\)")
ROWS = re.findall(
    r"^\| (.+?), (\d+)-way (\d+)-shot \| (.+) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.M
)
CLAIMS = re.findall(r"^(?:\d+\.|-) (.+(?:\n {2,3}.+)*)", PAGE, re.M)
"""The numbered findings, and the list of what did not work."""
FIGURE = re.compile(r"([+-]?\d+\.\d+ ± \d+\.\d+)(?: \((\d+\.\d+)\))?")
NO_MEMORY = ("same features, no memory", "VSM's features, no memory")
TABLES_OF_THE_PAPER = {"gaussian-cifar-fs": "table-2", "gaussian-omniglot": "table-7"}


@cache
def results_of(study: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((STUDIES / study / "results.json").read_text("utf-8"))
    return found


def shown(found: dict[str, Any], sign: str = "") -> str:
    return f"{100 * found['mean']:{sign}.2f} ± {100 * found['ci95']:.2f}"


def published(study: str, data: str, way: int, shot: int) -> str:
    if study not in TABLES_OF_THE_PAPER:
        return "–"
    tables = json.loads((ROOT / "src/vsm_lab/paper/paper.json").read_text("utf-8"))
    table = tables[TABLES_OF_THE_PAPER[study]]
    column = table["columns"].index({"data": data, "way": way, "shot": shot})
    [cells] = [row["cells"] for row in table["rows"] if row["name"] == "vsm"]
    mean, interval = map(float, cells[column].split(" ± "))
    return f"{mean:.2f} ± {interval:.2f}"


def test_pages_are_those_that_result_files_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MEASURED:
        (tmp_path / "studies" / name).mkdir(parents=True)
        for file in (f"{name}.yaml", f"{name}/results.json"):
            shutil.copy(STUDIES / file, tmp_path / "studies" / file)
    monkeypatch.chdir(tmp_path)
    assert main(["study", *(f"studies/{name}.yaml" for name in MEASURED), "--render"]) == 0
    for name in MEASURED:
        text = (tmp_path / "studies" / f"{name}.md").read_text("utf-8")
        assert text == (STUDIES / f"{name}.md").read_text("utf-8"), f"render {name} again"
        for chart in re.findall(r"\]\((.+\.svg)\)", text):
            assert (STUDIES / chart).is_file(), f"render {name} again"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:3]))
def test_every_row_of_the_table_is_that_of_a_result_file(row: tuple[str, ...]) -> None:
    link, way, shot, *figures = row
    [study] = LINK.findall(link)
    results = results_of(study)
    place = (int(way), int(shot))
    [found] = [c for c in results["conditions"] if (c["way"], c["shot"]) == place]
    [without] = [found["rows"][name] for name in NO_MEMORY if name in found["rows"]]
    [gain] = [found["differences"][name] for name in NO_MEMORY if name in found["rows"]]
    assert [figure.replace("−", "-") for figure in figures] == [
        shown(without),
        shown(found["rows"][results["study"]["reference"]]),
        f"{shown(gain, '+')} ({100 * gain['ci95_classes']:.2f})",
        published(study, results["study"]["data"], *place),
    ]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.split("**")[1])
def test_every_figure_of_a_claim_is_on_a_page_that_it_links_to(claim: str) -> None:
    text = " ".join(claim.replace("−", "-").split())
    pages = [(STUDIES / f"{name}.md").read_text("utf-8") for name in LINK.findall(text)]
    assert pages
    for figure, over_classes in FIGURE.findall(text):
        cells = f"| {figure} | {over_classes} |" if over_classes else f"| {figure} |"
        assert any(cells in page for page in pages), cells
    assert not re.search(r"\d\.\d", FIGURE.sub("", LINK.sub("", text))), "a figure of no study"


def test_the_page_is_short_and_leads_to_every_study() -> None:
    assert len(PAGE.split()) <= 900
    assert len(ROWS) == PAGE.count("-way ") - sum(claim.count("-way ") for claim in CLAIMS)
    assert set(LINK.findall(PAGE)) == {path.stem for path in STUDIES.glob("*.md")}
    assert len([claim for claim in CLAIMS if FIGURE.search(claim)]) >= 12
