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
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"])

CODE = re.compile(r"`(vsm(?:\.\w+)+)`")
TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")
SETTING = re.compile(
    r"`(model|memory|mann|kanerva|sampling|objective|optimizer|rotation|validation)"
    r"\.(\w+)(?:: (\S+))?`"
)
FILE_ENDINGS = {"py", "safetensors"}


def equation_rows() -> list[tuple[int, str]]:
    """Return the number and the whole text of every row of the table."""
    rows = re.findall(r"^\| *(\d+) *\|(.*)$", EQUATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    return [(int(number), text) for number, text in rows]


@cache
def functions_of(path: str) -> set[str]:
    """Return the names of all functions of a test file, or none if there is no such file."""
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_equation_of_the_paper_is_listed_exactly_once_and_in_order() -> None:
    assert [number for number, _ in equation_rows()] == list(range(1, 15))


def test_every_equation_names_its_code_and_a_test() -> None:
    for number, text in equation_rows():
        assert CODE.search(text), f"docs/equations.md: Eq. {number} names no `vsm.…` code"
        assert TEST.search(text), f"docs/equations.md: Eq. {number} names no `tests/…::…` test"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_all_code_that_a_page_names_exists(page: Path) -> None:
    for name in CODE.findall(page.read_text(encoding="utf-8")):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError) as error:
            pytest.fail(f"{page_name(page)} names `{name}`, which does not exist: {error}")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_all_tests_that_a_page_names_exist(page: Path) -> None:
    for path, function in TEST.findall(page.read_text(encoding="utf-8")):
        assert function in functions_of(path), (
            f"{page_name(page)} names `{path}::{function}`, which does not exist"
        )


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


def test_notes_are_numbered_without_gaps_and_titled_by_their_number() -> None:
    notes = sorted(path for path in NOTES.glob("*.md") if path.name != "README.md")
    assert [path.name[:5] for path in notes] == [f"{i:04}-" for i in range(1, len(notes) + 1)]
    for path in notes:
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        assert first_line.startswith(f"# {path.name[:4]}. "), f"{path.name} begins {first_line!r}"


def test_the_index_lists_every_note_once_and_in_order() -> None:
    index = (NOTES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(\d{4})\]\((\1-[\w-]+\.md)\): \S", index, re.MULTILINE)
    notes = sorted(path.name for path in NOTES.glob("*.md") if path.name != "README.md")
    assert [file for _, file in listed] == notes


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page_name(page)} links to {target}"
