"""Metrics of the server for Prometheus, and the number of each request."""

import re
import time
import uuid
from collections.abc import Collection
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders

from vitrail.web.security import Application, Message, Receive, Scope, Send

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("vitrail_requests", "Requests by path and status", ["path", "status"], registry=self.registry)
        self.seconds = Histogram(
            "vitrail_request_seconds", "Time from headers to response", ["path"], buckets=SECONDS, registry=self.registry
        )
        self.batch_sizes = Histogram("vitrail_batch_images", "Images per batch", buckets=SIZES, registry=self.registry)
        self.batch_seconds = Histogram("vitrail_batch_seconds", "Time of a batch", buckets=SECONDS, registry=self.registry)

    def add_gauge(self, name: str, description: str, read: Any) -> None:
        """A value that is read when the metrics are."""
        Gauge(name, description, registry=self.registry).set_function(read)

    def observe_batch(self, size: int, seconds: float) -> None:
        self.batch_sizes.observe(size)
        self.batch_seconds.observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """The text of all metrics, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class MeteredApplication:
    """Counts requests and their time by path and status, and gives each an X-Request-ID: the client's, or a new one."""

    def __init__(self, app: Application, metrics: Metrics, paths: Collection[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        identifier = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-ID"] = identifier
                self.metrics.requests.labels(path, str(message["status"])).inc()
                self.metrics.seconds.labels(path).observe(time.perf_counter() - started)
            await send(message)

        await self.app(scope, receive, send_and_count)
