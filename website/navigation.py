"""The order of the pages. Links within pages are plain Markdown, which also works elsewhere."""

START = "index"
NOTES = "design/README"

SECTIONS = {
    "Begin": ["tutorial-practitioners", "tutorial-researchers", "memory"],
    "Your own data": ["classifier", "serving", "models", "data", "encoders", "export"],
    "Research": ["pretraining", "baselines", "studies", "reproduction", "scaling", "benchmarks"],
    "Findings": ["results", "uncertainty", "smoke/report"],
    "Reference": ["commands", "api", "equations", "threat-model", "faults", NOTES],
}


def contents_of_the_site() -> str:
    """Return the tables of contents of the start page, which the navigation is made of."""
    return "\n".join(_contents(pages, f":caption: {title}") for title, pages in SECTIONS.items())


def contents_of_the_notes() -> str:
    """Return the table of contents of the design notes: all other pages of their folder."""
    return _contents(["design/*"], ":glob:")


def _contents(pages: list[str], option: str) -> str:
    listed = "\n".join(f"/{page}" for page in pages)
    return f"```{{toctree}}\n:hidden:\n:titlesonly:\n{option}\n\n{listed}\n```\n"
