"""The server of the explorer over real sockets: answers, limits and hostile requests."""

import base64
import json
import re

import numpy as np
import pytest

from tests.explore.models import CLASSES, explored
from tests.explore.test_collection import collect
from tests.images import make_folder
from tests.web.client import HTML, SVG, encoded, form, png_of_zeros, send, zip_file
from vitrail.explore import explorer as explorer_module
from vitrail.explore.explorer import Explorer
from vitrail.explore.routes import make_routes
from vitrail.web.server import make_app, running_server


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("images") / "photos", CLASSES, 2)
    models = [explored(title="first"), explored(title="<b>second</b>", seed=1)]
    models[1].names[1] = "caf\udce9"  # of a folder whose name is not UTF-8
    return Explorer(models, collect(folder, *models))


@pytest.fixture(scope="module")
def address(explorer):
    with running_server(make_app(make_routes(explorer, "</script> & models"))) as address:
        yield address


def get(address, path, **parameters):
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    return send(address, path=f"/api/{path}?{query}")


def upload(address, *files):
    headers, body = form(files)
    return send(address, "POST", "/api/images", body, headers)


def test_the_page_embeds_its_data_and_only_its_script_runs(address, explorer):
    page = send(address)
    text = page.body.decode()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data)["models"] == json.loads(json.dumps(explorer.describe()))["models"]
    assert "<title>&lt;/script&gt; &amp; models</title>" in text
    assert "<b>second" not in text
    policy = page.headers["content-security-policy"]
    assert re.search(r"script-src 'sha256-[\w+/=]+'; connect-src 'self'", policy)
    assert "unsafe-eval" not in policy
    assert policy.startswith("default-src 'none'")
    assert "//" not in re.sub(r"sha256-\S+", "", policy)


def test_answers(address, explorer):
    (image,) = upload(address, ("cat.jpg", encoded())).json["images"]
    assert image["name"] == "cat.jpg"
    for key in (image["key"], "c3"):
        predictions = get(address, "predictions", model=1, image=key).json["predictions"]
        assert {name for _, name, _ in predictions} == {"blue", "caf\udce9", "green"}
        attention = get(address, "attention", model=1, image=key, layer=2, query=5).json
        maps = np.frombuffer(base64.b64decode(attention["maps"]), np.uint8).reshape(2, 16)
        expected, prefix = explorer.models[1].attention(explorer.models[1].opened[key], 2, 5)
        assert np.array_equal(maps, expected.values)
        assert (attention["peaks"], attention["prefix"]) == (expected.peaks, prefix)
        found = get(address, "map", model=1, image=key, method="rollout", **{"class": -1}).json
        assert max(base64.b64decode(found["maps"])) == 255
        view = get(address, "view", model=0, image=key)
        assert (view.headers["content-type"], view.body[:3]) == ("image/jpeg", b"\xff\xd8\xff")
    thumbnail = send(address, path="/api/thumbnails/5")
    assert (thumbnail.status, thumbnail.body) == (200, explorer.collection.thumbnails[5])
    for image in (view, thumbnail):  # another server on this port has other images under the same keys
        assert image.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("path", "parameters", "status"),
    [
        ("predictions", {"model": 2, "image": "c0"}, 422),
        ("predictions", {"model": -1, "image": "c0"}, 422),
        ("predictions", {"model": "x", "image": "c0"}, 400),
        ("predictions", {"model": 0}, 400),
        ("predictions", {"model": "9" * 5000, "image": "c0"}, 400),
        ("predictions", {"model": 0, "image": "c6"}, 404),
        ("predictions", {"model": 0, "image": "c-1"}, 404),
        ("predictions", {"model": 0, "image": "u0123456789abcdef"}, 404),
        ("predictions", {"model": 0, "image": "../../etc/passwd"}, 404),
        ("predictions", {"model": 0, "image": "%2Fetc%2Fpasswd"}, 404),
        ("predictions", {"model": 0, "image": "c%C2%B2"}, 404),  # a digit that is no number
        ("view", {"model": 0, "image": "c99999999999999999999"}, 404),
        ("attention", {"model": 0, "image": "c0", "layer": 99, "query": 0}, 422),
        ("attention", {"model": 0, "image": "c0", "layer": 0, "query": 16}, 422),
        ("attention", {"model": 0, "image": "c0", "layer": 0, "query": -2}, 422),
        ("map", {"model": 0, "image": "c0", "method": "__import__", "class": 0}, 422),
        ("map", {"model": 0, "image": "c0", "method": "rollout", "class": 3}, 422),
        ("thumbnails/6", {}, 404),
        ("thumbnails/..%2f..%2fetc%2fpasswd", {}, 404),
        ("thumbnails/-1", {}, 404),
        ("../../etc/passwd", {}, 404),
    ],
)
def test_requests_that_cannot_be_answered(address, path, parameters, status):
    answer = get(address, path, **parameters)
    assert (answer.status, list(answer.json)) == (status, ["error"])


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (png_of_zeros(9_000, 9_000)[:200], 413),
        (png_of_zeros(20_000, 8), 413),
        (HTML, 415),
        (SVG, 415),
        (zip_file(), 415),
        (encoded()[:300], 422),
    ],
    ids=["bomb", "20,000 pixels", "HTML", "SVG", "zip", "truncated"],
)
def test_hostile_uploads(address, explorer, content, status):
    before = list(explorer.uploads)
    answer = upload(address, ("good.jpg", encoded()), ("cat.jpg", content))
    assert (answer.status, list(answer.json)) == (status, ["error"])
    assert list(explorer.uploads) == before


def test_twenty_files_at_once(address):
    assert upload(address, *[(f"{index}.jpg", encoded()) for index in range(20)]).status == 413
    assert len(upload(address, *[(f"{index}.jpg", encoded()) for index in range(16)]).json["images"]) == 16


def test_uploads_of_other_sites_and_hosts(address):
    headers, body = form([("cat.jpg", encoded())])
    assert send(address, "POST", "/api/images", body, headers | {"Origin": "https://attacker.example"}).status == 403
    assert send(address, headers={"Host": "attacker.example"}).status == 400


def test_old_uploads_are_forgotten(address, explorer, monkeypatch):
    monkeypatch.setattr(explorer_module, "MAX_UPLOADS", 2)
    keys = [upload(address, ("cat.jpg", encoded())).json["images"][0]["key"] for _ in range(3)]
    assert list(explorer.uploads) == keys[1:]
    forgotten = get(address, "predictions", model=0, image=keys[0])
    assert (forgotten.status, "open it again" in forgotten.json["error"]) == (404, True)
