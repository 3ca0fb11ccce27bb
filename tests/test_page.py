"""The page, in a real Chromium against a server that listens."""

import io
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx2
import pytest
from PIL import Image, ImageDraw

from browsing import (
    GATE,
    GATE_AGAIN,
    RING,
    RING_AGAIN,
    Browser,
    Page,
    Route,
    Seen,
    Strokes,
    chromium,
    draw,
    expect,
    listening,
)
from serving import LABELS, drawing, parts
from vsm.serve.middleware import Access

WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
TOKEN = "a-token-of-the-tests-0123456789"
NASTY = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


expect.set_options(timeout=20_000)  # browser, server and other tests may share two cores


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with listening(tmp_path_factory.mktemp("page") / "store.sqlite") as address:
        yield address


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Browser, shared: str, seen: Seen) -> Iterator[Page]:
    """An open page with a task of its own; what it says and asks is checked at the end."""
    context = browser.new_context(viewport=WIDE, reduced_motion="reduce")  # type: ignore[arg-type]
    found = context.new_page()
    found.set_default_timeout(10_000)
    seen.watch(found)
    found.goto(shared)
    ready(found)
    new_task(found, "of a test")
    yield found
    context.close()
    assert seen.console == []
    assert {address.split("/v1/")[0].split("/page/")[0].rstrip("/") for address in seen.asked} == {
        shared
    }


def ready(page: Page) -> None:
    page.locator("body[data-ready]").wait_for()


def new_task(page: Page, name: str) -> None:
    before = page.url
    page.locator("#task-new").click()
    page.locator("#asked").fill(name)
    page.keyboard.press("Enter")
    expect(page).not_to_have_url(before)
    expect(page.locator("#task option:checked")).to_have_text(f"{name} (0 classes)")


def teach(page: Page, name: str, strokes: Strokes) -> None:
    draw(page, "#teach-pad", strokes)
    page.locator("#teach-name").fill(name)
    page.locator("#teach-add").click()
    expect(page.locator("#teach-name")).to_have_value("")


def image(kind: str) -> bytes:
    image = Image.new("L", (96, 96), 255)
    pen = ImageDraw.Draw(image)
    if kind == "cross":
        pen.line((16, 16, 80, 80), 0, 7)
        pen.line((80, 16, 16, 80), 0, 7)
    else:
        pen.ellipse((16, 16, 80, 80), outline=0, width=7)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def files(*named: tuple[str, bytes]) -> list[dict[str, object]]:
    return [{"name": name, "mimeType": "image/png", "buffer": content} for name, content in named]


def add_images(page: Page, label: str, *named: tuple[str, bytes]) -> None:
    page.get_by_label("New class").get_by_role("textbox").fill(label)
    page.get_by_role("button", name="Add class").click()
    choose(page, f"Choose images of {label}", *named)


def choose(page: Page, label: str, *named: tuple[str, bytes]) -> None:
    page.get_by_label(label, exact=True).set_input_files(files(*named))  # type: ignore[arg-type]


def answering(page: Page, pattern: str, **changes: object) -> None:
    """Let the server's JSON for some addresses be changed before the page sees it."""

    def change(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=json.dumps(answer.json() | changes))

    page.route(pattern, change)


def answered(label: str | None, **chances: float) -> list[dict[str, object]]:
    """Return what the server answers for one image."""
    others = [{"label": one, "probability": p} for one, p in chances.items() if one != label]
    probability = None if label is None else chances[label]
    told = {"file": "a", "label": label, "probability": probability}
    return [{**told, "alternatives": others, "recalled": []}]


