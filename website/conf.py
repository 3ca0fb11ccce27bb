"""Settings of Sphinx. `make docs` reads them; the pages themselves are in ``docs``."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # this checkout, whatever else is installed

import vsm  # noqa: E402
from website.api import api_reference  # noqa: E402
from website.commands import command_reference  # noqa: E402
from website.navigation import (  # noqa: E402
    NOTES,
    START,
    contents_of_the_notes,
    contents_of_the_site,
)

project = "VSM"
author = "The VSM developers"
copyright = author
release = vsm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**/figures"]
myst_heading_anchors = 3
smartquotes = False  # two dashes are an option, not a dash
highlight_language = "sh"  # a block without a language is for the shell
nitpicky = True  # a name that leads nowhere is a warning, and `make docs` takes none
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

GENERATED = {
    "api": api_reference,
    "commands": command_reference,
    START: contents_of_the_site,
    NOTES: contents_of_the_notes,
}
"""What the build adds to pages of ``docs``; the rest of them is written there."""

HIDDEN_COLON = "\ue000"  # of the private use area


def add_generated(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to a page what no file of ``docs`` holds."""
    if page in GENERATED:
        source[0] = f"{source[0]}\n{GENERATED[page]()}\n"


def hide_colons(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Let settings and returned values be described in prose.

    Napoleon takes the words before a colon for a type there; ours are in annotations.
    """
    prose = what in ("attribute", "property")
    for number, line in enumerate(lines):
        if what in ("function", "method") and line and not line.startswith(" "):
            prose = line in ("Returns:", "Yields:")
        if prose and line not in ("Returns:", "Yields:"):
            lines[number] = line.replace(":", HIDDEN_COLON)


def show_colons(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Bring hidden colons back, after Napoleon."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_generated)
    app.connect("autodoc-process-docstring", hide_colons, priority=100)
    app.connect("autodoc-process-docstring", show_colons, priority=900)
