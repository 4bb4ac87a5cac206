"""The folder of `vitrail export --to web` in real Chromium: the same predictions as Python, nothing from another address."""

import base64
import io
import json
import re
import tarfile

import pytest

import vitrail
from tests.browser import open_page, serve
from tests.deploy.exports import make_model
from tests.web.client import encoded
from vitrail.checkpoints.export_metadata import ExportMetadata
from vitrail.data.datasets.pets import open_pets
from vitrail.data.decode import decode
from vitrail.deploy.onnx_export import split
from vitrail.deploy.web_export import RUNTIMES, find_runtime, write_site
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing

PREDICT = """async (encoded) => {
    const { predict } = await import("./app.js");
    return predict(new Blob([Uint8Array.from(atob(encoded), (each) => each.charCodeAt(0))]));
}"""


SOFTWARE_WEBGPU = (
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--enable-features=Vulkan",
    "--use-vulkan=swiftshader",
)


@pytest.fixture(scope="module")
def site(image_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("web")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPM_CONFIG_OFFLINE", "true")
        patch.setenv("VITRAIL_CACHE", str(folder / "cache"))
        try:
            runtime = find_runtime(None)
        except UserError as error:
            pytest.skip(f"npm's cache does not contain onnxruntime-web, run `npm pack onnxruntime-web` once: {error}")
    model, path, result = image_file
    write_site(folder / "site", split(path.read_bytes()), result.metadata, runtime)
    return model, folder / "site"


def test_same_predictions_as_python(site):
    model, folder = site
    source = open_pets()["test"]
    files = [source.encoded(37 * index) for index in range(8)]
    with serve(folder) as address, open_page(address, color_scheme="dark", viewport={"width": 380, "height": 800}) as page:
        page.locator("#status", has_text=re.compile("Ready|could not")).wait_for(timeout=60_000)
        for file in files:
            check_predictions(page, model, file)
        page.set_input_files("#file", {"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": files[0]})
        page.locator("#predictions li").nth(4).wait_for()
        best = model.predict(decode(files[0]))[0]
        assert page.locator("#predictions li").first.inner_text().split("\n")[0] == best.name
        assert page.locator("#predictions meter").first.get_attribute("aria-label").startswith(best.name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380  # fits a phone
        page.set_input_files("#file", {"name": "x.jpg", "mimeType": "image/jpeg", "buffer": b"no image"})
        page.locator("#status", has_text="could not be read as an image").wait_for()
        assert page.problems == []


COUNT_DISPATCHES = """() => {
    const { prototype } = GPUComputePassEncoder;
    const { dispatchWorkgroups } = prototype;
    self.dispatches = 0;
    prototype.dispatchWorkgroups = function (...counts) { self.dispatches++; return dispatchWorkgroups.apply(this, counts); };
}"""
NO_DEVICE = "GPUAdapter.prototype.requestDevice = async () => { throw new Error('no device'); };"


def test_webgpu(site):
    """With Chromium's software adapter: the network runs there, the preprocessing in WebAssembly; all of it without a device."""
    model, folder = site
    file = open_pets()["test"].encoded(0)
    with serve(folder) as address, open_page(address, SOFTWARE_WEBGPU) as page:
        if not page.evaluate("async () => Boolean(await navigator.gpu?.requestAdapter())"):
            pytest.skip("this Chromium has no WebGPU adapter")
        page.locator("#status", has_text=re.compile("Ready|could not")).wait_for(timeout=60_000)
        assert page.locator("#status").inner_text() == "Ready (webgpu)."
        page.evaluate(COUNT_DISPATCHES)
        check_predictions(page, model, file)
        assert page.evaluate("self.dispatches") > model.architecture.depth
        page.add_init_script(NO_DEVICE)
        page.reload()
        page.locator("#status", has_text="Ready (wasm).").wait_for(timeout=60_000)
        check_predictions(page, model, file)
        assert page.problems == []


def check_predictions(page, model, file):
    actual = page.evaluate(PREDICT, base64.b64encode(file).decode())
    expected = model.predict(decode(file), top=5)[0].classes
    assert [each["name"] for each in actual] == [each.name for each in expected]
    assert [each["probability"] for each in actual] == pytest.approx([each.probability for each in expected], abs=1e-5)


def test_the_folder_is_complete(site):
    _, folder = site
    page = (folder / "index.html").read_text()
    assert "script-src 'self' 'wasm-unsafe-eval'" in page
    assert "http" not in page.replace('http-equiv="', "")
    runtimes = json.loads((folder / "model.json").read_text())["runtimes"]
    assert all((folder / path).is_file() for path in runtimes.values())
    assert set(runtimes) == {"webgpu", "wasm"}


def make_package(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


# Computes for as many milliseconds as the image is wide, one image at a time: wide images are of the first class.
STAND_IN = b"""
export const env = { wasm: {} };
export class Tensor { constructor(type, data, dims) { this.dims = dims; } }
let busy = false;
async function run({ images, normalized }) {
    if (normalized) return { logits: { data: normalized.dims[2] > 100 ? [1, 0] : [0, 1] } };
    if (busy) throw new Error("Session already started");
    busy = true;
    await new Promise((done) => setTimeout(done, images.dims[2]));
    busy = false;
    return { normalized: { data: [], dims: images.dims } };
}
export const InferenceSession = { create: async () => ({ run }) };
"""


def photo(width):
    return {"name": "a.png", "mimeType": "image/png", "buffer": encoded((width, 40), "PNG")}


def test_only_the_last_of_several_images_is_shown(tmp_path):
    files = {f"package/dist/{name}": b"" for name in RUNTIMES["wasm"]} | {f"package/dist/{RUNTIMES['wasm'][0]}": STAND_IN}
    files["package/package.json"] = b'{"name": "onnxruntime-web", "version": "1"}'
    metadata = ExportMetadata("m", "classification", "image", "int8", Preprocessing((32, 32)), ["wide", "narrow"], None)
    write_site(tmp_path / "site", (b"", b""), metadata, make_package(tmp_path / "runtime.tgz", files))
    with serve(tmp_path / "site") as address, open_page(address) as page:
        page.locator("#status", has_text="Ready").wait_for()
        page.set_input_files("#file", photo(300))
        page.set_input_files("#file", photo(50))
        page.locator("#status", has_text=re.compile("Computed|failed|not be read")).wait_for()
        assert page.locator("#status").inner_text().startswith("Computed")
        assert page.locator("#predictions li").first.inner_text().startswith("narrow")
        assert page.problems == []


def test_the_newest_cached_runtime_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    (tmp_path / "npm").mkdir()
    for version in ("1.9.0", "1.30.0", "1.22.1"):
        (tmp_path / "npm" / f"onnxruntime-web-{version}.tgz").touch()
    assert find_runtime(None).name == "onnxruntime-web-1.30.0.tgz"


def test_wrong_runtimes(tmp_path, monkeypatch):
    model = make_model("deit_tiny_patch16")
    (tmp_path / "text.tgz").write_text("no archive")
    other = make_package(tmp_path / "other.tgz", {"package/package.json": b'{"name": "left-pad"}'})
    empty = make_package(tmp_path / "empty.tgz", {"package/package.json": b'{"name": "onnxruntime-web", "version": "1"}'})
    monkeypatch.setattr("vitrail.deploy.onnx_export.build_model", lambda network, comparison, metadata, step: (b"", metadata))
    monkeypatch.setattr("vitrail.deploy.onnx_export.split", lambda content: (content, content))
    cases = {
        tmp_path / "missing": "There is no",
        tmp_path / "text.tgz": "cannot be read",
        other: "is not the npm package onnxruntime-web",
        empty: r"has no dist/ort\.wasm\.min\.mjs",
    }
    for runtime, message in cases.items():
        with pytest.raises(UserError, match=message):
            vitrail.export(model, tmp_path / "site", to="web", runtime=runtime)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="npm is not installed: run `npm pack onnxruntime-web` on a machine with npm"):
        vitrail.export(model, tmp_path / "site", to="web")
    assert not (tmp_path / "site").exists()
