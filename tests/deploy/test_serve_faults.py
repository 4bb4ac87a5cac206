"""What goes wrong with a server: full queues, late, slow and lost clients, killed threads, replaced files, signals."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

import vitrail
from tests.deploy.serving import NAMES, post, save_model, serving
from tests.web.client import encoded, send
from vitrail.data.decode import decode
from vitrail.deploy import model_set, prediction_app
from vitrail.deploy.model_set import DEFAULT
from vitrail.deploy.prediction_app import Settings
from vitrail.deploy.served_model import ServedModel
from vitrail.web import server as web_server
from vitrail.web.uploads import Limits, Upload, read_submission

IMAGES = [encoded(seed=seed) for seed in range(8)]
RAW = {"Content-Type": "application/octet-stream"}
KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("faults") / "model.safetensors")


def predict(server, image=0):
    return send(server.address, "POST", "/predict", IMAGES[image], RAW)


def metric(server, name):
    lines = send(server.address, path="/metrics").body.decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), None)


class Background(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, server, image=0):
        super().__init__(daemon=True)
        self.server, self.image = server, image
        self.start()

    def run(self):
        self.answer = predict(self.server, self.image)

    def result(self):
        self.join(30)
        return self.answer


def test_a_full_queue_is_answered_at_once(weights):
    with serving(weights, settings=Settings(max_queue=2)) as server:
        gate = server.hold()
        running = Background(server)
        gate.wait()
        waiting = [Background(server), Background(server)]
        server.wait_for_queue(2)
        answer = predict(server)  # while the computation stands still
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert send(server.address, path="/ready").status == 503
        assert send(server.address, path="/health").status == 200
        gate.open()
        assert [each.result().status for each in (running, *waiting)] == [200] * 3
        assert send(server.address, path="/ready").status == 200


def test_a_late_request_is_answered_and_not_computed(weights):
    with serving(weights, settings=Settings(timeout=1)) as server:
        gate = server.hold()
        running = Background(server)
        gate.wait()
        assert predict(server).status == 504
        assert running.result().status == 504
        gate.open()
        server.wait_for(lambda: not server.service.batcher._running)
        assert gate.images == 1
        assert predict(server).status == 200


def test_images_after_the_deadline_are_not_decoded(weights, monkeypatch):
    prepared = []
    monkeypatch.setattr(ServedModel, "preprocess", lambda served, image: prepared.append(image))
    monkeypatch.setattr(prediction_app, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(prepared)))  # seconds per image
    with serving(weights) as server, pytest.raises(TimeoutError):
        server.service.prepare(server.models.find(None), [Upload("a", IMAGES[0])] * 5, -1, deadline=15.0)
    assert len(prepared) == 2


def test_files_are_freed_when_they_are_decoded(weights, monkeypatch):
    kept = []

    class Files(list):
        """A list that can have a weak reference."""

    async def read(request, limits):
        submission = await read_submission(request, limits)
        files = Files(submission.images)
        kept.append(weakref.ref(files))
        return replace(submission, images=files)

    monkeypatch.setattr(prediction_app, "read_submission", read)
    with serving(weights) as server:
        gate = server.hold()
        running = Background(server)
        gate.wait()
        server.wait_for(lambda: kept[0]() is None)
        gate.open()
        assert running.result().status == 200


def test_a_client_that_disconnects_is_not_computed(weights):
    with serving(weights) as server:
        gate = server.hold()
        running = Background(server)
        gate.wait()
        host = urlsplit(server.address)
        with socket.create_connection((host.hostname, host.port)) as client:
            head = f"POST /predict HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: image/jpeg\r\nContent-Length: "
            client.sendall(f"{head}{len(IMAGES[1])}\r\n\r\n".encode() + IMAGES[1])
            server.wait_for_queue(1)
        server.wait_for(lambda: all(job.future.cancelled() for job in server.service.batcher._queue))
        gate.open()
        assert running.result().status == 200
        assert predict(server).status == 200
        assert gate.images == 2


def test_slow_clients_do_not_block_others(weights, monkeypatch):
    monkeypatch.setattr(web_server, "HEADER_SECONDS", 1)
    with serving(weights, settings=Settings(limits=Limits(seconds=1))) as server:
        host = urlsplit(server.address)
        slow = [socket.create_connection((host.hostname, host.port), timeout=20) for _ in range(20)]
        for client in slow[:10]:
            client.sendall(b"POST /predict HTTP/1.1\r\nHost:")
        for client in slow[10:]:
            head = f"POST /predict HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: image/jpeg\r\nContent-Length: 999\r\n\r\n"
            client.sendall(head.encode() + b"\xff\xd8")
        assert predict(server).status == 200
        assert [client.recv(100) for client in slow[:10]] == [b""] * 10
        assert all(client.recv(100).startswith(b"HTTP/1.1 408") for client in slow[10:])
        for client in slow:
            client.close()
        assert predict(server).status == 200


@pytest.mark.parametrize(("length", "status"), [("", 503), ("Content-Length: 1\r\n", 400)])
def test_the_memory_of_a_body_in_chunks(weights, length, status):
    """Its size is not declared, so the limit of a request is counted; a Content-Length beside it is refused, not believed."""
    with serving(weights, settings=Settings(memory=len(IMAGES[0]))) as server:
        host = urlsplit(server.address)
        with socket.create_connection((host.hostname, host.port), timeout=20) as client:
            head = f"POST /predict HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: image/jpeg\r\nTransfer-Encoding: chunked\r\n"
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(IMAGES[0]), IMAGES[0])
            client.sendall(f"{head}{length}\r\n".encode() + body)
            file = client.makefile("rb")
            assert file.readline().startswith(b"HTTP/1.1 %d" % status)
            if length:
                assert b"exclude each other" in file.read()  # until the server closes
        assert predict(server).status == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [SystemExit, RuntimeError])
def test_the_server_survives_the_end_of_its_thread(weights, error):
    with serving(weights) as server:
        good = server.models.current

        def fail(images):
            raise error("secret detail")

        server.models.current = {DEFAULT: replace(good[DEFAULT], logits=fail)}
        answer = predict(server)
        assert answer.status == 500
        assert b"secret" not in answer.body
        server.models.current = good
        assert predict(server).status == 200
        assert metric(server, "vitrail_worker_restarts") == (error is SystemExit)


def test_a_model_is_replaced_while_requests_wait(tmp_path):
    path = save_model(tmp_path / "model.safetensors")
    with serving(path) as server:
        old = predict(server).json
        gate = server.hold()
        running = Background(server)
        gate.wait()
        waiting = Background(server)
        server.wait_for_queue(1)
        new = save_model(tmp_path / "new.safetensors", seed=1)
        os.replace(new, path)
        server.models.reload()
        late = Background(server)
        server.wait_for_queue(2)
        gate.open()
        answers = [each.result() for each in (running, waiting, late)]
        assert [answer.status for answer in answers] == [200] * 3
        versions = [answer.json["version"] for answer in answers]
        assert versions[:2] == [old["version"]] * 2
        assert versions[2] == server.models.current[DEFAULT].version != old["version"]
        expected = vitrail.predict(path, [decode(IMAGES[0])])[0]
        assert late.result().json["predictions"][0]["classes"][0]["probability"] == pytest.approx(expected.probability, abs=1e-5)


def test_a_replaced_model_is_freed(tmp_path):
    path = save_model(tmp_path / "model.safetensors")
    with serving(path, precision="fp32") as server:
        old = weakref.ref(server.models.current[DEFAULT].model)
        assert predict(server).status == 200
        save_model(path, seed=1)
        server.models.reload()
        server.wait_for(lambda: gc.collect() >= 0 and old() is None)


def test_files_are_watched_and_damaged_ones_are_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(model_set, "WATCH_SECONDS", 0.02)
    path, messages, requested = save_model(tmp_path / "model.safetensors"), [], threading.Event()
    with serving(path, log=messages.append) as server:
        watcher = threading.Thread(target=server.models.watch, args=(requested,), daemon=True)
        watcher.start()
        version = server.models.current[DEFAULT].version
        content = path.read_bytes()
        path.write_bytes(content[:-100])
        server.wait_for(lambda: server.models.failures == 1)
        assert "not replaced" in messages[0]
        assert predict(server).json["version"] == version
        save_model(path, seed=2)
        server.wait_for(lambda: server.models.reloads == 1)
        assert predict(server).json["version"] != version
        path.unlink()  # kept until there is another one
        os.replace(save_model(tmp_path / "other.safetensors", seed=0), path)
        server.wait_for(lambda: server.models.reloads == 2)
        assert predict(server).json["version"] == version
        server.models.stopped.set()
        requested.set()
        watcher.join(20)
        assert not watcher.is_alive()


def test_a_thousand_waiting_requests(weights):
    """All are accepted before the first is computed; each gets its own answer, once."""
    expected = [each.name for each in vitrail.predict(weights, [decode(image) for image in IMAGES])]
    with serving(weights, settings=Settings(max_queue=1000, timeout=60), max_connections=1100) as server:
        gate = server.hold()

        async def ask_all():
            requests = [
                asyncio.create_task(post(server.address, IMAGES[number % 8], identifier=f"request-{number}"))
                for number in range(1000)
            ]
            batcher = server.service.batcher
            await asyncio.to_thread(server.wait_for, lambda: len(batcher._queue) + len(batcher._running) == 1000)
            gate.open()
            return await asyncio.gather(*requests)

        answers = asyncio.run(ask_all())
    assert Counter(status for status, _, _ in answers) == {200: 1000}
    assert [headers["x-request-id"] for _, headers, _ in answers] == [f"request-{number}" for number in range(1000)]
    names = [content["predictions"][0]["classes"][0]["name"] for _, _, content in answers]
    assert names == [expected[number % 8] for number in range(1000)]


def test_the_command(weights, tmp_path):
    """A real process: the key of the environment, SIGHUP, and SIGTERM, after which what was accepted is answered."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights.read_bytes())
    command = [sys.executable, "-m", "vitrail", "serve", path, "--port", "0", "--no-watch", "--model", f"other={weights}"]
    environment = os.environ | {"VITRAIL_API_KEY": KEY, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        address = next(line for line in process.stdout if line.startswith("Serving on")).removeprefix("Serving on ").strip()
        headers = RAW | {"X-API-Key": KEY}
        assert send(address, "POST", "/predict", IMAGES[0], RAW).status == 401
        first = send(address, "POST", "/predict?model=other", IMAGES[0], headers).json
        assert first["predictions"][0]["classes"][0]["name"] in NAMES
        save_model(path, seed=3)
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline().startswith("replaced: default (version")
        assert send(address, "POST", "/predict", IMAGES[0], headers).json["version"] != first["version"]
        host = urlsplit(address)
        with socket.create_connection((host.hostname, host.port), timeout=20) as client:
            head = f"POST /predict HTTP/1.1\r\nHost: {host.netloc}\r\nX-API-Key: {KEY}\r\nContent-Type: image/jpeg\r\n"
            client.sendall(f"{head}Content-Length: {len(IMAGES[0])}\r\n\r\n".encode() + IMAGES[0][:100])
            assert send(address, path="/health").status == 200  # the server has the request by now
            process.send_signal(signal.SIGTERM)
            refused = False
            while not refused:
                try:
                    socket.create_connection((host.hostname, host.port), timeout=20).close()
                except OSError:
                    refused = True
            client.sendall(IMAGES[0][100:])
            answer = client.recv(10000)
        assert answer.startswith(b"HTTP/1.1 200")
        output = process.stdout.read()
        assert (process.wait(20), KEY in output, "Traceback" in output) == (0, False, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "cats"], "is not NAME=PATH"),
        (["--model", "default=vitrail_tiny"], "Two models have the name default"),
        (["--delta", "cats=missing.safetensors"], "There is no file missing.safetensors"),
        (["--precision", "fp4"], "choose auto, fp32, bf16 or none"),
        (["--max-images", "100", "--max-queue", "10"], "larger queue"),
        (["--api-key-file", "missing.txt"], "cannot be read"),
        (["--host", "192.0.2.1"], "choose another --host"),
    ],
)
def test_wrong_arguments(weights, arguments, words, cli_error):
    assert words in cli_error("serve", weights, "--port", 0, *arguments)


def test_a_port_in_use(weights, cli_error):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert "is in use" in cli_error("serve", weights, "--port", listener.getsockname()[1])


def test_a_short_key_is_refused_without_showing_it(weights, tmp_path, cli_error):
    (tmp_path / "key").write_text("hunter2\n")
    message = cli_error("serve", weights, "--port", 0, "--api-key-file", tmp_path / "key")
    assert "16 to 1024" in message
    assert "hunter2" not in message
