"""The page of `vitrail serve` in a real browser: images by file input and drop, maps, errors, keyboard, phone, no other host."""

import shutil
from base64 import b64encode

import pytest

from tests.deploy.serving import NAMES, save_model, serving
from tests.web.client import encoded, send

CHROMIUM = shutil.which("chromium")
DROP = """text => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([Uint8Array.from(atob(text), letter => letter.charCodeAt(0))], "a.jpg", { type: "image/jpeg" }));
    return transfer;
}"""
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def test_a_map_is_over_the_part_of_the_crop_that_the_patches_cover(tmp_path):
    from playwright.sync_api import sync_playwright

    (tmp_path / "a.jpg").write_bytes(encoded((60, 40)))
    weights = save_model(tmp_path / "model.safetensors", image_size=(40, 40), patch_size=16)
    with serving(weights) as server, sync_playwright() as playwright:
        assert send(server.address, path="/models").json["models"][0]["covered_size"] == [32, 32]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.address)
        page.check("#explain")
        page.set_input_files("#files", tmp_path / "a.jpg")
        page.locator(".result canvas").first.wait_for()
        image, covered = (page.locator(f".result {name}").first.bounding_box() for name in ("img", "canvas"))
        browser.close()
    side = 0.875 * image["height"]  # of the center crop
    assert [covered[name] for name in ("width", "height")] == pytest.approx([0.8 * side, 0.8 * side], abs=1)
    assert covered["x"] == pytest.approx(image["x"] + (image["width"] - side) / 2, abs=1)
    assert covered["y"] == pytest.approx(image["y"] + (image["height"] - side) / 2, abs=1)


def test_images_are_predicted_in_the_browser(tmp_path):
    from playwright.sync_api import sync_playwright

    (tmp_path / "a.jpg").write_bytes(encoded((60, 40)))
    (tmp_path / "notes.jpg").write_text("not an image")
    weights = save_model(tmp_path / "model.safetensors")
    with serving(weights, api_key="0123456789abcdef") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 740})
        requests, problems = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if "Refused" in message.text else None)
        page.goto(server.address)
        page.locator("body").press("Tab")
        assert page.evaluate("document.activeElement.id") == "files"  # what a keyboard reaches first
        page.set_input_files("#files", tmp_path / "a.jpg")
        page.get_by_text("The API key is missing or wrong").wait_for()
        page.fill("#key", "0123456789abcdef")
        page.check("#explain")
        page.set_input_files("#files", tmp_path / "a.jpg")
        page.locator(".result canvas").first.wait_for()
        image, covered = (page.locator(f".result {name}").first.bounding_box() for name in ("img", "canvas"))
        side = 0.875 * image["height"]  # of the center crop
        assert [covered[name] for name in ("width", "height")] == pytest.approx([side, side], abs=1)
        for edge, name in (("x", "width"), ("y", "height")):
            assert covered[edge] + covered[name] / 2 == pytest.approx(image[edge] + image[name] / 2, abs=1)
        shown = page.locator(".result").first.locator(".class").all_inner_texts()
        assert len(shown) == 5
        assert {text.split("%")[-1].strip() for text in shown} == set(NAMES)  # <eel> is text
        assert page.locator("#message").inner_text() == ""
        page.route("**/explain*", lambda route: route.fulfill(status=503, json={"error": "No map."}))
        dropped = page.evaluate_handle(DROP, b64encode((tmp_path / "a.jpg").read_bytes()).decode())
        page.dispatch_event("#message", "drop", {"dataTransfer": dropped})  # anywhere
        page.get_by_text("No map.").wait_for()
        page.locator(".result").nth(2).wait_for()
        page.locator(".result").first.locator(".class").nth(4).wait_for()
        assert page.locator(".result").first.locator(".class").all_inner_texts() == shown
        page.set_input_files("#files", tmp_path / "notes.jpg")
        page.get_by_text("not a JPEG, PNG").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.goto(f"{server.address}docs")
        assert page.get_by_text("POST /predict").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        browser.close()
    assert not problems
    assert all(url.startswith((server.address, "blob:")) for url in requests)
