"""Uploads over real sockets: what is accepted, and every hostile file is one sentence with the right status."""

import base64
import io
import json
import socket
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.web.client import HTML, SVG, encoded, form, png_of_zeros, send, zip_file
from vitrail.data.decode import decode
from vitrail.web import uploads
from vitrail.web.server import make_app, running_server
from vitrail.web.uploads import Limits, RequestError, Upload, decode_images, read_submission

LIMITS = Limits(body_bytes=2**20, files=4, seconds=0.3)
PHOTO = encoded()


async def sums(request):
    submission = await read_submission(request, LIMITS)
    pixels = await run_in_threadpool(lambda: list(decode_images(submission.images, LIMITS)))
    names = [image.name for image in submission.images]
    return JSONResponse({"sums": [int(image.sum()) for image in pixels], "names": names, "fields": submission.fields})


@pytest.fixture(scope="module")
def address():
    with running_server(make_app([Route("/sums", sums, methods=["POST"])])) as address:
        yield address


def post(address, body, kind="application/octet-stream", **headers):
    return send(address, "POST", "/sums", body, {"Content-Type": kind, **headers})


def post_form(address, *files, fields=()):
    headers, body = form(files, fields)
    return send(address, "POST", "/sums", body, headers)


def test_three_ways_to_send_images(address):
    other = encoded((20, 50), "PNG", seed=1)
    expected = [int(decode(image).sum()) for image in (PHOTO, other)]
    text = [base64.b64encode(image).decode() for image in (PHOTO, other)]
    body = json.dumps({"images": [text[0], f"data:image/png;base64,{text[1]}"], "top": 3})
    assert post(address, PHOTO).json["sums"] == expected[:1]
    assert post(address, PHOTO, "image/jpeg").json["sums"] == expected[:1]
    assert post(address, body, "application/json; charset=utf-8").json == {
        "sums": expected,
        "names": ["image 0", "image 1"],
        "fields": {"top": 3},
    }
    answer = post_form(address, ("cat.jpg", PHOTO), ("../../etc/dog\x1b.png", other), fields=[("top", "3")])
    assert answer.json == {"sums": expected, "names": ["cat.jpg", "dog\\x1b.png"], "fields": {"top": "3"}}


