"""A small HTTP client over real sockets, and hostile files."""

import http.client
import io
import json
import struct
import zipfile
import zlib
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from PIL import Image


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send(address, method="GET", path="/", body=None, headers=None) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def form(files, fields=()):
    """(headers, body) of a multipart form with files (name, content) and text fields."""
    lines = []
    for name, content in files:
        head = (
            f'--frontier\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\nContent-Type: image/jpeg\r\n\r\n'
        )
        lines.append(head.encode() + content + b"\r\n")
    for name, value in fields:
        lines.append(f'--frontier\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode())
    return {"Content-Type": "multipart/form-data; boundary=frontier"}, b"".join(lines) + b"--frontier--\r\n"


def encoded(size=(40, 30), format="JPEG", seed=0) -> bytes:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of_zeros(width: int, height: int) -> bytes:
    """A gray PNG whose pixels are compressed about a thousand times."""
    row = bytes(1 + width)
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def zip_file() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../cat.jpg", encoded())
    return file.getvalue()


HTML = b"<!doctype html><script>alert(1)</script>"
SVG = (
    b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
)