def test_two_drawn_characters_are_told_apart_and_are_still_there_after_a_reload(
    page: Page,
) -> None:
    teach(page, "ring", RING)
    teach(page, "gate", GATE)
    expect(page.locator("#classes .class")).to_have_count(2)
    draw(page, "#ask-pad", RING_AGAIN)
    verdict = page.locator("#ask-answer .verdict strong")
    expect(verdict).to_have_text("ring")
    expect(page.locator("#ask-answer .bar:not(.nothing)")).to_have_count(2)
    expect(page.locator("#ask-answer .bar.nothing")).to_contain_text("none of these")
    expect(page.locator("#recalled .tile img")).to_have_count(5)  # drawn, as these are glyphs
    page.locator("#ask-clear").click()
    draw(page, "#ask-pad", GATE_AGAIN)
    expect(verdict).to_have_text("gate")
    page.locator("#ask-explain").click()
    told = page.get_by_role("dialog")
    expect(told).to_contain_text("Why gate?")
    expect(told).to_contain_text("more examples could remove")
    expect(told).to_contain_text("The memory moved gate by")
    page.keyboard.press("Escape")
    expect(page.locator("#task-map .prototype")).to_have_count(2)
    before = page.locator("#task-map .prototype").first.locator("..").get_attribute("transform")
    teach(page, "ring", RING_AGAIN)
    expect(page.locator("#task-map .ring")).to_have_count(3)
    moved = page.locator("#task-map .prototype").first.locator("..").get_attribute("transform")
    assert moved != before
    page.reload()
    ready(page)
    expect(page.locator("#task option:checked")).to_have_text("of a test (2 classes)")
    expect(page.locator("#classes .class .name")).to_have_text(["ring", "gate"])
    expect(page.locator("#classes .example img[src^='blob:']")).to_have_count(3)


def test_one_class_alone_says_that_it_gets_everything(page: Page) -> None:
    teach(page, "ring", RING)
    draw(page, "#ask-pad", RING_AGAIN)
    note = page.get_by_text("One class alone always gets 100%. Add a second.").first
    expect(note).to_be_visible()
    teach(page, "gate", GATE)
    expect(page.locator("#ask-answer .bar:not(.nothing)")).to_have_count(2)
    expect(note).to_be_hidden()
    page.locator("#ask-clear").click()
    expect(page.locator("#ask-answer .verdict")).to_have_text("Draw to ask.")


@pytest.mark.parametrize(
    ("chances", "shown"),
    [
        ((1.0, 1e-9), (">99%", "<1%")),  # which single precision rounds to 1
        ((0.995, 0.005), (">99%", "1%")),
        ((0.94, 0.06), ("94%", "6%")),
        ((1.0, 0.0), ("100%", "0%")),
    ],
)
def test_chances_are_rounded_to_certainty_only_if_they_are(
    page: Page, chances: tuple[float, float], shown: tuple[str, str]
) -> None:
    teach(page, "ring", RING)
    teach(page, "gate", GATE)
    ring, gate = chances
    answering(page, "**/classify", answers=answered("ring", ring=ring, gate=gate))
    draw(page, "#ask-pad", RING_AGAIN)
    bars = page.locator("#ask-answer .bar:not(.nothing) > span:last-child")
    expect(bars).to_have_text(list(shown))
    expect(page.locator("#ask-answer .verdict span")).to_have_text(shown[0])


def test_none_of_these_is_said_once_and_why_it_cannot_be_said(page: Page) -> None:
    page.locator("#tab-photos").click()
    for label in ("cross", "circle"):
        add_images(page, label, (f"{label}.png", image(label)))
        expect(page.locator(f".column[data-label={label}] .example")).to_have_count(1)
    answering(page, "**/classify", answers=answered(None, cross=0.7, circle=0.3))
    choose(page, "Choose images to classify", ("one.png", image("circle")))
    card = page.locator(".query")
    expect(card.locator(".bar.nothing")).to_have_text("too far from all classes")
    assert card.inner_text().lower().count("none of these") == 1
    slider = page.get_by_role("slider", name="answer about 90% of your classes’ images")
    expect(slider).to_be_visible()
    slider.press("ArrowRight")
    expect(page.locator("#photos-coverage span")).to_contain_text("about 91%")
    page.locator("#photos-coverage input[type=checkbox]").uncheck()
    expect(page.locator("#photos-coverage span")).to_have_text("off: answer every image")
    answering(page, "**/v1/model", can_reject=False)
    page.reload()
    ready(page)
    told = page.locator("#photos-coverage").get_by_text("was forgotten, or the model has no")
    expect(told).to_be_visible()
    expect(page.get_by_role("slider")).to_be_hidden()


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_names_of_some_words_are_shown_whole(page: Page, size: dict[str, int]) -> None:
    page.set_viewport_size(size)  # type: ignore[arg-type]
    teach(page, "my ring with a long name", RING)
    teach(page, "my gate with a name of its own", GATE)
    draw(page, "#ask-pad", RING_AGAIN)
    is_whole = "one => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight"
    names = page.locator(".bar:not(.nothing) > span:first-child")
    expect(names).to_have_count(2)
    assert all(one.evaluate(is_whole) for one in names.all())
    page.locator("#tab-photos").click()
    choose(page, "Choose images to classify", ("one.png", image("circle")))
    names = page.locator(".query .bar:not(.nothing) > span:first-child")
    expect(names).to_have_count(2)
    assert all(one.evaluate(is_whole) for one in names.all())


