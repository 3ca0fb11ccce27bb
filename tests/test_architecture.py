"""The architecture, as it can be checked: who imports whom, and how large things are."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "vsm"
MOST_TOP_MODULES, MOST_LINES = 9, 60

BASE = {"settings", "errors", "seeding"}
ALLOWED = {
    "system": "",
    "data": "system",
    "encoders": "system data",
    "nn": "system",
    "memory": "nn system encoders",
    "model": "nn system encoders memory",
    "baselines": "nn",
    "evaluation": "system data encoders nn memory model",
    "learning": "system data encoders memory model evaluation",
    "runs": "system encoders baselines data memory model evaluation learning",
    "pretraining": "system encoders data model evaluation runs",
    "training": "system data encoders nn memory model evaluation learning runs",
    "classify": "system data encoders nn memory model evaluation learning runs",
    "stores": "system encoders memory",
    "export": "system nn memory runs",
    "serve": "system data memory runs classify stores",
    "cli": "system data encoders baselines memory learning runs pretraining training classify"
    " export stores serve",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "seeding": set(),
    "settings": {"errors"},
    **{name: BASE | set(others.split()) for name, others in ALLOWED.items()},
    "__main__": {"cli"},
}
"""Each package or module directly under vsm, and the others that it may import.

``vsm/__init__.py`` offers the public names of all of them and may import anything.
"""
CONVENIENCES = {("vsm.runs.trained_model", "vsm.classify")}
"""Methods that return an object of a higher package, which they import when called."""
MEMORY_KINDS = {"Memory", "ClassMemory", "SlotMemory", "GaussianMemory", "KanervaMemory"}
WITHOUT_TORCH = [
    "vsm.runs.configuration",
    "vsm.runs.directory",
    "vsm.settings",
    "vsm.cli.main",
    "vsm.cli.serve",
]


def modules() -> dict[str, Path]:
    """Return every module of the package by its full name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("vsm", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), path.name)


def imported(name: str, path: Path) -> Iterator[str]:
    """Yield what a module imports of vsm, wherever the import stands in it."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*origin, *filter(None, [node.module])])
            # A name of vsm itself is a module, or a public name that belongs to some other package.
            inside = [alias.name for alias in node.names if alias.name != "__version__"]
            found = [f"vsm.{one}" for one in inside] if source == "vsm" else [source]
        else:
            continue
        yield from (one for one in found if one.split(".")[0] == "vsm")


def layer(name: str) -> str:
    """Return the package or module directly under vsm that a module belongs to."""
    return name.removeprefix("vsm").removeprefix(".").split(".")[0]


SOMEWHERE = """
from typing import TYPE_CHECKING
import os, vsm.cli.output
from vsm import __version__, FewShotClassifier, training
from vsm.errors import VsmError
from . import sibling
from .. import settings
from ..data import catalog
if TYPE_CHECKING:
    from vsm.model import FewShotModel
def use():
    from vsm.runs.directory import RunDirectory
"""


@pytest.mark.parametrize(("file", "above"), [("a.py", "vsm"), ("__init__.py", "vsm.nn")])
def test_imports_are_found_wherever_they_stand(file: str, above: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text(SOMEWHERE)
    name = f"{above}.x" if file == "__init__.py" else f"{above}.x.a"
    public = {"vsm.FewShotClassifier", "vsm.training"}
    written = {"vsm.cli.output", "vsm.errors", "vsm.model", "vsm.runs.directory"}
    outside = {"vsm.settings"} if above == "vsm" else {above}
    relative = {f"{above}.x", f"{above}.data"} | outside
    assert set(imported(name, path)) == public | written | relative


def test_every_module_imports_only_what_its_package_may() -> None:
    wrong = []
    for name, path in modules().items():
        own = layer(name)
        if own not in MAY_IMPORT:  # vsm/__init__.py, and what the next test complains of
            continue
        wrong += [
            f"{name} imports {other}, which {own} may not"
            for other in dict.fromkeys(imported(name, path))
            if layer(other) not in MAY_IMPORT[own] | {own} and (name, other) not in CONVENIENCES
        ]
    assert not wrong, "\n".join(["imports against the architecture:", *wrong])


def test_the_product_never_imports_the_lab() -> None:
    found = [
        f"{path}: {line.strip()}"
        for path in modules().values()
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.split()[:1] in (["import"], ["from"]) and "vsm_lab" in line.split()[1]
    ]
    assert found == []


def test_only_the_memory_package_asks_which_memory_it_has() -> None:
    found = []
    for name, path in modules().items():
        if layer(name) == "memory":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                kinds = {getattr(one, "id", "") for one in ast.walk(node.args[1])}
                if kinds & MEMORY_KINDS:
                    found.append(f"{name}, line {node.lineno}: isinstance of {kinds}")
    assert found == []


def test_nothing_is_allowed_that_is_not_used() -> None:
    used: dict[str, set[str]] = {}
    for name, path in modules().items():
        used.setdefault(layer(name), set()).update(map(layer, imported(name, path)))
    idle = {name: set(others.split()) - used[name] for name, others in ALLOWED.items()}
    assert {name: others for name, others in idle.items() if others} == {}


def test_the_architecture_names_every_package_and_no_other() -> None:
    present = {layer(name) for name in modules()} - {""}
    assert sorted(present - MAY_IMPORT.keys()) == [], "in src/vsm, but not in the architecture"
    assert sorted(MAY_IMPORT.keys() - present) == [], "in the architecture, but not in src/vsm"


def test_the_architecture_has_a_bottom_and_a_top() -> None:
    order = list(TopologicalSorter(MAY_IMPORT).static_order())  # raises CycleError
    assert set(order) == MAY_IMPORT.keys()
    assert order[-1] == "__main__"


def test_few_modules_lie_directly_in_the_package() -> None:
    top = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(top) <= MOST_TOP_MODULES, f"{len(top)} modules directly in src/vsm: {top}"


def test_no_function_is_long() -> None:
    long = []
    for name, path in modules().items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1  # without decorators
                if lines > MOST_LINES:
                    long.append(f"{name}.{node.name} has {lines} lines")
    assert not long, "\n".join([f"functions of more than {MOST_LINES} lines:", *long])


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_commands_need_before_they_run_does_without_torch(name: str) -> None:
    script = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0, f"import {name} imports torch"
