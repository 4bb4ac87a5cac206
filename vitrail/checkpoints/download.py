"""Downloads of files over HTTPS: bounded in size, continued after an interruption, compared with a digest."""

import http.client
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from vitrail.atomic_files import atomic_write_text, describe_error, file_sha256, fsync_path
from vitrail.data.progress import progress
from vitrail.errors import UserError
from vitrail.formatting import format_bytes
from vitrail.version import __version__

TIMEOUT = 30  # seconds without a byte
BLOCK = 1 << 20
LOCAL = ("127.0.0.1", "localhost", "::1")  # the only hosts that are read without encryption


class Unavailable(UserError):
    """The server cannot be reached, or does not have the file."""


class SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects to HTTPS only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        return super().redirect_request(req, fp, code, msg, headers, check_url(newurl))


def check_url(url: str) -> str:
    """Return the URL; UserError unless it is encrypted or on this machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL):
        raise UserError(f"{url} is not an https address: nothing was downloaded from it.")
    return url


def download(url: str, target: Path, limit: int, digest: str = "", credentials: Mapping[str, str] | None = None) -> str:
    """Write the file of a URL to `target` and return its SHA-256, which must begin with `digest`.

    An interrupted download leaves a partial file, and the next call continues after it if the file on the server is still the
    same one. `credentials` are headers for the host of the URL, which are not sent to a host that it redirects to.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        receive(url, part, limit, credentials or {})
        found = file_sha256(part)
        if not found.startswith(digest):
            raise UserError(
                f"{url} was downloaded, but its SHA-256 is {found[:16]}… and not {digest[:16]}…: it was discarded; try again, "
                "and do not use that file if the digests still differ."
            )
        fsync_path(part)
        part.replace(target)
    except (OSError, http.client.HTTPException) as error:
        kept = part.stat().st_size if part.is_file() and tag_path(part).is_file() else 0
        if not kept:
            raise Unavailable(reason_of(error)) from None
        raise UserError(
            f"The download of {url} was interrupted ({reason_of(error)}); {format_bytes(kept)} are kept, and the same command "
            "continues after them."
        ) from None
    except UserError:
        part.unlink(missing_ok=True)
        raise
    finally:
        if not part.exists():
            tag_path(part).unlink(missing_ok=True)
    return found


def receive(url: str, part: Path, limit: int, credentials: Mapping[str, str]) -> None:
    """Append the rest of a file to its partial file, or write all of it."""
    request = urllib.request.Request(check_url(url), headers={"User-Agent": f"vitrail/{__version__}"})
    for name, value in credentials.items():
        request.add_unredirected_header(name, value)
    tag = tag_path(part)
    start = part.stat().st_size if part.is_file() and tag.is_file() else 0
    if start:  # the server sends the whole file if it is not the one that was begun
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", tag.read_text(encoding="utf-8"))
    try:
        response = urllib.request.build_opener(SecureRedirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the partial file is complete, or longer than the file
            part.unlink()
            receive(url, part, limit, credentials)
            return
        raise
    with response:
        if response.status != 206:
            start = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise UserError(f"The server of {url} continued the download at a wrong offset: try again.")
        length = response.headers.get("Content-Length", "")
        size = start + int(length) if re.fullmatch(r"\d{1,15}", length) else None
        if size is None:
            raise UserError(f"The server does not state the size of {url}: download it by hand and give the file.")
        if size > limit:
            raise UserError(
                f"{url} has {format_bytes(size)}, more than {format_bytes(limit)}: download it by hand and give the file."
            )
        validator = response.headers.get("ETag", "")
        if validator.startswith('"'):  # a weak one may stand for other bytes
            atomic_write_text(tag, validator)
        else:
            tag.unlink(missing_ok=True)
        copy(response, part, start, size)


def copy(response: http.client.HTTPResponse, part: Path, start: int, size: int) -> None:
    title = part.stem.removeprefix(".")
    with part.open("ab" if start else "wb") as file, progress(f"downloading {title}, kB", (size - start) // 1000) as advance:
        while start < size and (block := response.read(min(BLOCK, size - start))):
            file.write(block)
            start += len(block)
            advance(len(block) // 1000)
    if start < size:
        raise http.client.IncompleteRead(b"", size - start)


def tag_path(part: Path) -> Path:
    """The file with the ETag of a partial file, which identifies the version of the file on the server."""
    return part.with_suffix(".etag")


def reason_of(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the connection was closed"
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    return "the host was not found" if isinstance(error, socket.gaierror) else describe_error(error)