def test_the_keyboard_alone_adds_a_class(page: Page) -> None:
    page.locator("#task-delete").focus()
    page.keyboard.press("Tab")
    expect(page.locator("#teach-pad")).to_be_focused()
    page.keyboard.press("Space")
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowDown")
    page.keyboard.press("Space")
    for _ in range(3):  # undo, clear, name
        page.keyboard.press("Tab")
    expect(page.locator("#teach-name")).to_be_focused()
    page.keyboard.type("corner")
    page.keyboard.press("Enter")
    expect(page.locator("#classes .class .name")).to_have_text(["corner"])
    page.locator("#tab-draw").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-photos")).to_be_focused()
    expect(page.locator("#columns .column .name")).to_have_text(["corner"])


def test_what_is_lacking_is_said_where_it_is_lacking(page: Page) -> None:
    page.locator("#teach-add").click()
    expect(page.locator("#teach-notice")).to_have_text("Draw the character first.")
    draw(page, "#teach-pad", RING)
    expect(page.locator("#teach-notice")).to_be_hidden()
    page.locator("#teach-add").click()
    expect(page.locator("#teach-notice")).to_have_text("Name the character first.")


def test_a_bad_file_is_named_where_it_was_dropped_and_the_others_are_added(
    page: Page, seen: Seen
) -> None:
    page.locator("#tab-photos").click()
    notes = ("notes.txt", b"these are no pixels")
    add_images(page, "cross", ("one.png", image("cross")), notes)
    add_images(page, "circle", ("two.png", image("circle")))
    column = page.locator(".column[data-label=cross]")
    expect(column.get_by_role("alert")).to_contain_text("notes.txt: unreadable or truncated image")
    expect(column.locator(".example")).to_have_count(1)
    expect(page.locator(".column[data-label=circle]").get_by_role("alert")).to_be_hidden()
    choose(page, "Choose images to classify", notes, ("three.png", image("circle")))
    expect(page.locator("#query-notice")).to_contain_text("notes.txt: unreadable")
    expect(page.locator(".query .verdict strong")).to_have_text(["circle"])
    page.get_by_label("Explain three.png").click()
    expect(page.get_by_role("dialog")).to_contain_text("What circle recalled from memory")
    page.keyboard.press("Escape")
    page.locator("#photos-coverage input[type=checkbox]").uncheck()
    expect(page.locator(".query .bar.nothing")).to_have_count(0)
    refused = [one for one in seen.console if "422" in one]
    # Chromium tells of every answer that is an error. A file may be asked about once more before
    # the first answer has named it.
    assert 2 <= len(refused) <= 3
    seen.console[:] = [one for one in seen.console if one not in refused]


@cache
def many() -> dict[str, bytes]:
    """Return images of the same few characters in turn."""
    return {f"{n}-{k}.png": drawing(n, k) for k in range(5, 12) for n in range(len(LABELS))}


def teach_characters(page: Page) -> None:
    """Add an example each of a few characters, and turn the coverage off."""
    page.locator("#tab-photos").click()
    for character, label in enumerate(LABELS):
        add_images(page, label, (f"{label}.png", drawing(character, 0)))
    expect(page.locator("#columns .example")).to_have_count(len(LABELS))
    page.get_by_role("checkbox", name="None of these").uncheck()


