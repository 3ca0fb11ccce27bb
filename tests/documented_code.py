"""Every code block of the documentation, and how it is run.

A block of Python, or of commands for the shell (a block without a language is one), runs as it
stands, in the order of its page, in a folder of the page's own. A comment right before the block
can say otherwise:

    <!-- block: shrunk: why -->   trained for two steps on a few built-in images
    <!-- block: parsed: why -->   all arguments are checked and settings are built; no more
    <!-- block: file: name -->    written to that file, for the blocks after it
    <!-- block: output -->        what the block before it prints, but for the numbers
    <!-- block: shown: why -->    neither code nor output
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"\s*<!-- block: (\w+)(?:: (\S.*?))? -->\s*")
MARKS_OF = {
    "python": ("", "shrunk", "file"),
    "sh": ("", "shrunk", "parsed"),
    "yaml": ("file",),
    "text": ("output", "shown", "file"),
}
WITH_A_REASON = ("shrunk", "parsed", "file", "shown")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``mark`` is empty if it runs as it stands."""

    page: str
    line: int
    language: str
    mark: str
    reason: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Return the words of every command of a block for the shell."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def pages() -> list[Path]:
    """Return every page that people read."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(text: str, page: str) -> list[Block]:
    """Return the blocks of a page, or say which of them nothing would run."""
    found, mark, reason = [], "", ""
    for token in MarkdownIt("commonmark").parse(text):
        place = f"{page}:{token.map[0] + 1 if token.map else 0}"
        if token.type == "code_block":
            raise ValueError(f"{place}: indented code is not run; fence it with ```")
        if token.type == "fence":
            language = token.info.strip() or "sh"
            assert token.map is not None
            block = Block(page, token.map[0] + 1, language, mark, reason, token.content)
            _require_that_something_runs(block)
            found.append(block)
        marked = MARK.fullmatch(token.content) if token.type == "html_block" else None
        mark, reason = (marked[1], marked[2] or "") if marked else ("", "")
    return found


def _require_that_something_runs(block: Block) -> None:
    allowed = MARKS_OF.get(block.language)
    if allowed is None:
        raise ValueError(
            f"{block.place}: nothing runs a block of {block.language!r}; known: "
            f"{', '.join(MARKS_OF)}"
        )
    if block.mark not in allowed:
        raise ValueError(
            f"{block.place}: a block of {block.language} needs one of the marks "
            f"{', '.join(mark or '(none)' for mark in allowed)}, got {block.mark or '(none)'}"
        )
    if block.mark in WITH_A_REASON and not block.reason:
        raise ValueError(f"{block.place}: the mark {block.mark!r} lacks its reason")


def without_numbers(text: str) -> list[str]:
    """Return the words of a text, numbers and the lines of tables left out."""
    text = re.sub(r"[─-╿]+", " ", text)
    return re.sub(r"[+±-]?\d[\d.,:]*%?", " ", text).split()


def require_known_program(words: list[str], place: str) -> None:
    """Check a command that is not ours as far as it can be without running it."""
    program, *rest = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in rest), place
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert extras, place
        names = [name for listed in extras for name in listed.split(",")]
        assert all(re.search(rf"^{name} = \[", project, re.M) for name in names), place
    elif program.endswith("python") and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]), place
    elif program.endswith("python"):
        options = re.findall(r"\"(--[\w-]+)\"", (ROOT / rest[0]).read_text(encoding="utf-8"))
        assert {word for word in rest if word.startswith("--")} <= set(options), place
    else:
        raise ValueError(f"{place}: nothing knows how to check the program {program!r}")


def commands_of_ours(words: list[str]) -> Iterator[list[str]]:
    """Return the arguments of ``vsm`` in a command, also where torchrun starts it."""
    if words[0] == "vsm":
        yield words[1:]
    elif words[0] == "torchrun":
        yield words[words.index("vsm") + 1 :]
