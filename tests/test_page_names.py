"""Names that are markup, in a browser: pages of review and suggest, and reports, run none of it."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browsing import Page, Seen, chromium
from vsm.cli import main
from vsm_lab.document import Heading, Table, Text, to_html

NASTY = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
FILE = "<img src=x onerror=\"document.title='ran'\">.png"


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    """Write a page by every command that writes one, about images with such names."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(8):
        place = tmp_path / f"{number}" / FILE
        place.parent.mkdir()
        pixels = random.integers(0, 90, (28, 28)) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(place)
        if number:
            rows.append((f"{number}/{FILE}", NASTY if number % 2 else "plain"))
    table = tmp_path / "a.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    review, suggest, report = (
        tmp_path / f"{name}.html" for name in ("review", "suggest", "report")
    )
    words = ["--model", "glyphs-5w1s", "--output"]
    assert main(["review", str(table), *words, str(review)]) == 0
    unlabeled = ["--support", str(table), "--unlabeled", str(tmp_path / "0"), *words, str(suggest)]
    assert main(["suggest", *unlabeled]) == 0
    table_block = Table([NASTY, "b"], [[NASTY, "c"]])
    report.write_text(to_html(NASTY, [Heading(1, NASTY), Text(NASTY), table_block]))
    return [review, suggest, report]


def test_no_name_runs(pages: list[Path]) -> None:
    with chromium() as browser:
        for path in pages:
            page: Page = browser.new_page()
            seen = Seen()
            seen.watch(page)
            page.goto(path.as_uri())
            page.wait_for_timeout(200)
            assert page.title() != "ran"
            assert page.locator("script, img[src='x']").count() == 0
            assert "onerror" in page.locator("body").inner_text()  # it is shown as it is
            assert [one for one in seen.asked if one != path.as_uri()] == []
