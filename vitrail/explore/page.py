"""The page of the explorer: the same script for the server and for a static file, in which all data is embedded."""

import hashlib
import json
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

import vitrail.pages
from vitrail.pages import get_environment

SCRIPTS = ("explore_panels.js", "explore_browser.js")  # one script in the page


@cache
def read_script() -> str:
    folder = Path(vitrail.pages.__file__).parent
    return "".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)


def content_policy(live: bool) -> str:
    """The browser runs this script only, and loads nothing from elsewhere."""
    digest = b64encode(hashlib.sha256(read_script().encode()).digest()).decode()
    own = " 'self'" if live else ""
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; img-src data:{own}; style-src 'unsafe-inline'; script-src 'sha256-{digest}'{connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def render_page(title: str, content: dict[str, Any], stored: dict[str, Any] | None = None) -> str:
    """The page for models and collection of `content`; with `stored`, all that it shows is inside."""
    data = json.dumps(content | {"stored": stored}, separators=(",", ":"))
    return (
        get_environment()
        .get_template("explore.html.j2")
        .render(
            title=title,
            live=stored is None,
            policy=content_policy(stored is None),
            script=read_script(),
            data=data.replace("<", "\\u003c"),  # so that the text cannot end the script element
        )
    )
