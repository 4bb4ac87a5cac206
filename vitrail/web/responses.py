"""JSON responses that can contain any name."""

import json
from typing import Any

from starlette.responses import JSONResponse


class AsciiJSONResponse(JSONResponse):  # type: ignore[misc]
    """JSON in ASCII: names of classes and files may contain bytes that are not UTF-8, which starlette's JSON cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
