"""The screenshots of the server's page: python -m website.screenshots [FOLDER].

What is drawn and dropped is what the tests of the page draw, and characters of ``glyphs``.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browsing import (  # noqa: E402 - found by the line above
    GATE,
    GATE_AGAIN,
    RING,
    Page,
    Strokes,
    arc,
    chromium,
    draw,
    listening,
)
from serving import drawing  # noqa: E402
from test_page import PHONE, WIDE, add_images, choose, new_task, ready, teach  # noqa: E402

CHARACTERS: dict[str, Strokes] = {
    "ring": RING,
    "gate": GATE,
    "wave": [arc((0.32, 0.5), 0.16, 180, 360), arc((0.66, 0.5), 0.16, 180, 0)],
    "fork": [[(0.5, 0.85), (0.5, 0.5), (0.25, 0.2)], [(0.5, 0.5), (0.75, 0.2)]],
    "hook": [[(0.6, 0.15), (0.6, 0.6)], arc((0.45, 0.6), 0.15, 0, 180)],
}
GLYPHS = {"alder": 0, "birch": 7, "cedar": 14}


def write_screenshots(folder: Path) -> None:
    """Draw, ask, drop and remember, and write an image of each."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        chromium() as browser,
        listening(Path(scratch) / "store.sqlite") as address,
    ):
        page = browser.new_page(viewport=WIDE, reduced_motion="reduce")  # type: ignore[arg-type]
        page.goto(address)
        ready(page)
        new_task(page, "five characters")
        for name, strokes in CHARACTERS.items():
            teach(page, name, strokes)
        draw(page, "#ask-pad", GATE_AGAIN)
        page.locator("#ask-answer .bar").nth(4).wait_for()
        _write(page, folder / "page-draw.png")
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        page.locator("#ask-answer").scroll_into_view_if_needed()
        _write(page, folder / "page-phone.png", full=False)
        page.set_viewport_size(WIDE)  # type: ignore[arg-type]
        page.locator("#task-remember").click()
        page.locator("#tab-memory").click()
        _write(page, folder / "page-memory.png", full=False)
        page.locator("#toasts > *").first.wait_for(state="detached")
        page.locator("#tab-photos").click()
        new_task(page, "three trees")
        for name, character in GLYPHS.items():
            add_images(page, name, *((f"{name}-{n}.png", drawing(character, n)) for n in range(3)))
        asked = ((f"{name}.png", drawing(character, 5)) for name, character in GLYPHS.items())
        choose(page, "Choose images to classify", *asked)
        page.locator(".query").nth(2).wait_for()
        _write(page, folder / "page-photos.png")


def _write(page: Page, path: Path, full: bool = True) -> None:
    page.wait_for_timeout(1500)  # answers, thumbnails and the map come after each other
    page.screenshot(path=path, full_page=full)


if __name__ == "__main__":
    write_screenshots(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
