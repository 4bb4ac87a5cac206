"""Host, Origin and API key of requests, and headers of responses, over real sockets."""

import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.web.client import send
from vitrail.errors import UserError
from vitrail.web import server
from vitrail.web.server import make_app, running_server
from vitrail.web.uploads import RequestError


async def hello(request):
    return PlainTextResponse("hello")


async def fail(request):
    raise {"user": UserError("No such class."), "busy": RequestError(503, "Busy.", {"Retry-After": "1"})}.get(
        request.path_params["kind"], KeyError("secret")
    )


async def large(request):
    return PlainTextResponse(b"x" * LARGE)


LARGE = 2**25  # more than the buffers of a connection
ROUTES = [Route("/", hello, methods=["GET", "POST"]), Route("/large", large), Route("/fail/{kind}", fail)]


@pytest.fixture(scope="module")
def address():
    with running_server(make_app(ROUTES)) as address:
        yield address


@pytest.fixture(scope="module")
def port(address):
    return urlsplit(address).port


def test_every_answer_has_the_headers(address):
    for path, status in (("/", 200), ("/none", 404), ("/fail/user", 422), ("/fail/bug", 500)):
        answer = send(address, path=path)
        assert answer.status == status
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert "server" not in answer.headers


def test_errors_are_one_sentence(address):
    assert send(address, path="/fail/user").json == {"error": "No such class."}
    assert send(address, path="/fail/bug").json == {"error": "The server failed to answer; its log says why."}
    busy = send(address, path="/fail/busy")
    assert (busy.status, busy.headers["retry-after"]) == (503, "1")
    assert send(address, "DELETE").status == 405
    assert send(address, path="/none").json == {"error": "Not Found."}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "LOCALHOST:80", "[::1]:8000"])
def test_addresses_of_this_machine(address, host):
    assert send(address, headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "attacker.example:80",
        "localhost.attacker.example",
        "127.0.0.1.nip.io",
        "192.168.1.7",
        "",
        "a@[",
        "attacker.example@127.0.0.1",
        "127.0.0.1/../",
        "127.0.0.1:99999",
        "[",
        "é",
    ],
)
def test_other_hosts_are_refused(address, host):
    answer = send(address, headers={"Host": host.encode()})
    assert (answer.status, list(answer.json)) == (400, ["error"])


def test_several_or_no_host_headers(address, port):
    for hosts in (b"Host: localhost\r\nHost: attacker.example\r\n", b""):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n")
            assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 400")


def test_origin_of_requests_that_change_something(address, port):
    own = f"http://127.0.0.1:{port}"
    for headers, status in [
        ({}, 200),  # curl
        ({"Origin": own, "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": f"http://127.0.0.1:{port + 1}"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),  # another port of this machine
    ]:
        assert send(address, "POST", body=b"", headers=headers).status == status, headers
    assert send(address, headers={"Origin": "https://attacker.example"}).status == 200  # the page cannot read the answer


def test_paths_do_not_escape(address):
    for path in ("/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/%00"):
        assert send(address, path=path).status == 404


def test_api_key():
    app = make_app([*ROUTES, Route("/health", hello)], api_key="sésame", open_paths=["/health"])
    with running_server(app) as address:
        assert send(address, path="/health").status == 200
        refused = send(address)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert send(address, headers={"Authorization": "Bearer other"}).status == 401
        assert send(address, headers={"Authorization": "Bearer s\u00e9same".encode()}).status == 200
        assert send(address, headers={"X-API-Key": "s\u00e9same".encode()}).status == 200
        assert send(address, headers={"Authorization": "s\u00e9same".encode()}).status == 401  # not a Bearer
        assert send(address, headers={"X-API-Key": "x", "Authorization": "bearer s\u00e9same".encode()}).status == 200


def test_a_server_for_other_machines_accepts_addresses_and_its_names():
    with running_server(make_app(ROUTES, host="0.0.0.0", hosts=["Models.example"])) as address:
        for host, status in {"192.168.1.7:8000": 200, "models.example": 200, "attacker.example": 400}.items():
            assert send(address, headers={"Host": host}).status == status


def test_connections_without_headers_are_closed(address, port, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.1)
    first = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for complete, partial in ((b"", b""), (b"", first[:20]), (first, first[:20])):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(complete)
            answer = connection.recv(4096) if complete else b""
            assert answer.startswith(b"HTTP/1.1 200" if complete else b"")
            connection.sendall(partial)
            connection.makefile("rb").read()  # until the server closes
    assert send(address).status == 200


def test_connections_with_an_unread_body_are_closed(address, port, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
        file = connection.makefile("rb")
        assert file.readline().startswith(b"HTTP/1.1 404")
        connection.sendall(b"x")  # stops uvicorn's own timer
        file.read()  # until the server closes


def test_connections_that_read_nothing_are_closed(monkeypatch):
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.5)
    with running_server(make_app(ROUTES), max_connections=1) as address:
        with socket.create_connection(("127.0.0.1", urlsplit(address).port), timeout=10) as connection:
            connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            end = time.monotonic() + 10
            while send(address).status == 503:  # until it does not count any more
                assert time.monotonic() < end
        assert len(send(address, path="/large").body) == LARGE


def test_more_connections_than_the_limit(address, port):
    with ExitStack() as stack:
        for _ in range(server.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        refused = send(address)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.json == {"error": "The server has too many connections: try again later."}
        assert refused.headers["x-frame-options"] == "DENY"
    while send(address).status == 503:  # until the server has seen that they are closed
        pass


def test_long_headers_and_garbage(address, port):
    for sent in (b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00" * 20 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            try:
                connection.sendall(sent)
                assert b"400" in connection.makefile("rb").readline()
            except (BrokenPipeError, ConnectionResetError):
                pass  # closed before all was sent
    assert send(address).status == 200


def test_ports():
    with running_server(make_app(ROUTES)) as address, pytest.raises(UserError, match=r"Port \d+ is in use: .*--port"):
        server.bind(port=urlsplit(address).port)
    with pytest.raises(UserError, match="cannot be used"):
        server.bind(port=2**20)
    with pytest.raises(UserError, match="cannot be used"):
        server.bind("203.0.113.1")
