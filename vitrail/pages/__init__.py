"""HTML pages: one jinja2 frame and a template per page. Every value is escaped; a page is one file without scripts."""

import base64
import binascii
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vitrail.atomic_files import atomic_write
from vitrail.formatting import format_value, percent


@cache
def get_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": format_value, "percent": percent, "file_name": file_name}
    return environment


def file_name(location: Any) -> str:
    """Return the last part of a path, which fits on a line; a location that is no path unchanged."""
    return str(location).rpartition("/")[2] or str(location)


def write_page(path: Path, template: str, **context: Any) -> Path:
    """Render a template into a file; bytes of file names that are not UTF-8 become escape sequences."""
    text = get_environment().get_template(template).render(context)
    atomic_write(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="backslashreplace"))
    return path


def png_url(png: bytes) -> str:
    """Return a data URL that embeds a PNG image in a page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def image_url(encoded: Any) -> str:
    """Return a data URL for base64 text of a PNG or JPEG image, "" for anything else."""
    try:
        content = base64.b64decode(str(encoded), validate=True)
    except (binascii.Error, ValueError):
        return ""
    formats = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}
    format = next((name for start, name in formats.items() if content.startswith(start)), None)
    return f"data:image/{format};base64,{encoded}" if format else ""