def ask_many(page: Page, first: int, last: int) -> None:
    choose(page, "Choose images to classify", *list(many().items())[first:last])


def expect_answers(page: Page, count: int, groups: int = 0) -> list[str]:
    """Expect what the server answers for the images alone, or dealt into groups; return it."""
    expect(page.locator(".query")).to_have_count(count)
    shown = page.locator(".query .file span").all_inner_texts()
    address = page.evaluate("`${location.origin}/v1/tasks/${location.hash.split('/')[1]}/classify`")
    found = {}
    for group in range(max(1, groups)):
        names = shown[group :: max(1, groups)]
        files = parts(*(many()[name] for name in names), names=names)
        data = {"transductive": "true"} if groups else {}
        for one in httpx2.post(address, files=files, data=data).json()["answers"]:
            chance = one["probability"]
            percent = ">99%" if chance >= 0.995 else f"{math.floor(100 * chance + 0.5)}%"
            found[one["file"]] = one["label"] + percent
    verdicts = [found[name] for name in shown]
    expect(page.locator(".query .verdict")).to_have_text(verdicts)
    return verdicts


def test_twenty_images_are_used_together_until_the_user_decides(page: Page) -> None:
    teach_characters(page)
    switch = page.get_by_role("checkbox", name="Use all images together")
    ask_many(page, 0, 19)
    alone = expect_answers(page, 19)
    expect(switch).not_to_be_checked()
    ask_many(page, 19, 20)
    assert expect_answers(page, 20, groups=1)[1:] != alone
    expect(switch).to_be_checked()
    page.get_by_label("Explain 0-5.png").click()
    told = page.get_by_role("dialog")
    expect(told).to_contain_text("Images used together")
    counts = re.findall(r"([\d.]+) as \w+", told.get_by_text("Counted: ").inner_text())
    assert len(counts) == len(LABELS)
    assert 10 < sum(map(float, counts)) <= 20
    page.keyboard.press("Escape")
    page.get_by_label("Remove 3-9.png").click()
    expect(switch).not_to_be_checked()
    assert expect_answers(page, 19) == alone
    switch.press("Space")
    assert expect_answers(page, 19, groups=1) != alone
    page.locator("#columns").get_by_label("Remove drum.png of drum").click()
    expect(page.locator("#columns .example")).to_have_count(3)
    expect_answers(page, 19, groups=1)
    page.locator("#toasts").get_by_role("button", name="Undo").click()
    expect(page.locator("#columns .example")).to_have_count(4)
    expect_answers(page, 19, groups=1)
    switch.press("Space")
    assert expect_answers(page, 19) == alone
    ask_many(page, 19, 28)
    expect_answers(page, 28)
    expect(switch).not_to_be_checked()
    page.get_by_label("Explain 0-5.png").click()
    expect(told).to_contain_text("Why")
    expect(told).not_to_contain_text("Images used together")


@pytest.mark.parametrize(
    "limits", [{"files": 8, "request_bytes": 10**8}, {"files": 64, "request_bytes": 12_000}]
)
def test_more_images_than_a_request_takes_are_used_in_groups(
    page: Page, limits: dict[str, int]
) -> None:
    answering(page, "**/v1/model", limits=limits)
    page.reload()
    ready(page)
    teach_characters(page)
    ask_many(page, 0, 20)
    expect_answers(page, 20, groups=3)
    switch = page.get_by_role("checkbox", name="Use all images together")
    expect(switch).to_have_accessible_description("in groups of 6 or 7")
    page.get_by_label("Explain 0-5.png").click()
    counted = page.get_by_role("dialog").get_by_text("Counted: ").inner_text()
    assert sum(map(float, re.findall(r"([\d.]+) as", counted))) <= 7
    page.keyboard.press("Escape")
    switch.uncheck()
    expect_answers(page, 20)
    expect(switch).to_have_accessible_description("")


