"""A server that listens, and a Chromium that looks at it; drawing with its mouse."""

import math
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn

from serving import model
from vsm.serve.app import Service, create_app
from vsm.serve.middleware import Access
from vsm.serve.server import open_socket
from vsm.stores import open_store

pytest.importorskip(
    "playwright.sync_api", reason="the page is tested with playwright: pip install playwright"
)
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

__all__ = [
    "Browser",
    "Page",
    "Route",
    "expect",
]  # for tests, which cannot import them before that check

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
Points = Sequence[tuple[float, float]]
Strokes = Sequence[Points]


@contextmanager
def listening(store: Path, access: Access | None = None) -> Iterator[str]:
    """Serve on a free port, in a thread, and give the address."""
    service = Service(model(), open_store(str(store)))
    app = create_app(service, access)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on")
    server = uvicorn.Server(config)
    with open_socket("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, args=([socket],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium, never one that is downloaded."""
    if CHROMIUM is None:
        pytest.skip("the page is tested in Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """What a page said on its console, and whom it asked."""

    console: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Listen to a page."""

        def told(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.console.append(message.text)

        def asked(request: Request) -> None:
            if not request.url.startswith(("data:", "blob:")):
                self.asked.append(request.url)

        page.on("console", told)
        page.on("pageerror", lambda error: self.console.append(str(error)))
        page.on("request", asked)


def arc(
    middle: tuple[float, float], radius: float, begin: float, end: float
) -> list[tuple[float, float]]:
    """Return points on a part of a circle, whose angles are in degrees."""
    angles = [math.radians(begin + (end - begin) * n / 16) for n in range(17)]
    x, y = middle
    return [(x + radius * math.cos(one), y + radius * math.sin(one)) for one in angles]


RING: Strokes = [arc((0.5, 0.5), 0.32, 0, 360)]
GATE: Strokes = [[(0.22, 0.85), (0.22, 0.2), (0.78, 0.2), (0.78, 0.85)], [(0.22, 0.5), (0.78, 0.5)]]
RING_AGAIN: Strokes = [arc((0.45, 0.55), 0.25, 40, 390)]
GATE_AGAIN: Strokes = [
    [(0.3, 0.8), (0.28, 0.3), (0.7, 0.28), (0.72, 0.82)],
    [(0.29, 0.52), (0.7, 0.5)],
]


def draw(page: Page, pad: str, strokes: Strokes) -> None:
    """Draw with the mouse."""
    canvas = page.locator(pad)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return box["x"] + point[0] * box["width"], box["y"] + point[1] * box["height"]

    for stroke in strokes:
        page.mouse.move(*at(stroke[0]))
        page.mouse.down()
        for point in stroke[1:]:
            page.mouse.move(*at(point))
        page.mouse.up()
