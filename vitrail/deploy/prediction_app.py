"""The HTTP interface of `vitrail serve`: its routes, and the way of an image from a request to a result."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from vitrail import pages
from vitrail.deploy.batching import Admission, Batcher, QueueClosed, QueueFull, WorkerStopped
from vitrail.deploy.model_set import ModelSet, count_bytes
from vitrail.deploy.openapi import describe_api
from vitrail.deploy.served_model import Explanation, Input, Operation, ServedModel, default_pool_threads, limit_threads
from vitrail.deploy.server_metrics import MeteredApplication, Metrics
from vitrail.pages import get_environment
from vitrail.version import __version__
from vitrail.web.responses import AsciiJSONResponse
from vitrail.web.security import Application
from vitrail.web.server import LOCALHOST, make_app
from vitrail.web.uploads import DEFAULT_LIMITS, Limits, RequestError, Upload, decode_images, read_submission

OPEN_PATHS = ("/", "/docs", "/openapi.json", "/serve.js", "/health", "/ready")  # without the API key
STUCK_SECONDS = 60.0  # a batch that takes longer means that the device does not answer
MAX_TOP = 1000
CLOSED = 499  # the status in the metrics of a request whose client has disconnected


@dataclass(frozen=True)
class Settings:
    """Limits of the server; those of one request are in `limits`."""

    max_batch: int = 32
    max_wait: float = 0.005  # seconds
    max_queue: int = 256  # images
    timeout: float = 30.0  # seconds of a request
    memory: int = 2**30  # bytes of the bodies of all requests
    limits: Limits = DEFAULT_LIMITS


class Service:
    """Decodes images in a pool of threads and computes them in batches on one thread."""

    def __init__(self, models: ModelSet, settings: Settings, threads: int) -> None:
        """`threads` of torch for the model; the pool has as many as cores."""
        self.models, self.settings, self.metrics = models, settings, Metrics()
        self.batcher = Batcher(
            lambda key, inputs: key[0].compute(key[1], inputs),
            settings.max_batch,
            settings.max_wait,
            settings.max_queue,
            start=lambda: limit_threads(threads),
            observe=self.metrics.observe_batch,
        )
        self.pool = ThreadPoolExecutor(default_pool_threads(), "vitrail-decode", lambda: limit_threads(1))
        self.body_bytes = 0  # of all requests
        models.run = lambda function: self.batcher.call(function).result()
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "vitrail_queue_images": ("Images that are prepared or wait", lambda: self.batcher.waiting),
            "vitrail_worker_restarts": ("Restarts of the device thread", lambda: self.batcher.restarts),
            "vitrail_model_reloads": ("Replacements of models", lambda: models.reloads),
            "vitrail_model_reload_failures": ("Replacements that failed", lambda: models.failures),
            "vitrail_weights_bytes": ("Memory of the weights", lambda: count_bytes(models.current)),
        }
        for name, (description, read) in gauges.items():
            self.metrics.add_gauge(name, description, read)

    def close(self) -> None:
        """Finish what was accepted."""
        self.batcher.close()
        self.pool.shutdown()

    @contextmanager
    def reserve_memory(self, request: Request) -> Iterator[None]:
        """Count the body of a request; 503 if the bodies of all requests would need too much memory."""
        declared = request.headers.get("content-length", "")
        limit = self.settings.limits.body_bytes
        size = min(int(declared), limit) if declared.isascii() and declared.isdigit() and len(declared) < 20 else limit
        if self.body_bytes + size > self.settings.memory:
            raise overloaded(1)
        self.body_bytes += size
        try:
            yield
        finally:
            self.body_bytes -= size

    async def answer(self, request: Request, respond: "Respond") -> Response:
        """Read, decode and compute the images of a request; `respond` reads its options and makes the response."""
        deadline = time.monotonic() + self.settings.timeout
        with self.reserve_memory(request):
            submission = await read_submission(request, self.settings.limits)
            options = {**submission.fields, **request.query_params}
            served, operation, target, finish = respond(options)
            work = self.compute(served, operation, submission.images, target, deadline)
            del submission  # it is freed as soon as the images are decoded
            results = await finish_unless_disconnected(request, work, deadline)
        if results is None:
            return Response(status_code=CLOSED)
        return AsciiJSONResponse({"model": served.name, "version": served.version, **finish(results)})

    async def compute(
        self, served: ServedModel, operation: Operation, images: list[Upload], target: int, deadline: float
    ) -> list[tuple[str, Any]]:
        """(name, result) of each image."""
        try:
            places = self.batcher.admit(len(images))
        except QueueFull as error:
            raise overloaded(error.retry_after) from None
        except QueueClosed:
            raise overloaded(1) from None
        names = [image.name for image in images]
        loop = asyncio.get_running_loop()
        with places:
            inputs = await loop.run_in_executor(self.pool, self.prepare, served, images, target, deadline)
            del images  # of the files: only the inputs wait
            results = await self.wait(places, (served, operation), inputs, deadline)
        return list(zip(names, results, strict=True))

    def prepare(self, served: ServedModel, images: list[Upload], target: int, deadline: float) -> list[Input]:
        """Decode and preprocess, on a thread of the pool."""
        check_deadline(deadline)
        inputs = []
        for image in decode_images(images, self.settings.limits, served.decode_side):
            inputs.append(Input(served.preprocess(image), target))
            check_deadline(deadline)
        return inputs

    async def wait(
        self, places: Admission, key: tuple[ServedModel, Operation], inputs: list[Input], deadline: float
    ) -> list[Any]:
        futures = [asyncio.wrap_future(future) for future in places.submit(key, inputs, deadline)]
        try:
            return await asyncio.gather(*futures)
        except WorkerStopped:
            raise RequestError(500, "The computation was interrupted: send the request again.") from None
        finally:
            for future in futures:  # where another image of the request failed
                future.cancel()

    # The options of a request, checked, to what is computed and how its results are shown.

    def find_model(self, options: Mapping[str, Any], operation: Operation) -> ServedModel:
        name = options.get("model")
        try:
            served = self.models.find(name if name is None else str(name))
        except KeyError:
            known = ", ".join(self.models.current)
            raise RequestError(404, f"There is no model {str(name)[:80]!r}: choose from {known}.") from None
        served.check(operation)
        return served

    def predict(self, options: Mapping[str, Any]) -> "Task":
        operation = Operation("predict")
        served, top = self.find_model(options, operation), read_number(options, "top", 5, MAX_TOP)

        def show(results: Results) -> dict[str, Any]:
            return {"predictions": [{"image": name, "classes": top_classes(served, row, top)} for name, row in results]}

        return served, operation, -1, show

    def embed(self, options: Mapping[str, Any]) -> "Task":
        operation = Operation("embed")
        served = self.find_model(options, operation)

        def show(results: Results) -> dict[str, Any]:
            return {"embeddings": [{"image": name, "vector": row.tolist()} for name, row in results]}

        return served, operation, -1, show

    def explain(self, options: Mapping[str, Any]) -> "Task":
        served = self.find_model(options, Operation("predict"))
        method = str(options.get("method") or next(iter(served.methods), ""))
        operation = Operation("explain", method)
        served.check(operation)
        target = served.find_class(str(options["class"])) if options.get("class") not in (None, "") else -1

        def show(results: Results) -> dict[str, Any]:
            return {"method": method, "explanations": [{"image": name, **show_map(served, row)} for name, row in results]}

        return served, operation, target, show

    # Routes.

    async def post_predict(self, request: Request) -> Response:
        return await self.answer(request, self.predict)

    async def post_embed(self, request: Request) -> Response:
        return await self.answer(request, self.embed)

    async def post_explain(self, request: Request) -> Response:
        return await self.answer(request, self.explain)

    async def get_models(self, request: Request) -> Response:
        return AsciiJSONResponse({"models": [describe_model(served) for served in self.models.current.values()]})

    async def get_health(self, request: Request) -> Response:
        if self.batcher.busy_seconds > STUCK_SECONDS:
            return AsciiJSONResponse({"status": "the device does not answer"}, 503)
        return AsciiJSONResponse({"status": "ok"})

    async def get_ready(self, request: Request) -> Response:
        if self.batcher.waiting >= self.settings.max_queue:
            return AsciiJSONResponse({"status": "the queue is full"}, 503, {"Retry-After": "1"})
        return AsciiJSONResponse({"status": "ready"})

    async def get_metrics(self, request: Request) -> Response:
        content, kind = self.metrics.render()
        return Response(content, headers={"Content-Type": kind})

    async def get_openapi(self, request: Request) -> Response:
        return AsciiJSONResponse(describe_api(self.settings))

    async def get_docs(self, request: Request) -> Response:
        return render("serve_docs.html.j2", title="HTTP interface", api=describe_api(self.settings))

    async def get_page(self, request: Request) -> Response:
        models = [describe_model(served) for served in self.models.current.values()]
        return render("serve.html.j2", title="Predict", models=models, version=__version__)

    async def get_script(self, request: Request) -> Response:
        script = Path(pages.__file__).with_name("serve.js").read_text(encoding="utf-8")
        return Response(script, media_type="text/javascript")

    def routes(self) -> list[Route]:
        gets = {
            "/": self.get_page,
            "/docs": self.get_docs,
            "/serve.js": self.get_script,
            "/openapi.json": self.get_openapi,
            "/models": self.get_models,
            "/health": self.get_health,
            "/ready": self.get_ready,
            "/metrics": self.get_metrics,
        }
        posts = {"/predict": self.post_predict, "/embed": self.post_embed, "/explain": self.post_explain}
        return [Route(path, handler, methods=["GET"]) for path, handler in gets.items()] + [
            Route(path, handler, methods=["POST"]) for path, handler in posts.items()
        ]


Results = Sequence[tuple[str, Any]]
Task = tuple[ServedModel, Operation, int, Callable[[Results], dict[str, Any]]]
Respond = Callable[[Mapping[str, Any]], Task]


def make_prediction_app(service: Service, host: str = LOCALHOST, hosts: Sequence[str] = (), api_key: str | None = None) -> Any:
    """The ASGI application; `service` is closed when the server stops, after the last response."""

    @asynccontextmanager
    async def lifespan(app: Application) -> Any:
        yield
        await asyncio.to_thread(service.close)

    routes = service.routes()
    app = make_app(routes, host, hosts, api_key, OPEN_PATHS, lifespan)
    return MeteredApplication(app, service.metrics, [route.path for route in routes])


async def finish_unless_disconnected(request: Request, work: Awaitable[Any], deadline: float) -> Any:
    """The result of `work`, which is cancelled after the deadline (RequestError 504) or if the client disconnects (None)."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(wait_for_disconnect(request))
    try:
        seconds = max(deadline - time.monotonic(), 0)
        done, _ = await asyncio.wait({task, disconnected}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        if disconnected in done:
            return None
        raise TimeoutError
    except TimeoutError:
        raise RequestError(504, "The request took too long: send fewer images, or try again later.") from None
    finally:
        task.cancel()
        disconnected.cancel()


def check_deadline(deadline: float) -> None:
    if time.monotonic() > deadline:  # the client has its answer
        raise TimeoutError


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def overloaded(retry_after: int) -> RequestError:
    return RequestError(503, "The server has too much to do: try again later.", {"Retry-After": str(retry_after)})


def read_number(options: Mapping[str, Any], name: str, default: int, largest: int) -> int:
    text = str(options.get(name, default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= largest):
        raise RequestError(400, f"{name} must be a number from 1 to {largest:,}.")
    return int(text)


def top_classes(served: ServedModel, probabilities: Any, top: int) -> list[dict[str, Any]]:
    values, indices = probabilities.topk(min(top, len(probabilities)))
    return [
        {"index": index, "name": served.class_names[index], "probability": value}
        for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]


def show_map(served: ServedModel, row: Explanation) -> dict[str, Any]:
    return {"class": {"index": row.target, "name": served.class_names[row.target]}, "map": row.values.tolist()}


def describe_model(served: ServedModel) -> dict[str, Any]:
    p = served.model.preprocessing
    return {
        "name": served.name,
        "architecture": served.model.name,
        "version": served.version,
        "precision": served.precision,
        "classes": served.class_names,
        "preprocessing": {**p.to_dict(), "image_size": list(p.image_size)},
        "methods": served.methods,
        "covered_size": list(served.covered_size),
        "shares_base": served.shared,
        "loaded": round(served.loaded, 3),
    }


def render(template: str, **context: Any) -> Response:
    return HTMLResponse(get_environment().get_template(template).render(context).encode("utf-8", "backslashreplace"))