def test_files_that_are_refused_are_not_counted_among_twenty(page: Page, seen: Seen) -> None:
    teach_characters(page)
    notes = ("notes.txt", b"these are no pixels")
    choose(page, "Choose images to classify", *list(many().items())[:19], notes)
    expect_answers(page, 19)
    expect(page.get_by_role("checkbox", name="Use all images together")).not_to_be_checked()
    expect(page.locator("#query-notice")).to_contain_text("notes.txt: unreadable")
    assert all("422" in one for one in seen.console)
    seen.console.clear()


def test_a_model_that_cannot_use_images_together_has_no_such_switch(page: Page) -> None:
    answering(page, "**/v1/model", can_use_together=False)
    page.reload()
    ready(page)
    teach_characters(page)
    expect(page.locator("#photos-together")).to_be_hidden()
    ask_many(page, 0, 20)
    expect_answers(page, 20)


def test_pasted_and_dropped_images_go_where_they_are_meant(page: Page) -> None:
    page.locator("#tab-photos").click()
    add_images(page, "cross", ("one.png", image("cross")))
    column = page.locator(".column[data-label=cross]")
    expect(column.locator(".example")).to_have_count(1)
    give = """async (element, {kind, content}) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(content)], `${kind}.png`, {type: "image/png"}));
        const given = {bubbles: true, cancelable: true};
        element.dispatchEvent(kind === "drop" ? new DragEvent(kind, {...given, dataTransfer: data})
            : new ClipboardEvent(kind, {...given, clipboardData: data}));
    }"""
    for count, kind in ((2, "drop"), (3, "paste")):
        column.evaluate(give, {"kind": kind, "content": list(image("circle"))})
        expect(column.locator(".example")).to_have_count(count)
    column.get_by_label("Remove paste.png of cross").click()
    expect(column.locator(".example")).to_have_count(2)
    page.locator("#toasts").get_by_role("button", name="Undo").click()
    expect(column.locator(".example")).to_have_count(3)


def test_names_are_text_whatever_they_hold(page: Page) -> None:
    new_task(page, NASTY)
    teach(page, NASTY, RING)
    teach(page, "<b>gate</b>", GATE)
    draw(page, "#ask-pad", RING_AGAIN)
    expect(page.locator("#ask-answer .verdict strong")).to_have_text(NASTY)
    page.locator("#ask-explain").click()
    expect(page.get_by_role("dialog")).to_contain_text(NASTY)
    page.keyboard.press("Escape")
    page.locator("#task-remember").click()
    expect(page.locator("#toasts")).to_contain_text(
        "2 classes added to the memory. Other tasks recall them now."
    )
    page.locator("#tab-photos").click()
    expect(page.locator("#columns .name").first).to_have_text(NASTY)
    choose(page, "Choose images to classify", ("<img src=x>.png", image("circle")))
    expect(page.locator(".query .file span")).to_have_text("<img src=x>.png")
    page.locator("#tab-memory").click()
    page.locator("#memory-search").fill("<script>")
    expect(page.locator("#memory-list .name")).to_have_text(
        ["script><img src=x onerror=\"document.title='ran'\">"]
    )
    page.locator("#memory-list .pick").click()
    expect(page.locator("#memory-detail h2")).to_have_text(NASTY)
    assert page.title() == "VSM"
    assert page.locator("main script, main b, main img[src='x']").count() == 0


def test_what_was_remembered_is_forgotten_unless_that_is_undone(page: Page) -> None:
    teach(page, "wheel", RING)
    page.locator("#task-remember").click()
    expect(page.locator("#task-remember")).to_have_text("Remembered")
    page.locator("#tab-memory").click()
    page.locator("#memory-search").fill("wheel")
    expect(page.locator("#memory-list .pick")).to_have_count(1)
    expect(page.locator("#memory-list .tag")).to_have_text(["added"])
    page.locator("#memory-list .pick").click()
    forget = page.locator("#memory-detail").get_by_role("button", name="Forget")
    deleted: list[str] = []
    page.on("request", lambda one: deleted.append(one.url) if one.method == "DELETE" else None)
    forget.click()
    going = page.locator("#toasts .toast", has_text="will be forgotten")
    going.get_by_role("button", name="Undo").click()
    expect(page.locator("#toasts")).to_contain_text("wheel is kept.")
    assert not deleted
    page.clock.install()
    forget.click()
    expect(going).to_be_visible()
    page.clock.fast_forward(8_000)
    expect(page.locator("#memory-list .blank")).to_be_visible()
    expect(page.locator("#toasts")).to_contain_text("wheel forgotten. Nothing of it is left.")
    assert len(deleted) == 1
    page.locator("#tab-draw").click()
    expect(page.locator("#task-remember")).to_have_text("Remember this task")


