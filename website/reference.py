"""Generated parts of the documentation: contents, command line, Python API."""

import argparse
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sphinx.project import Project

import vsm
import vsm.memory
from vsm.cli.main import COMMANDS, open_command
from vsm.system.interruption import Interrupted

STUDIES = Path(__file__).resolve().parents[1] / "studies"
START, NOTES, RESULTS = "index", "design/README", "results"
SECTIONS = {
    "Begin": ["tutorial-practitioners", "tutorial-researchers", "memory"],
    "Your own data": ["classifier", "serving", "models", "data", "encoders", "export"],
    "Research": ["pretraining", "baselines", "studies", "reproduction", "scaling", "benchmarks"],
    "Findings": [RESULTS],
    "Reference": ["commands", "api", "equations", "threat-model", "faults", NOTES],
}
"""All pages in the order of the navigation; design notes and studies are listed by folder."""


WRAPPED = ("fget", "func", "__func__")  # of properties, cached properties and class methods


class PagesAndStudies(Project):
    """The pages of ``docs``, and as ``studies/NAME`` those beside the studies."""

    def discover(self, *arguments: Any) -> set[str]:
        """Find all pages; Sphinx itself looks into one folder only."""
        super().discover(*arguments)
        for path in sorted(STUDIES.glob("*.md")):
            name = f"studies/{path.stem}"
            self.docnames.add(name)
            self._path_to_docname[path] = name
            self._docname_to_path[name] = path
        return self.docnames


def contents(pages: list[str], option: str) -> str:
    """Return a hidden table of contents."""
    listed = "\n".join(f"/{page}" for page in pages)
    return f"```{{toctree}}\n:hidden:\n:titlesonly:\n{option}\n\n{listed}\n```\n"


# -------------------------------------------------------------------------------- command line


def command_reference() -> str:
    """Return the help of each command and subcommand."""
    lines = []
    os.environ["COLUMNS"] = "100"  # width of the help
    for name in COMMANDS:
        _, parser = open_command(name)
        lines += [f"## vsm {name}", "", *_help(parser)]
        for subcommand, subparser in subparsers(parser).items():
            lines += [f"### vsm {name} {subcommand}", "", *_help(subparser)]
    return "\n".join(lines)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of subcommands by name."""
    actions = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return {name: subparser for action in actions for name, subparser in action.choices.items()}


def _help(parser: argparse.ArgumentParser) -> list[str]:
    """Return the help of a parser as a block, with options as the pages write them."""
    _, _, text = parser.format_help().partition("\n\n")  # after the usage
    text = re.sub(r"--[\w.]+", lambda option: option[0].replace("_", "-"), text)
    return ["```text", text.replace("<class 'Path'>", "path").strip(), "```", ""]


# ---------------------------------------------------------------------------------- Python API


def api_reference() -> str:
    """Return autodoc directives for the public names and for the types they mention."""
    public = {getattr(vsm, name): f"vsm.{name}" for name in vsm.__all__}
    found = [*public, *vsm.VsmError.__subclasses__(), Interrupted]
    for what in found:  # grows while it is read
        found += sorted(_own_types(what).difference(found), key=lambda one: one.__name__)
    further = {f"{one.__module__}.{one.__name__}": one for one in found if one not in public}
    text = ["## Public names", ""]
    for what, path in public.items():
        text += _entry(path, what)
    text += ["## Further types", "", "Types that public names take, return and raise.", ""]
    for path in sorted(further):
        text += _entry(path, further[path])
    return "\n".join(text)


def _entry(path: str, what: Any) -> list[str]:
    directive = "autoclass" if inspect.isclass(what) else "autofunction"
    return [f"### {path}", "", "```{eval-rst}", f".. {directive}:: {path}", "```", ""]


def _own_types(what: Any) -> set[type]:
    """Return the types of this package in the annotations of a function or class."""
    annotated = [what]
    if inspect.isclass(what):
        members = [member for name, member in vars(what).items() if not name.startswith("_")]
        wrapped = [(one, *(getattr(one, n, None) for n in WRAPPED)) for one in members]
        functions = [one for each in wrapped for one in each if inspect.isfunction(one)]
        annotated += [what.__init__, *functions]
    hints = [hint for one in annotated for hint in _type_hints(one)]
    types = {part for hint in hints for part in _parts(hint) if inspect.isclass(part)}
    return {one for one in types if one.__module__.split(".")[0] == "vsm"}


def _type_hints(what: Any) -> list[Any]:
    try:
        return list(get_type_hints(what).values())
    except NameError:  # imported for type checkers only
        public = {name: getattr(vsm, name) for name in vsm.__all__}
        return list(get_type_hints(what, localns=vars(vsm.memory) | public).values())


def _parts(hint: Any) -> Iterator[Any]:
    """Yield an annotation and all annotations within it."""
    yield hint
    for part in hint if isinstance(hint, list) else get_args(hint):
        yield from _parts(part)
