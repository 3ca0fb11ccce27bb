"""Sphinx configuration of `make docs`; the pages are in ``docs``."""

import sys
from collections.abc import Callable
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # this checkout, whatever else is installed

import vsm  # noqa: E402
from website import reference  # noqa: E402

project = "VSM"
author = "The VSM developers"
copyright = author
release = vsm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**/figures"]
myst_heading_anchors = 3
smartquotes = False  # two dashes are an option, not a dash
highlight_language = "sh"  # a block without a language is for the shell
nitpicky = True  # unresolved names are warnings, which fail the build
nitpick_ignore_regex = [
    (r"py:.*", rf"{library}(\..*)?")
    for library in ("collections", "enum", "numpy", "pathlib", "PIL", "torch", "typing")
]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries = False  # headings are enough

html_theme = "furo"
html_title = f"VSM {release}"
html_copy_source = False
html_show_sphinx = False

GENERATED: dict[str, Callable[[], str]] = {
    "api": reference.api_reference,
    "commands": reference.command_reference,
    reference.START: lambda: "\n".join(
        reference.contents(pages, f":caption: {title}")
        for title, pages in reference.SECTIONS.items()
    ),
    reference.NOTES: lambda: reference.contents(["design/*"], ":glob:"),
    reference.RESULTS: lambda: reference.contents(["studies/*"], ":glob:"),
}
"""Text that the build appends to pages of ``docs``."""

HIDDEN_COLON = "\ue000"  # of the private use area


def add_generated(app: Sphinx, page: str, source: list[str]) -> None:
    """Append generated text to a page."""
    if page in GENERATED:
        source[0] = f"{source[0]}\n{GENERATED[page]()}\n"


def hide_colons(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Keep Napoleon from taking the words before a colon for a type; types are annotated."""
    prose = what in ("attribute", "property")
    for number, line in enumerate(lines):
        if what in ("function", "method") and line and not line.startswith(" "):
            prose = line in ("Returns:", "Yields:")
        if prose and line not in ("Returns:", "Yields:"):
            lines[number] = line.replace(":", HIDDEN_COLON)


def show_colons(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Restore hidden colons after Napoleon."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


def add_studies(app: Sphinx) -> None:
    """Make the pages beside the studies part of the site."""
    app.project.__class__ = reference.PagesAndStudies


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", add_studies)
    app.connect("source-read", add_generated)
    app.connect("autodoc-process-docstring", hide_colons, priority=100)
    app.connect("autodoc-process-docstring", show_colons, priority=900)
