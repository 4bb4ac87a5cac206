"""Images in HTTP requests: bounded reading of the body, and decoding by `vitrail.data.decode` only.

An upload never becomes a path: its name is only shown. Its bytes decide its format, not its name or content type.
"""

import asyncio
import binascii
import json
import logging
import math
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from vitrail.data.decode import TooManyPixels, UnsupportedFormat, decode, open_and_convert, scaled_size
from vitrail.formatting import escape_control, format_bytes, pluralize

MAX_FIELDS, FIELD_BYTES = 16, 2**16  # text fields of a form
MAX_VALUES = 10_000  # of JSON
MAX_NAME = 100  # letters of a file name that are kept
DISCARDED_BYTES = 2**26  # read beyond the limit, so that a client that is still sending receives the answer
SCANS = 16  # of a progressive JPEG; encoders write about ten
ACCEPTED = "send multipart/form-data with files, an image as application/octet-stream or image/*, or JSON with base64"

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs every malformed form


class RequestError(Exception):
    """A request that cannot be answered: the status code and one sentence for the client."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    body_bytes: int = 32 * 2**20
    files: int = 16
    pixels: int = 2**26  # of all images together, see count_pixels
    side: int = 2**14  # of an image
    seconds: float = 30.0  # until the body has arrived


DEFAULT_LIMITS = Limits()


class Upload(NamedTuple):
    """An encoded image of a request."""

    name: str  # only for display
    content: bytes


@dataclass(frozen=True)
class Submission:
    """The images of a request, and its other fields: text of a form, or a number or text of JSON."""

    images: list[Upload]
    fields: dict[str, Any] = field(default_factory=dict)


async def read_submission(request: Request, limits: Limits = DEFAULT_LIMITS) -> Submission:
    """Read the images of a request: files of a form, one image as the body, or base64 in the JSON fields image or images.

    Raises RequestError with 400 (malformed), 408 (slow), 413 (too large) or 415 (content type).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    raw = kind == "application/octet-stream" or kind.startswith("image/")
    if not raw and kind not in ("multipart/form-data", "application/json"):
        shown = escape_control(kind)[:MAX_NAME] or "is missing and"
        raise RequestError(415, f"The content type {shown} cannot be read: {ACCEPTED}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(415, "Compressed requests are not supported: send the body without a content encoding.")
    body = await read_body(request, limits)
    if raw:
        submission = Submission([Upload("image", body)] if body else [])
    else:
        form = kind == "multipart/form-data"
        submission = await (parse_form(request, body, limits) if form else asyncio.to_thread(parse_json, body, limits))
    check_count(len(submission.images), limits)
    return submission


async def read_body(request: Request, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The body of a request; RequestError 413 if it is larger than the limit, 408 if it does not arrive in time."""
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else 0
    too_large = RequestError(413, f"The request is larger than {format_bytes(limits.body_bytes)}: send less at once.")
    if size > limits.body_bytes + DISCARDED_BYTES:
        raise too_large
    chunks, total = [], 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                total += len(chunk)
                if max(total, size) <= limits.body_bytes:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                    if total > limits.body_bytes + DISCARDED_BYTES:
                        raise too_large
    except TimeoutError:
        raise RequestError(
            408, f"The request did not arrive within {limits.seconds:g} seconds.", {"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise RequestError(400, "The connection was closed before the request was complete.") from None
    if max(total, size) > limits.body_bytes:
        raise too_large
    return b"".join(chunks)


class MemoryParser(MultiPartParser):  # type: ignore[misc]
    """Keeps files in memory, which `read_body` has bounded, instead of writing them to disk."""

    spool_max_size = 0  # no limit


async def parse_form(request: Request, body: bytes, limits: Limits) -> Submission:
    async def chunks() -> AsyncIterator[bytes]:
        yield body

    _, parameters = parse_options_header(request.headers["content-type"])
    if parameters.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):  # Python has codecs that fail or are slow
        raise RequestError(400, "The form cannot be read: its charset must be utf-8.")
    parser = MemoryParser(request.headers, chunks(), max_files=limits.files, max_fields=MAX_FIELDS, max_part_size=FIELD_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            check_count(limits.files + 1, limits)
        raise RequestError(400, f"The form cannot be read: {error.message.rstrip('.')}.") from None
    images, fields = [], {}
    for name, value in form.multi_items():
        if isinstance(value, str):
            fields[name] = value
        else:
            images.append(Upload(shown_name(value.filename) or "image", value.file.read()))
    await form.close()
    return Submission(images, fields)


def parse_json(body: bytes, limits: Limits) -> Submission:
    if sum(map(body.count, (b"[", b"{", b","))) > MAX_VALUES:  # base64 has none of them
        raise RequestError(400, f'The JSON has more than {MAX_VALUES:,} values: send {{"images": [base64, ...]}}.')
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, 'The body is not JSON: send {"images": [base64, ...]}.') from None
    if not isinstance(content, dict):
        raise RequestError(400, 'The body is not a JSON object: send {"images": [base64, ...]}.')
    fields = dict(content)
    given = [fields.pop("image")] if "image" in fields else []
    several = fields.pop("images", [])
    given += several if isinstance(several, list) else [several]
    check_count(len(given), limits)
    for name, value in fields.items():
        if isinstance(value, list | dict) or len(str(value)) > FIELD_BYTES:
            raise RequestError(
                400, f"The field {shown_name(name[:MAX_NAME])} must be a number or a text of at most {FIELD_BYTES:,} letters."
            )
    return Submission([Upload(f"image {index}", from_base64(text, index)) for index, text in enumerate(given)], fields)


def from_base64(text: Any, index: int) -> bytes:
    """Decode base64, also of a data URL."""
    try:
        if not isinstance(text, str):
            raise ValueError
        return b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, f"Image {index} is not base64 text.") from None


def check_count(count: int, limits: Limits) -> None:
    if not count:
        raise RequestError(400, f"The request contains no image: {ACCEPTED}.")
    if count > limits.files:
        raise RequestError(413, f"The request contains more than {pluralize(limits.files, 'image')}: send fewer at once.")


def decode_images(images: Sequence[Upload], limits: Limits = DEFAULT_LIMITS, min_side: int | None = None) -> Iterator[np.ndarray]:
    """Decode one after another to uint8 [height, width, 3]; `min_side` as of `decode`. Call it outside of the event loop.

    The headers of all images are checked before the first is decoded. Raises RequestError with 413 (too many pixels), 415 (not an
    image of a supported format) or 422 (damaged).
    """
    total = 0
    for image in images:
        height, width, pixels = reading(image, lambda content: count_pixels(content, min_side))
        if max(height, width) > limits.side:
            raise RequestError(413, f"{image.name}: {width} x {height} pixels; at most {limits.side:,} per side are accepted.")
        total += pixels
        if total > limits.pixels:
            raise RequestError(413, f"{image.name}: more than {limits.pixels:,} pixels in one request; send smaller images.")
    return (reading(image, lambda content: decode(content, min_side)) for image in images)


def count_pixels(content: bytes, min_side: int | None) -> tuple[int, int, int]:
    """Height and width of an image, and how many pixels it counts, from its header.

    These are the pixels that are decoded. Of a progressive JPEG they are all that it stores, which libjpeg keeps in memory, once
    for every `SCANS` scans, since each takes time.
    """

    def count(image: Image.Image) -> np.ndarray:
        if image.info.get("progressive"):
            pixels = image.height * image.width * -(-content.count(b"\xff\xda") // SCANS)
        else:
            pixels = math.prod(scaled_size(image, min_side))
        return np.array((image.height, image.width, pixels))

    height, width, pixels = open_and_convert(content, count).tolist()
    return height, width, pixels


def reading(image: Upload, read: Any) -> Any:
    """The result of `read`; what it raises as RequestError."""
    try:
        return read(image.content)
    except ValueError as error:
        status = {UnsupportedFormat: 415, TooManyPixels: 413}.get(type(error), 422)
        raise RequestError(status, escape_control(f"{image.name}: {error}.")) from None


def shown_name(name: str | None) -> str:
    """The last part of a file name, without control characters, cut to a line."""
    last = (name or "").replace("\\", "/").rpartition("/")[2]
    return escape_control(last)[:MAX_NAME]
