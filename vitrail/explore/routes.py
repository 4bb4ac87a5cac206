"""The HTTP interface of the explorer: one page, and JSON for its requests."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from vitrail.explore.explored_model import Quantized
from vitrail.explore.explorer import Explorer
from vitrail.explore.page import content_policy, render_page
from vitrail.web.responses import AsciiJSONResponse
from vitrail.web.uploads import RequestError, read_submission


def make_routes(explorer: Explorer, title: str) -> list[Route]:
    """All routes; synchronous ones run in a thread."""
    page = render_page(title, explorer.describe()).encode("utf-8", "backslashreplace")

    def get_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": f"{content_policy(True)}; frame-ancestors 'none'"})

    async def add_images(request: Request) -> Response:
        images = (await read_submission(request)).images
        keys = await run_in_threadpool(explorer.add, images)
        pairs = zip(keys, images, strict=True)
        return AsciiJSONResponse({"images": [{"key": key, "name": image.name} for key, image in pairs]})

    def get_predictions(request: Request) -> Response:
        model, opened = explorer.open(number(request, "model"), text(request, "image"))
        return AsciiJSONResponse({"predictions": model.predictions(opened)})

    def get_view(request: Request) -> Response:
        _, opened = explorer.open(number(request, "model"), text(request, "image"))
        return Response(opened.view, media_type="image/jpeg")

    def get_attention(request: Request) -> Response:
        model, opened = explorer.open(number(request, "model"), text(request, "image"))
        maps, prefix = model.attention(opened, number(request, "layer"), number(request, "query"))
        return AsciiJSONResponse(encode(maps) | {"prefix": prefix})

    def get_map(request: Request) -> Response:
        model, opened = explorer.open(number(request, "model"), text(request, "image"))
        return AsciiJSONResponse(encode(model.relevance(opened, text(request, "method"), number(request, "class"))))

    def get_thumbnail(request: Request) -> Response:
        row = explorer.row(f"c{request.path_params['row']}")
        return Response(explorer.require_collection().thumbnails[row], media_type="image/jpeg")

    gets: dict[str, Any] = {
        "/": get_page,
        "/api/predictions": get_predictions,
        "/api/view": get_view,
        "/api/attention": get_attention,
        "/api/map": get_map,
        "/api/thumbnails/{row}": get_thumbnail,
    }
    routes: Sequence[Route] = [Route(path, endpoint) for path, endpoint in gets.items()]
    return [*routes, Route("/api/images", add_images, methods=["POST"])]


def encode(maps: Quantized) -> dict[str, Any]:
    return {"maps": b64encode(maps.values.tobytes()).decode(), "peaks": maps.peaks}


def text(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None or len(value) > 100:
        raise RequestError(400, f"The parameter {name} is missing or too long.")
    return str(value)


def number(request: Request, name: str) -> int:
    try:
        return int(text(request, name))
    except ValueError:
        raise RequestError(400, f"The parameter {name} is not a number.") from None
