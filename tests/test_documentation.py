"""What the documentation names must exist: code, tests, settings and notes."""

import ast
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

from vsm.settings import PretrainSettings, RunSettings

ROOT = Path(__file__).parent.parent
EQUATIONS = ROOT / "docs" / "equations.md"
NOTES = ROOT / "docs" / "design"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"])

CODE = re.compile(r"`(vsm(?:\.\w+)+)`")
TEST = re.compile(r"`(test_\w+)`")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]+))?\)")
SETTING = re.compile(
    r"`(model|memory|mann|kanerva|sampling|objective|optimizer|distillation|validation)"
    r"\.(\w+)(?:: (\S+))?`"
)
GENERATED = [ROOT / "docs" / "commands.md", ROOT / "docs" / "api.md"]
"""Pages whose headings the site writes; tests/test_site.py follows links to them."""
FILE_ENDINGS = {"py", "safetensors"}


def equation_rows() -> list[tuple[int, str]]:
    """Return the number and the whole text of every row of the table."""
    rows = re.findall(r"^\| *(\d+) *\|(.*)$", EQUATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    return [(int(number), text) for number, text in rows]


@cache
def defined_tests() -> set[str]:
    """Return the names of all functions of the test files."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("tests/test_*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@cache
def anchors_of(page: Path) -> set[str]:
    """Return the anchors that a page's headings get, where it is hosted and on the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_equation_of_the_paper_is_listed_exactly_once_and_in_order() -> None:
    assert [number for number, _ in equation_rows()] == list(range(1, 15))


def test_every_equation_names_its_code_and_a_test() -> None:
    for number, text in equation_rows():
        assert CODE.search(text), f"docs/equations.md: Eq. {number} names no `vsm.…` code"
        assert TEST.search(text), f"docs/equations.md: Eq. {number} names no `test_…`"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_all_code_that_a_page_names_exists(page: Path) -> None:
    for name in CODE.findall(page.read_text(encoding="utf-8")):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError) as error:
            pytest.fail(f"{page_name(page)} names `{name}`, which does not exist: {error}")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_all_tests_that_a_page_names_exist(page: Path) -> None:
    for name in TEST.findall(page.read_text(encoding="utf-8")):
        assert name in defined_tests(), f"{page_name(page)} names `{name}`, which does not exist"


def hints_of(group: str) -> dict[str, object]:
    """Return the settings of a group, of training and of pre-training."""
    groups = [get_type_hints(kind).get(group) for kind in (RunSettings, PretrainSettings)]
    return {name: hint for kind in groups if kind for name, hint in get_type_hints(kind).items()}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_all_settings_that_a_page_names_exist_and_allow_the_values_it_gives(page: Path) -> None:
    for group, name, value in SETTING.findall(page.read_text(encoding="utf-8")):
        if name in FILE_ENDINGS:
            continue
        hints = hints_of(group)
        assert name in hints, f"{page_name(page)} names `{group}.{name}`, which is no setting"
        if value and get_origin(hints[name]) is Literal:
            assert yaml.safe_load(value) in get_args(hints[name]), (
                f"{page_name(page)} gives {group}.{name} the value {value}, which it does not allow"
            )


def test_the_index_lists_every_note_once_by_its_title() -> None:
    index = (NOTES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.+)\]\(([\w-]+\.md)\): \S", index, re.MULTILINE)
    notes = [path for path in NOTES.glob("*.md") if path.name != "README.md"]
    titles = {path.read_text(encoding="utf-8").splitlines()[0][2:]: path.name for path in notes}
    assert len(listed) == len(notes)
    assert dict(listed) == titles


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), f"{page_name(page)} links to {target}"
        if anchor and path not in GENERATED:
            assert anchor in anchors_of(path), f"{page_name(page)} links to {target}#{anchor}"
