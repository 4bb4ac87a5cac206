"""Applications and servers: errors as JSON, a bound socket, and a graceful end on SIGINT and SIGTERM."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.atomic_files import describe_error
from vitrail.errors import UserError
from vitrail.web.responses import AsciiJSONResponse
from vitrail.web.security import CROWDED, LOOPBACK, Application, SecurityMiddleware
from vitrail.web.uploads import RequestError

LOCALHOST = "127.0.0.1"
HEADER_SECONDS = 10.0  # until the headers of a request have arrived, or a body that was answered before
WRITE_SECONDS = 30.0  # until the client has received what is sent to it
SHUTDOWN_SECONDS = 10.0  # for requests that are being answered
MAX_CONNECTIONS = 64  # more are answered with 503
HEADER_BYTES = 2**15


def make_app(
    routes: Sequence[Any],
    host: str = LOCALHOST,
    hosts: Collection[str] = (),
    api_key: str | None = None,
    open_paths: Collection[str] = (),
    lifespan: Any = None,
) -> Application:
    """An ASGI application with these starlette routes, for a server bound to `host`: every error is one sentence in JSON."""
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            RequestError: lambda request, error: error_response(error.status, str(error), error.headers),
            UserError: lambda request, error: error_response(422, str(error)),
            HTTPException: lambda request, error: error_response(error.status_code, f"{error.detail}.", error.headers),
            # The traceback is in the server's log only.
            Exception: lambda request, error: error_response(500, "The server failed to answer; its log says why."),
        },
    )
    return SecurityMiddleware(app, (host, *hosts), not is_loopback(host), api_key, open_paths)


def error_response(status: int, message: str, headers: Any = None) -> AsciiJSONResponse:
    return AsciiJSONResponse({"error": message}, status, headers)


def is_loopback(host: str) -> bool:
    try:
        return host in LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str = LOCALHOST, port: int = 0) -> socket.socket:
    """A listening socket; port 0: a free one. UserError if it cannot be bound."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=256)
        # Connections inherit it. asyncio sets it only for sockets with an explicit protocol; without it answers wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(f"Port {port} is in use: choose another one with --port.") from None
        reason = describe_error(error) if isinstance(error, OSError) else "there is no such port"
        raise UserError(f"{host}, port {port} cannot be used, {reason}: choose another --host or --port.") from None


def address_of(listener: socket.socket) -> str:
    """The address that a browser on this machine opens: that of all interfaces is not one."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": LOCALHOST, "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class Server(uvicorn.Server):  # type: ignore[misc]
    """Stops accepting requests on SIGINT and SIGTERM, answers those it has, and returns; a second SIGINT stops at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but without sending the signals again afterwards: to stop the server is not an error."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class LimitedProtocol(H11Protocol):  # type: ignore[misc]
    """Closes connections of slow clients, which uvicorn would keep, and lets the application answer when there are too many.

    Headers must arrive within `HEADER_SECONDS`, as must the rest of a body whose request has been answered; responses must be
    received within `WRITE_SECONDS`.
    """

    timer: asyncio.TimerHandle | None = None
    write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.limit_concurrency = None  # uvicorn's own answer is text, and its limit is one less
        transport.set_write_buffer_limits(0)  # pause_writing is called whenever the client has not received everything
        self.start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and not self.is_body_ignored():
            self.stop_timer()
        else:
            self.start_timer()  # a part of the next headers

    def handle_events(self) -> None:
        limit = self.config.limit_concurrency
        self.app_state[CROWDED] = len(self.connections) > limit or len(self.tasks) >= limit
        super().handle_events()  # a request has a copy of the state

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_body_ignored():
            self.start_timer()

    def is_body_ignored(self) -> bool:
        """Whether the request has been answered before all of its body has arrived."""
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def connection_lost(self, error: Exception | None) -> None:
        self.stop_timer()
        self.stop_write_timer()
        super().connection_lost(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_write_timer()

    def stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def start_timer(self) -> None:
        if self.timer is None and not self.transport.is_closing():
            self.timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def make_server(app: Application, max_connections: int = MAX_CONNECTIONS, shutdown_seconds: float = SHUTDOWN_SECONDS) -> Server:
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=shutdown_seconds,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    return Server(config)


def serve(
    app: Application,
    listener: socket.socket,
    announce: Callable[[str], None],
    max_connections: int = MAX_CONNECTIONS,
    shutdown_seconds: float = SHUTDOWN_SECONDS,
) -> None:
    """Serve until SIGINT or SIGTERM; `announce` is called with the address, whose connections wait until the server is ready."""
    server = make_server(app, max_connections, shutdown_seconds)
    announce(address_of(listener))
    server.run([listener])


@contextmanager
def running_server(app: Application, max_connections: int = MAX_CONNECTIONS) -> Iterator[str]:
    """A server in a thread on a free port, as a context that yields its address."""
    listener = bind()
    server = make_server(app, max_connections)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield address_of(listener)  # the socket listens: connections wait until the server is ready
    finally:
        server.should_exit = True
        thread.join()