def test_a_class_that_leaves_something_behind_is_forgotten_in_plain_words(page: Page) -> None:
    page.locator("#tab-memory").click()
    page.locator("#memory-search").fill("alphabet03/character05")
    expect(page.locator("#memory-list .pick")).to_have_count(1)
    page.locator("#memory-list .pick").click()
    details = page.locator("#memory-detail")
    expect(details).to_be_visible()
    # Other tests use the memory, so that the server is not told.
    gone = {"name": "alphabet03/character05", "exact": False, "classes": 641}
    page.route(
        "**/v1/memory/alphabet03*",
        lambda route: (
            route.fulfill(json=gone) if route.request.method == "DELETE" else route.continue_()
        ),
    )
    page.clock.install()
    details.get_by_role("button", name="Forget").click()
    page.get_by_role("dialog").get_by_role("button", name="Forget").click()
    expect(page.locator("#toasts")).to_contain_text("will be forgotten")  # the delay has begun
    page.clock.fast_forward(8_000)
    expect(page.locator("#toasts")).to_have_text(
        "alphabet03/character05 forgotten. Some of what the model learned from it stays."
    )
    page.clock.fast_forward(7_000)
    expect(page.locator("#toasts .toast")).to_have_count(0)
    expect(details).to_be_visible()
    page.locator("#memory-search").fill("nothing is called this")
    page.clock.fast_forward(1_000)
    expect(page.locator("#memory-list .blank")).to_be_visible()
    expect(details).to_be_hidden()


def test_a_phone_shows_everything_without_scrolling_sideways(browser: Browser, shared: str) -> None:
    context = browser.new_context(
        viewport=PHONE,  # type: ignore[arg-type]
        has_touch=True,
        is_mobile=True,
    )
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.goto(shared)
    ready(page)
    new_task(page, "a rather long name of a task that is used on a phone")
    teach(page, "a-name-without-any-space-" * 5, RING)
    page.locator("#ask-pad").tap()  # a dot
    expect(page.locator("#ask-answer .bar:not(.nothing)")).to_have_count(1)
    expect(page.locator("#ask-answer .verdict strong")).to_have_text("None of these")
    for view in ("draw", "photos", "memory"):
        page.locator(f"#tab-{view}").click()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], view
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (light, dark) == ("rgb(245, 246, 248)", "rgb(15, 18, 24)")
    context.close()


def test_a_token_is_asked_for_and_kept_for_this_tab_only(browser: Browser, tmp_path: Path) -> None:
    with listening(tmp_path / "store.sqlite", Access(TOKEN)) as address:
        context = browser.new_context()
        # What the browser's own prompt would send with the page itself, but not its requests.
        bearer = {"authorization": f"Bearer {TOKEN}"}
        for pattern in (f"{address}/", f"{address}/page/*"):
            context.route(pattern, lambda route: route.continue_(headers=bearer))
        page = context.new_page()
        page.goto(address)
        for given in ("a wrong one", TOKEN):
            page.get_by_label("Token", exact=True).fill(given)
            page.keyboard.press("Enter")
        ready(page)
        expect(page.locator("#model")).to_contain_text("642 classes remembered")
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
        assert TOKEN not in page.url
        context.close()
        # With the browser's own prompt the page need not ask.
        known = browser.new_context(http_credentials={"username": "me", "password": TOKEN})
        page = known.new_page()
        page.goto(address)
        ready(page)
        assert page.get_by_role("dialog").count() == 0
        known.close()
