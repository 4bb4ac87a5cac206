"""Checks of every HTTP request, and headers of every response.

A page of another site can make a browser send requests to a server on this machine. It must not get an answer by DNS rebinding
(Host), change anything (Origin), or read a response (no CORS headers, Cross-Origin-Resource-Policy).
"""

import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders

from vitrail.web.responses import AsciiJSONResponse

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("localhost", "127.0.0.1", "::1")
CROWDED = "vitrail.crowded"  # in the state of a request: whether there are more connections than allowed
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Nothing from another address: scripts, styles, images and connections of this server only.
CONTENT_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,  # a response may have its own
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class SecurityMiddleware:
    """Answers requests of too many connections or with a wrong Host, Origin, length or key, and adds `HEADERS` to every response.

    `hosts` are the names under which the server is reachable, besides this machine's; with `any_address`, for servers that other
    machines reach, every IP address is accepted too: an address cannot be rebound. The API key, if there is one, is required
    as `Authorization: Bearer KEY` or `X-API-Key: KEY`, except for `open_paths`.
    """

    def __init__(
        self,
        app: Application,
        hosts: Collection[str] = (),
        any_address: bool = False,
        api_key: str | None = None,
        open_paths: Collection[str] = (),
    ) -> None:
        self.app = app
        self.hosts = {host.lower() for host in (*LOOPBACK, *hosts)}
        self.any_address = any_address
        self.api_key = api_key
        self.open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":  # nothing else, such as WebSockets, is served
                await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        problem = self.find_problem(scope)
        await (problem or self.app)(scope, receive, send_with_headers)

    def find_problem(self, scope: Scope) -> Application | None:
        """The response to a request that is not accepted, None if it is."""
        if scope.get("state", {}).get(CROWDED):
            crowded = {"Retry-After": "1", "Connection": "close"}
            return refusal(503, "The server has too many connections: try again later.", crowded)
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:  # h11 reads the chunks, whatever the length says
            message = "Content-Length and Transfer-Encoding exclude each other."
            return refusal(400, message, {"Connection": "close"})
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self.accepts_host(host):
            return refusal(400, "The Host header is not an address of this server: use the address that it printed.")
        if scope["method"] not in SAFE_METHODS and not is_same_origin(headers, host):
            return refusal(403, "Requests of pages of other sites are not accepted.")
        if self.api_key is not None and scope["path"] not in self.open_paths and not self.has_key(headers, self.api_key):
            return refusal(
                401, "The API key is missing or wrong: send it as Authorization: Bearer KEY.", {"WWW-Authenticate": "Bearer"}
            )
        return None

    def accepts_host(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname or "", parts.port  # ValueError if there is no such port
            if parts.netloc != host or "@" in host:  # more than a name and a port
                return False
            if name in self.hosts:
                return True
            return self.any_address and bool(ip_address(name))
        except ValueError:  # not an address, or a malformed header
            return False

    def has_key(self, headers: Headers, key: str) -> bool:
        bearers = [value[7:] for value in headers.getlist("authorization") if value[:7].lower() == "bearer "]
        given = [value.encode("latin-1") for value in (*headers.getlist("x-api-key"), *bearers)]
        return any(hmac.compare_digest(value, key.encode()) for value in given)


def is_same_origin(headers: Headers, host: str) -> bool:
    """Whether a request comes from a page of this server, or from a program that is no browser."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # malformed
        return False


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Application:
    response: Application = AsciiJSONResponse({"error": message}, status, headers)
    return response