BOMB = png_of_zeros(9_000, 9_000)
WIDE = png_of_zeros(20_000, 8)
HOSTILE = {
    "decompression bomb": (BOMB, 413),
    "20,000 pixels wide": (WIDE, 413),
    "HTML": (HTML, 415),
    "SVG": (SVG, 415),
    "zip": (zip_file(), 415),
    "truncated JPEG": (PHOTO[: len(PHOTO) // 2], 422),
    "truncated PNG": (encoded(format="PNG")[:200], 422),
    "empty": (b"", 422),
    "text": (b"\x00" * 5000, 415),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(address, case):
    content, status = HOSTILE[case]
    answer = post_form(address, ("cat.jpg", content))
    assert (answer.status, list(answer.json)) == (status, ["error"])
    assert answer.json["error"].startswith("cat.jpg: ")
    assert "Traceback" not in answer.json["error"]
    assert "\n" not in answer.json["error"]
    assert post(address, PHOTO).status == 200


def test_bombs_are_rejected_by_their_headers(address):
    assert len(BOMB) < 2**18
    assert post(address, BOMB[:100]).status == 413  # nothing but the header is needed


def test_limits_of_a_request(address):
    assert post_form(address, *[(f"{index}.jpg", PHOTO) for index in range(20)]).status == 413
    text = base64.b64encode(PHOTO).decode()
    assert post(address, json.dumps({"images": [text] * 5}), "application/json").status == 413
    answer = post(address, bytes(2**20 + 1))
    assert (answer.status, answer.json) == (413, {"error": "The request is larger than 1 MB: send less at once."})
    assert post(address, (bytes(2**16) for _ in range(40))).status == 413  # chunked: without a Content-Length
    assert post(address, PHOTO, **{"Content-Length": "1000000000000"}).status == 413


def test_pixels_of_all_images_together():
    images = [Upload("a", PHOTO), Upload("b", PHOTO)]  # 1200 pixels each
    with pytest.raises(RequestError, match=r"b: more than 2,399 pixels in one request") as raised:
        decode_images(images, Limits(pixels=2399))
    assert raised.value.status == 413
    assert np.array_equal(list(decode_images(images, Limits(pixels=2400)))[1], decode(PHOTO))


def test_progressive_images_count_all_that_they_store():
    file = io.BytesIO()
    Image.new("RGB", (800, 80)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    repeated = content[:-2] + content[content.rfind(b"\xff\xda") : -2] * 20 + content[-2:]
    for image, pixels in ((encoded((800, 80)), 1000), (content, 64_000), (repeated, 128_000)):  # the first is decoded as 100 x 10
        assert len(list(decode_images([Upload("a", image)], Limits(pixels=pixels), 10))) == 1
        with pytest.raises(RequestError, match="pixels in one request"):
            decode_images([Upload("a", image)], Limits(pixels=pixels - 1), 10)


FIELD = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx-999999999\r\n--b--\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("text/plain", PHOTO, 415),
        ("application/zip", PHOTO, 415),
        ("", PHOTO, 415),
        ("application/json", b"{", 400),
        ("application/json", b"[" * 10**5, 400),
        ("application/json", b"[1]", 400),
        ("application/json", b'{"images": []}', 400),
        ("application/json", b'{"images": [3]}', 400),
        ("application/json", b'{"image": "not base64!"}', 400),
        ("application/json", b"\xff\xfe", 400),
        ("application/json", b'{"image": "", "x": [' + b"[]," * 10**5 + b"0]}", 400),
        ("application/json", b'{"images": [' + b'"",' * 10**5 + b'""]}', 400),
        ("application/json", b'{"images": ["", "", "", "", "not base64!"]}', 413),  # counted before they are decoded
        ("application/json", b'{"image": "", "top": [3]}', 400),
        ("application/json", b'{"image": "", "top": "' + b"3" * 10**5 + b'"}', 400),
        ("multipart/form-data", b"x", 400),
        ("multipart/form-data; boundary=b", b"--b\r\nno header", 400),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", 400),
        ("multipart/form-data; boundary=b", b"", 400),
        ("multipart/form-data; boundary=b; charset=undefined", FIELD, 400),
        ("multipart/form-data; boundary=b; charset=punycode", FIELD, 400),
        ("application/octet-stream", b"", 400),
    ],
)
def test_malformed_requests(address, kind, body, status, caplog):
    answer = post(address, body, kind)
    assert (answer.status, list(answer.json), caplog.records) == (status, ["error"], [])
    if status == 415 and kind:
        assert answer.json["error"].startswith(f"The content type {kind} cannot be read: ")


def test_many_json_values_are_refused_before_they_are_parsed(address, monkeypatch):
    parsed = []
    monkeypatch.setattr(uploads.json, "loads", parsed.append)
    assert send(address, "POST", "/sums", b"[" + b"{}," * 10**5 + b"{}]", {"Content-Type": "application/json"}).status == 400
    assert parsed == []


def test_compressed_requests_are_refused(address):
    assert post(address, PHOTO, **{"Content-Encoding": "gzip"}).status == 415


def test_slow_and_interrupted_bodies(address):
    netloc = urlsplit(address).netloc
    head = f"POST /sums HTTP/1.1\r\nHost: {netloc}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(PHOTO)}\r\n\r\n".encode()

    def connect():
        host, port = netloc.split(":")
        return socket.create_connection((host, int(port)), timeout=20)

    with connect() as slow:
        slow.sendall(head + PHOTO[:50])  # and nothing more
        assert slow.makefile("rb").readline().startswith(b"HTTP/1.1 408")
    for _ in range(20):
        with connect() as interrupted:
            interrupted.sendall(head + PHOTO[:50])
    assert post(address, PHOTO).status == 200
