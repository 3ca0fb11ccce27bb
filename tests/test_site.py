"""`make docs` builds a whole site: nothing is missing, nothing is fetched, nothing is stale."""

import argparse
import contextlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import vsm
from forked import ForkedPython
from launching_helpers import finish
from vsm.cli.main import COMMANDS, open_command
from vsm_lab import episode_plots
from website import plots
from website.reference import NOTES, RESULTS, SECTIONS, START, subparsers

ROOT = Path(__file__).parents[1]
LOADED = {  # what a browser fetches by itself, and where it says so
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
    "embed": "src",
}
LINKS_THAT_LOAD = ("stylesheet", "icon", "preload", "prefetch", "preconnect", "manifest")


class Page(HTMLParser):
    """What a page of the site refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named["id"]} if "id" in named else set()
        if tag in LOADED and LOADED[tag] in named:
            self.loaded.append(named[LOADED[tag]])
        if tag == "link" and set(named.get("rel", "").split()) & set(LINKS_THAT_LOAD):
            self.loaded.append(named["href"])
        if tag == "a" and "href" in named:
            self.links.append(named["href"])

    def target(self, link: str) -> Path:
        path = unquote(urlsplit(link).path)
        return (self.path.parent / path).resolve() if path else self.path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as the Makefile does, in another folder."""
    recipe = re.search(r"-m (sphinx .*) docs site$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe
    folder = tmp_path_factory.mktemp("site")
    words = recipe[1].replace("site/.doctrees", str(folder / ".doctrees")).split()
    with contextlib.chdir(ROOT):
        [(code, said)] = finish([ForkedPython({}, "-m", *words, "docs", folder)])
    assert code == 0, said
    return folder


@pytest.fixture(scope="module")
def html(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_no_page_fetches_anything_from_elsewhere(site: Path, html: dict[Path, Page]) -> None:
    for page in html.values():
        for address in page.loaded:
            assert not urlsplit(address).netloc, f"{page.path} loads {address}"
            assert urlsplit(address).scheme in ("", "data"), f"{page.path} loads {address}"
            assert address.startswith("data:") or page.target(address).is_file(), address
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", text), style


def test_every_link_within_the_site_leads_somewhere(html: dict[Path, Page]) -> None:
    for page in html.values():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = page.target(link)
            assert target.is_file(), f"{page.path} links to {link}"
            if parts.fragment and target in html:
                anchors = html[target].anchors
                assert unquote(parts.fragment) in anchors, f"{page.path} links to {link}"


def test_every_page_of_the_documentation_is_in_the_navigation(
    site: Path, html: dict[Path, Page]
) -> None:
    start = html[site / f"{START}.html"]
    linked = {start.target(link) for link in start.links}
    for source in (ROOT / "docs").rglob("*.md"):
        page = site / source.relative_to(ROOT / "docs").with_suffix(".html")
        if source.parent.name == "design" and source.name != "README.md":
            assert page in {
                html[site / f"{NOTES}.html"].target(link)
                for link in html[site / f"{NOTES}.html"].links
            }
        else:
            assert page in linked, f"{page} is missing from the navigation"
    summary = html[site / f"{RESULTS}.html"]
    linked = {summary.target(link) for link in summary.links}
    for source in (ROOT / "studies").glob("*.md"):
        assert site / "studies" / f"{source.stem}.html" in linked, f"{source} is missing"
    listed = [page for pages in SECTIONS.values() for page in pages]
    assert len(listed) == len(set(listed))


def test_the_reference_of_commands_knows_every_argument(site: Path) -> None:
    text = (site / "commands.html").read_text(encoding="utf-8")
    for name in COMMANDS:
        for title, parser in _parsers(name):
            assert f">{title}<" in text, title
            for action in parser._actions:
                for option in action.option_strings[-1:]:
                    written = option.replace("_", "-")
                    assert written in text or action.dest == "help", f"{title} {option}"


def _parsers(name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    _, parser = open_command(name)
    yield f"vsm {name}", parser
    for subcommand, subparser in subparsers(parser).items():
        yield f"vsm {name} {subcommand}", subparser


def test_the_reference_of_python_knows_every_public_name(
    html: dict[Path, Page],
) -> None:
    [page] = [page for path, page in html.items() if path.name == "api.html"]
    assert {f"vsm.{name}" for name in vsm.__all__} <= page.anchors
    expected = {"vsm.FewShotClassifier.partial_fit", "vsm.settings.MemorySettings.retention"}
    assert expected <= page.anchors


def test_settings_are_described_in_prose(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api.html").read_text(encoding="utf-8"))
    assert "Feature extractor: conv4, resnet12, wrn28_10, or your own" in text


@pytest.mark.usefixtures("all_glyphs")
def test_the_plots_of_the_memory_can_be_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_plots, "SIZES_SHOWN", (0,))
    monkeypatch.setattr(plots, "EPISODES", 2)
    plots.main(tmp_path)
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\]\(images/(memory-.*?\.png)\)", page))
    assert {path.name for path in tmp_path.iterdir()} == shown
    assert all((plots.FOLDER / name).is_file() for name in shown)
