"""A prediction server in this process, on a free port, with small models whose computation can be held."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import torch

import vitrail
from tests.models.test_every_model import randomize
from vitrail.deploy.model_set import DEFAULT, ModelFile, ModelSet
from vitrail.deploy.prediction_app import Service, Settings, make_prediction_app
from vitrail.models.config import Architecture
from vitrail.web.server import running_server

ARCHITECTURE = Architecture(width=32, depth=2, heads=2, classes=5, image_size=(32, 32), patch_size=8, pooling="mean")
NAMES = ["ant", "bee", "cat", "dog", "<eel>"]


def make_model(seed=0, **changes):
    torch.manual_seed(seed)
    model = randomize(vitrail.build(ARCHITECTURE.replace(**changes), "small")).eval()
    model.class_names = NAMES[: model.architecture.classes] or None
    return model


def save_model(path, seed=0, **changes):
    vitrail.save(make_model(seed, **changes), path)
    return path


class Gate:
    """Holds the computation of a model, and counts its images."""

    def __init__(self):
        self.event, self.entered, self.images = threading.Event(), threading.Semaphore(0), 0

    def wrap(self, compute):
        def held(images):
            self.images += len(images)
            self.entered.release()
            assert self.event.wait(30)
            return compute(images)

        return held

    def open(self):
        self.event.set()

    def wait(self):
        """Until the device thread is at the gate."""
        assert self.entered.acquire(timeout=30)


class Serving:
    def __init__(self, address, service, models):
        self.address, self.service, self.models = address, service, models

    def hold(self, name=DEFAULT):
        """Hold the computation of a model until the gate is opened."""
        gate, served = Gate(), self.models.current[name]
        self.models.current = {**self.models.current, name: replace(served, logits=gate.wrap(served.logits))}
        return gate

    def wait_for(self, condition):
        """Ask the server until a condition is true."""
        for _ in range(3000):
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError("the condition did not become true")

    def wait_for_queue(self, count):
        self.wait_for(lambda: len(self.service.batcher._queue) == count)


@contextmanager
def serving(*files, settings=None, precision=None, api_key=None, max_connections=64, log=lambda message: None):
    """Serve `files` (paths, the first as the default, or ModelFiles)."""
    named = [file if isinstance(file, ModelFile) else ModelFile(DEFAULT, str(file)) for file in files]
    models = ModelSet(named, "cpu", precision, log=log)
    service = Service(models, settings or Settings(), threads=1)
    app = make_prediction_app(service, api_key=api_key)
    with running_server(app, max_connections=max_connections) as address:
        yield Serving(address, service, models)


async def post(address, body, path="/predict", kind="application/octet-stream", identifier=""):
    """(status, headers, JSON) of one request on a connection of its own."""
    host = urlsplit(address)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    head = f"POST {path} HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    head += f"X-Request-ID: {identifier}\r\n" if identifier else ""
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    start, _, content = answer.partition(b"\r\n\r\n")
    lines = start.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, json.loads(content)
