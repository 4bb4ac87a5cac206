"""A folder in real Chromium, served from this machine; requests to other addresses are blocked and reported."""

import functools
import http.server
import shutil
import threading
from contextlib import contextmanager

import pytest


@contextmanager
def serve(folder):
    """The address of a static server, as `python -m http.server` starts it."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def open_page(address, flags=(), **options):
    """A page of Chromium at an address; `page.problems` are its errors and requests to other addresses."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", *flags])
        context = browser.new_context(**options)
        page = context.new_page()
        page.problems = []

        def route(request_route):
            url = request_route.request.url
            if url.startswith((address, "blob:", "data:")):
                request_route.continue_()
            else:
                page.problems.append(url)
                request_route.abort()

        context.route("**/*", route)
        page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.goto(address)
        yield page
        browser.close()
