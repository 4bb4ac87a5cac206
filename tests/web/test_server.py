"""A server process: it prints its address, finishes what it accepted and ends without an error."""

import signal
import subprocess
import sys
import threading

import pytest

from tests.web.client import send

PROGRAM = """
import anyio
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from vitrail.web.server import bind, make_app, serve

async def slow(request):
    print("accepted", flush=True)
    await anyio.sleep(0.5)
    return PlainTextResponse("finished")

serve(make_app([Route("/", slow)]), bind(), lambda address: print(address, flush=True))
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_server_after_its_last_answer(number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        answers = []
        address = process.stdout.readline().strip()
        client = threading.Thread(target=lambda: answers.append(send(address)))
        client.start()
        assert process.stdout.readline() == "accepted\n"
        process.send_signal(number)
        client.join()
        assert (answers[0].body, process.stdout.read(), process.wait()) == (b"finished", "ended\n", 0)


def test_import_vitrail_does_not_import_the_server_and_names_the_extra():
    program = """
import sys
import vitrail, vitrail.cli.main
assert not {"starlette", "uvicorn", "vitrail.web"} & set(sys.modules)
sys.modules["uvicorn"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "uvicorn" else find(name, *rest)
try:
    import vitrail.web.server
except vitrail.UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'vitrail[serve]'" in done.stdout
