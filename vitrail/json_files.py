"""Untrusted JSON files: regular files of a bounded size."""

import json
from pathlib import Path
from typing import Any

from vitrail.errors import UserError

MAX_BYTES = 1 << 28


class MissingFile(UserError):
    """There is no such file."""


def read_json(path: str | Path) -> Any:
    """The content of a JSON file; UserError if there is none, and for what is not a regular file: opening a pipe could block."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file: give a JSON file.")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES >> 20} MiB: give a smaller JSON file.")
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFile(f"There is no file {path}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from None
