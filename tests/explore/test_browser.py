"""The page of the explorer in a real browser: pointer, keyboard, sliders, uploads, comparison, phone, and offline as a file."""

import base64
import re
import shutil

import numpy as np
import pytest

from tests.explore.models import CLASSES, explored
from tests.explore.test_collection import collect
from tests.images import make_folder
from tests.web.client import HTML, encoded
from vitrail.explore import static_page
from vitrail.explore.explorer import Explorer
from vitrail.explore.routes import make_routes
from vitrail.explore.static_page import write_static_page
from vitrail.web.server import make_app, running_server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images") / "photos", CLASSES, 4, (48, 48))


@pytest.fixture(scope="module")
def pair(folder):
    models = [explored(title="first"), explored(title="second", seed=1, depth=2, pooling="mean", class_token_at=0)]
    return Explorer(models, collect(folder, *models))


@pytest.fixture(scope="module")
def address(pair):
    with running_server(make_app(make_routes(pair, "first and second"))) as address:
        yield address


@pytest.fixture
def open_page(browser):
    """Open a page and fail on anything in its console; waits until every panel has a map."""
    contexts, problems = [], []

    def open_page(address, **options):
        context = browser.new_context(viewport=options.pop("viewport", {"width": 1200, "height": 900}), **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("requestfailed", lambda request: problems.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    expected = "status of 415"  # the browser reports a refused upload, too
    assert [problem for problem in problems if expected not in problem] == []


def caption(page, words, panel=0):
    """Wait until the caption of a panel contains the words."""
    found = page.locator(".panel .caption").nth(panel)
    playwright.expect(found).to_contain_text(words)
    return found.inner_text()


def percent(value):
    return f"{100 * value:.{1 if value < 0.0995 else 0}f}%"


def place(values):
    row, column = divmod(int(np.argmax(values)), 4)
    return f"row {row + 1}, column {column + 1}"


def canvas(page, panel=0):
    return page.locator(".figure canvas").nth(panel)


def center_of(page, row, column, panel=0):
    """The center of a patch in the window."""
    box = canvas(page, panel).bounding_box()
    return box["x"] + box["width"] * (column - 0.5) / 4, box["y"] + box["height"] * (row - 0.5) / 4


def point_at(page, row, column, panel=0, press=False):
    place = center_of(page, row, column, panel)
    page.mouse.move(*place)
    if press:
        page.mouse.click(*place)


def slide(page, name, value, panel=0):
    page.locator(f".panel .{name} input").nth(panel).fill(str(value))


def test_pointing_at_a_patch_shows_what_it_attends_to_in_both_models(open_page, address, pair):
    page = open_page(address)
    caption(page, "row 3, column 3 attends")  # the middle
    canvas(page).scroll_into_view_if_needed()
    before = canvas(page, 1).evaluate("canvas => canvas.toDataURL()")
    point_at(page, 1, 4)
    text = caption(page, "the patch in row 1, column 4 attends most to")
    caption(page, "the patch in row 1, column 4 attends most to", panel=1)
    assert canvas(page, 1).evaluate("canvas => canvas.toDataURL()") != before
    maps, _ = pair.models[0].attention(pair.models[0].opened["c0"], 1, 3)
    mean = (maps.values / 255 * [[peak] for peak in maps.peaks]).mean(0)
    assert f"Block 2, mean of 2 heads: the patch in row 1, column 4 attends most to {place(mean)} (" in text
    point_at(page, 2, 2, press=True)  # keeps the patch
    caption(page, "row 2, column 2 attends")
    point_at(page, 4, 4)
    slide(page, "block", 0)
    caption(page, "Block 1, mean of 2 heads: the patch in row 2, column 2")
    caption(page, "Block 1, mean of 2 heads: the patch in row 2, column 2", panel=1)
    page.get_by_label("same map in both").uncheck()
    slide(page, "block", 2)
    caption(page, "Block 3, mean of 2 heads: the patch in row 2, column 2")
    caption(page, "Block 1, mean of 2 heads: the patch in row 2, column 2", panel=1)


def test_sliders_heads_class_token_and_methods(open_page, address):
    page = open_page(address)
    caption(page, "Block 2, mean of 2 heads")
    slide(page, "block", 2)
    slide(page, "head", 2)
    caption(page, "Block 3, head 2: the patch")
    for slider, text in (("block", "3"), ("head", "2 of 2")):  # for screen readers: their values are counted from 0
        playwright.expect(page.locator(f".panel .{slider} input").first).to_have_attribute("aria-valuetext", text)
    page.locator(".panel").first.get_by_label("Head 1").click()
    caption(page, "Block 3, head 1: the patch")
    page.locator(".panel").first.get_by_role("button", name="Class token").click()
    assert "% goes to the class token." in caption(page, "the class token attends most to")
    caption(page, "the patch in row 3", panel=1)  # this model has none
    before = canvas(page).evaluate("canvas => canvas.toDataURL()")
    page.locator(".panel").first.get_by_role("button", name="Rollout").click()
    caption(page, "Rollout: attention rollout")
    assert canvas(page).evaluate("canvas => canvas.toDataURL()") != before
    page.locator(".panel").first.get_by_role("button", name="Gradient × attention").click()
    predictions = page.locator(".panel").first.locator(".predictions button")
    last = re.match(r"\w+", predictions.last.inner_text())[0]
    predictions.last.press("Enter")
    caption(page, f"Gradient × attention for {last}")
    playwright.expect(predictions.last).to_be_focused()
    plain = canvas(page).evaluate("canvas => canvas.toDataURL()")
    slide(page, "strength", 0)
    playwright.expect(page.locator(".panel .strength output").first).to_have_text("0.0%")
    assert canvas(page).evaluate("canvas => canvas.toDataURL()") != plain


def test_a_slow_map_does_not_replace_what_was_chosen_after_it(open_page, address):
    page, held = open_page(address), []
    caption(page, "Block 2")
    page.route("**/api/map*", lambda route: held.append(route))
    slide(page, "head", 2)
    caption(page, "Block 2, head 2")
    panel = page.locator(".panel").first
    panel.get_by_role("button", name="Occlusion").click()
    while len(held) < 2:  # of both panels
        page.wait_for_timeout(20)
    panel.get_by_role("button", name="Attention of a patch").click()
    for route in held:
        route.continue_()
    slide(page, "block", 0)
    caption(page, "Block 1, head 2: the patch")
    playwright.expect(page.locator("#message")).to_be_hidden()


def test_keyboard_alone(open_page, address, pair):
    page = open_page(address)
    caption(page, "row 3, column 3 attends")
    for _ in ("Open image", "same map in both", "the image"):
        page.keyboard.press("Tab")
    playwright.expect(canvas(page)).to_be_focused()
    for key, words in [
        ("ArrowLeft", "row 3, column 2"),
        ("ArrowUp", "row 2, column 2"),
        ("ArrowRight", "row 2, column 3"),
        ("ArrowDown", "row 3, column 3"),
        ("PageUp", "Block 3, mean"),
        ("]", "Block 3, head 1"),
        ("Home", "the class token attends"),
        ("PageDown", "Block 2, head 1"),
    ]:
        page.keyboard.press(key)
        caption(page, words)
        playwright.expect(page.locator("#spoken")).to_contain_text(words)  # for screen readers
    assert "Arrow keys move the patch" in canvas(page).get_attribute("aria-label")
    page.keyboard.press("n")
    playwright.expect(page.locator("#current")).to_contain_text("blue/001.png")
    page.locator(".tile").nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#current")).to_contain_text("blue/002.png")
    for _ in range(5):
        page.keyboard.press("n")  # faster than the answers
    playwright.expect(page.locator("#current")).to_contain_text("green/003.png")
    model, opened = pair.open(0, "c7")
    maps, _ = model.attention(opened, 1, -1)
    caption(page, f"Block 2, head 1: the class token attends most to {place(maps.values[0])} ({percent(maps.peaks[0])})")
    for control in page.locator("button:visible, select:visible, input:visible, canvas[tabindex]:visible").all():
        named = control.evaluate("e => e.ariaLabel || e.textContent.trim() || (e.labels && e.labels.length)")
        assert named, control.evaluate("e => e.outerHTML")


def test_upload_and_hostile_upload(open_page, address):
    page = open_page(address)
    caption(page, "Block")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open image").click()
    chooser.value.set_files({"name": "my cat.jpg", "mimeType": "image/jpeg", "buffer": encoded((90, 60))})
    playwright.expect(page.locator("#current")).to_have_text("my cat.jpg")
    caption(page, "Block")
    page.locator("#file").set_input_files({"name": "page.jpg", "mimeType": "image/jpeg", "buffer": HTML})
    playwright.expect(page.locator("#message")).to_contain_text("page.jpg: not a JPEG")
    playwright.expect(page.locator("#current")).to_have_text("my cat.jpg")
    page.locator("#file").set_input_files(
        [{"name": f"{number}.png", "mimeType": "image/png", "buffer": encoded(format="PNG", seed=number)} for number in (1, 2)]
    )
    playwright.expect(page.locator("#current")).to_have_text("1.png")
    playwright.expect(page.locator("#message")).to_be_hidden()
    page.locator("#strip .tile").nth(2).click()
    playwright.expect(page.locator("#current")).to_have_text("my cat.jpg")


DISPATCH = """([kind, name, content]) => {
    const data = new DataTransfer(), options = { bubbles: true, cancelable: true };
    data.items.add(new File([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))], name, { type: "image/jpeg" }));
    const event = kind === "paste" ? new ClipboardEvent(kind, { ...options, clipboardData: data })
        : new DragEvent(kind, { ...options, dataTransfer: data });
    document.body.dispatchEvent(event);
    return event.defaultPrevented;
}"""


def test_drop_and_paste(open_page, address):
    page = open_page(address)
    caption(page, "Block")

    def dispatch(kind, name):
        return page.evaluate(DISPATCH, [kind, name, base64.b64encode(encoded((90, 60))).decode()])

    assert dispatch("dragover", "dropped.jpg")  # otherwise the browser opens the file instead of the page
    playwright.expect(page.locator("body")).to_have_class("dragging")
    assert dispatch("drop", "dropped.jpg")
    playwright.expect(page.locator("body")).not_to_have_class("dragging")
    playwright.expect(page.locator("#current")).to_have_text("dropped.jpg")
    caption(page, "Block 2, mean of 2 heads")
    dispatch("paste", "pasted.jpg")
    playwright.expect(page.locator("#current")).to_have_text("pasted.jpg")
    caption(page, "Block 2, mean of 2 heads")


def test_a_tap_selects_a_patch(open_page, address):
    page = open_page(address, viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    caption(page, "row 3, column 3 attends")
    canvas(page).scroll_into_view_if_needed()
    for row, column in ((1, 4), (4, 2)):
        page.touchscreen.tap(*center_of(page, row, column))
        for panel in (0, 1):
            caption(page, f"the patch in row {row}, column {column} attends most to", panel)


def test_errors_of_a_folder_and_the_map(open_page, address, pair):
    page = open_page(address)
    wrong = int(pair.collection.scans[0].wrong.sum())
    page.get_by_label("Show").select_option("wrong0")
    playwright.expect(page.locator("#count")).to_contain_text(f"{wrong} of 12 images")
    playwright.expect(page.locator("#grid .tile")).to_have_count(wrong)
    playwright.expect(page.locator("#grid .tile .label")).to_have_count(wrong)
    page.get_by_label("Show").select_option("")
    page.get_by_role("button", name="Map").click()
    playwright.expect(page.locator("#map figcaption")).to_contain_text("of their variance")
    points = page.locator("#map canvas")
    points.focus()
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#tip")).to_be_visible()
    page.keyboard.press("ArrowRight")
    name = page.locator("#spoken").inner_text().partition(":")[0]
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#current")).to_contain_text(name)


def test_a_static_file_works_offline(open_page, pair, tmp_path):
    path = tmp_path / "page.html"
    size = write_static_page(path, "first and second", pair, 6)
    assert size == path.stat().st_size < 200_000
    assert not re.search(r"(src|href|url\()\s*=?\s*[\"']?(https?:)?//", path.read_text())
    page = open_page(path.as_uri(), offline=True)
    live = pair.models[0]
    names = page.locator("#grid .tile").evaluate_all("tiles => tiles.map(tile => tile.title)")
    assert len(names) == 6
    row = pair.collection.describe(pair.models)["names"].index(names[0])
    caption(page, "row 3, column 3 attends")
    point_at(page, 2, 4)
    text = caption(page, "the patch in row 2, column 4 attends most to")
    opened = live.opened[f"c{row}"]
    maps, prefix = live.attention(opened, 1, 7)
    mean = (maps.values / 255 * [[peak] for peak in maps.peaks]).mean(0)
    assert f"({percent(mean.max())})" in text
    assert f"{percent(sum(prefix) / 2)} goes to the class token" in text
    slide(page, "head", 1)
    caption(page, "head 1: the patch in row 2, column 4")
    for method in ("Rollout", "Occlusion"):
        page.locator(".panel").nth(1).get_by_role("button", name=method).click()
        caption(page, method, panel=1)
    page.locator("#grid .tile").nth(3).click()
    playwright.expect(page.locator("#current")).to_contain_text(names[3])
    playwright.expect(page.get_by_role("button", name="Open image")).to_be_hidden()


@pytest.mark.parametrize("static", [False, True])
def test_the_distillation_token(open_page, folder, tmp_path, static):
    """Of a model with both tokens in its blocks, and of one with two queries in its pooling; by keyboard and by button."""
    blocks = explored("deit_tiny_distilled_patch16", title="blocks")
    queries = explored("deit_tiny_distilled_patch16", title="queries", pooling="class_attention", pooling_depth=1)
    for linear in (queries.model.pooling.blocks[0].attention.q, queries.model.pooling.blocks[0].attention.k):
        linear.weight.data *= 30  # otherwise all attention weights are nearly equal
    explorer = Explorer([blocks, queries], collect(folder, blocks, queries))
    write_static_page(tmp_path / "page.html", "two", explorer, 12)
    with running_server(make_app(make_routes(explorer, "two"))) as address:
        page = open_page((tmp_path / "page.html").as_uri() if static else address, offline=static)
        caption(page, "Block 2, mean of 2 heads: the patch in row 3")
        (_, opened), (_, pooled) = explorer.open(0, "c0"), explorer.open(1, "c0")
        canvas(page).focus()
        for name in ("class", "distillation", "class"):
            page.keyboard.press("Home")
            caption(page, f"the {name} token attends most to")
        slide(page, "head", 2)
        blocks_panel = page.locator(".panel").first
        blocks_panel.get_by_role("button", name="Distillation token").click()
        maps, prefix = blocks.attention(opened, 1, -2)
        text = caption(page, f"head 2: the distillation token attends most to {place(maps.values[1])} ({percent(maps.peaks[1])})")
        assert f"{percent(prefix[1])} goes to the class and distillation tokens" in text
        playwright.expect(blocks_panel.get_by_role("button", name="Distillation token")).to_have_attribute("aria-pressed", "true")
        canvas(page).scroll_into_view_if_needed()
        point_at(page, 2, 2)
        caption(page, "head 2: the patch in row 2, column 2")
        page.get_by_label("same map in both").uncheck()
        slide(page, "block", 3, panel=1)
        caption(page, "the class query attends", panel=1)
        panel = page.locator(".panel").nth(1)
        assert panel.locator(".query button:visible").all_inner_texts() == ["Class token", "Distillation token"]
        panel.get_by_role("button", name="Distillation token").click()
        maps, _ = queries.attention(pooled, 3, -2)
        caption(page, f"head 2: the distillation query attends most to {place(maps.values[1])}", panel=1)


def test_a_static_file_shows_only_stored_maps_of_a_class(open_page, folder, tmp_path):
    """A query per class: attention of the pooling and occlusion are stored for the first prediction, other maps for two."""
    model = explored("patchconvnet_s20_multi", title="queries", depth=2, width=32, stem="linear", patch_size=8)
    write_static_page(tmp_path / "page.html", "queries", Explorer([model], collect(folder, model)), 4)
    page = open_page((tmp_path / "page.html").as_uri(), offline=True)
    caption(page, "Block class 1: the class query attends most to")
    first, second, _ = page.locator(".predictions button").all()
    playwright.expect(second).to_be_disabled()
    page.get_by_role("button", name="Class attention").click()
    second.click()
    caption(page, f"Class attention for {re.match(r'[a-z]+', second.inner_text())[0]}")
    playwright.expect(second).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Occlusion").click()
    caption(page, f"Occlusion for {re.match(r'[a-z]+', first.inner_text())[0]}")
    page.get_by_role("button", name="Attention of the class").click()
    caption(page, "Block class 1")
    playwright.expect(first).to_have_attribute("aria-pressed", "true")
    playwright.expect(page.locator("#message")).to_be_hidden()


def test_a_static_file_without_place_for_attention(open_page, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(static_page, "ATTENTION_BYTES", 1)
    model = explored()
    write_static_page(tmp_path / "page.html", "small", Explorer([model], collect(folder, model)), 4)
    page = open_page((tmp_path / "page.html").as_uri(), offline=True)
    caption(page, "Gradient × attention for")
    playwright.expect(page.locator(".reason")).to_contain_text("too large for this file")
    page.get_by_role("button", name="Attention", exact=True).click()
    caption(page, "Attention: attention of the last layer")
    playwright.expect(page.locator("#message")).to_be_hidden()


def test_a_model_without_attention_and_a_phone(open_page, folder):
    model = explored("resmlp_s12", title="mlp", image_size=64)
    with running_server(make_app(make_routes(Explorer([model], collect(folder, model)), "mlp"))) as address:
        phone = {"width": 390, "height": 800}
        page = open_page(address, viewport=phone, has_touch=True, is_mobile=True, color_scheme="dark")
        caption(page, "Highest at row")
        playwright.expect(page.locator(".reason")).to_contain_text("it has no attention")
        assert page.locator(".methods button").all_inner_texts() == ["Patch evidence", "Input × gradient", "Occlusion"]
        page.get_by_role("button", name="Occlusion").tap()
        caption(page, "Occlusion for")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
