"""Throughput and latency of `vitrail serve` beside other servers with the same weights and images; prints a Markdown table.

    pip install --target packages --no-deps fastapi litserve ...           # the others; they are left out where they are missing
    python benchmarks/serve.py --packages packages                         # 1, 8 and 64 clients, three rounds
    python benchmarks/serve.py --seconds 2 --rounds 1 --clients 8          # short
    python benchmarks/serve.py --soak 30                                   # 30 minutes: memory, lost and duplicated answers
    python benchmarks/serve.py --in-process --device cuda                  # without HTTP, on machines without starlette

A client sends its next request when it has the answer to the last one, over one connection to this machine. In every round each
server is started, warmed up and measured with each number of clients; the order rotates. The images are photographs of the
bundled pets, enlarged so that decoding costs what it does for photographs on the web. A latency percentile is over all requests
of all rounds. CPU ms/image is the CPU time of the server's processes, which says something on a busy machine too.
"""

import argparse
import asyncio
import io
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from arguments import positive, run_program
from PIL import Image
from timing import machine

from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode
from vitrail.errors import UserError

HANDLERS = Path(__file__).with_name("serve_handlers.py")
OTHERS = {"fastapi": "fastapi", "fastapi-threads": "fastapi", "litserve": "litserve"}  # name -> the package that it needs
OURS = "vitrail serve"
IMAGES, SIDE = 64, 500  # number of images and their shorter side
START_SECONDS, STOP_SECONDS = 120, 20
MAX_REQUESTS = 1_000_000  # of all clients in one measurement
Ask = Callable[[int], Awaitable[str]]  # the number of an image -> the predicted class


@dataclass
class Result:
    """All requests with one number of clients."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    agreement: int = 0  # predictions that equal those of vitrail.predict
    cpu_seconds: float = 0.0  # of the processes of the server
    share: float = 1.0  # of the answers that count, after the first moments

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds if self.seconds else 0.0

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.latencies, q)) if self.latencies else float("nan")


def make_images() -> list[bytes]:
    """JPEG files of photographs whose shorter side has SIDE pixels."""
    source = open_source("pets", "test")
    files = []
    for index in range(IMAGES):
        image = Image.fromarray(decode(source.encoded(index)))
        scale = SIDE / min(image.size)
        file = io.BytesIO()
        image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC).save(
            file, "JPEG", quality=90
        )
        files.append(file.getvalue())
    return files


class Connection:
    """A connection of one client, kept open."""

    def __init__(self, address: str) -> None:
        self.host, self.reader, self.writer = urlsplit(address), None, None

    async def post(self, content: bytes, identifier: str = "") -> tuple[int, dict[str, str], bytes]:
        """Send one image as a form; status, headers and body of the answer."""
        if self.writer is None or self.writer.is_closing():
            self.reader, self.writer = await asyncio.open_connection(self.host.hostname, self.host.port)
        part = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
        body = part + content + b"\r\n--x--\r\n"
        head = f"POST /predict HTTP/1.1\r\nHost: {self.host.netloc}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        head += f"Content-Length: {len(body)}\r\n" + (f"X-Request-ID: {identifier}\r\n" if identifier else "")
        self.writer.write(f"{head}\r\n".encode() + body)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        answer = await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1]), headers, answer

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def first_name(body: bytes) -> str:
    """The most probable class in the answer of any of the servers."""
    return body.partition(b'"name":')[2].partition(b'"')[2].partition(b'"')[0].decode()


async def measure(make_client: Callable[[], Any], clients: int, seconds: float, expected: list[str]) -> Result:
    """Requests of `clients` clients for some seconds, after half a second that does not count."""
    result, sent, answers = Result(), 0, 0
    start = time.perf_counter() + min(seconds / 4, 0.5)

    async def run(number: int) -> None:
        nonlocal sent, answers
        client = make_client()
        image = number * 7
        while (now := time.perf_counter()) < start + seconds and sent < MAX_REQUESTS:
            image, sent = (image + 1) % len(expected), sent + 1
            try:
                name = await asyncio.wait_for(client.ask(image), 60)
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, RuntimeError):
                result.errors += now >= start
                client.close()
                continue
            answers += 1
            if now >= start:
                result.latencies.append(time.perf_counter() - now)
                result.agreement += name == expected[image]
        client.close()

    await asyncio.gather(*map(run, range(clients)))
    result.seconds = time.perf_counter() - start
    result.share = len(result.latencies) / max(answers, 1)
    return result


class HttpClient(Connection):
    def __init__(self, address: str, images: list[bytes]) -> None:
        super().__init__(address)
        self.images = images

    async def ask(self, image: int) -> str:
        status, _, body = await self.post(self.images[image])
        if status != 200:
            raise RuntimeError(status)
        return first_name(body)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(name: str, weights: str, device: str, packages: Path | None, options: list[str]) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address and process id."""
    port = free_port()
    if name == OURS:
        command = [
            sys.executable,
            "-m",
            "vitrail",
            "serve",
            weights,
            "--port",
            str(port),
            "--device",
            device,
            "--no-watch",
            *options,
        ]
    else:
        command = [sys.executable, str(HANDLERS), name, weights, "--port", str(port), "--device", device]
    paths = [*([str(packages)] if packages and name != OURS else []), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        wait_until_ready(process, port)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # of the session that was started above, with LitServe's workers
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    """Until the server accepts connections."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            lines = process.stderr.read().decode(errors="replace").strip().splitlines()
            raise UserError(f"The server did not start: {lines[-1] if lines else 'no message'}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise UserError(f"The server did not start within {START_SECONDS} seconds.")


class InProcessClient:
    """Ours without HTTP: the pool that decodes and the batcher."""

    def __init__(self, images: list[bytes], served: Any, batcher: Any, pool: ThreadPoolExecutor) -> None:
        from vitrail.deploy.served_model import Input, Operation

        self.images, self.served, self.batcher, self.pool = images, served, batcher, pool
        self.key, self.make_input = (served, Operation("predict")), Input

    def prepare(self, content: bytes) -> Any:
        return self.make_input(self.served.preprocess(decode(content, self.served.decode_side)))

    async def ask(self, image: int) -> str:
        with self.batcher.admit(1) as places:
            item = await asyncio.get_running_loop().run_in_executor(self.pool, self.prepare, self.images[image])
            (future,) = places.submit(self.key, [item], time.monotonic() + 60)
            probabilities = await asyncio.wrap_future(future)
        return str(self.served.class_name(int(probabilities.argmax())))

    def close(self) -> None:
        pass


class PlainClient:
    """A handler without HTTP that does one image at a time, as `async def` handlers do."""

    def __init__(self, images: list[bytes], classifier: Any) -> None:
        self.images, self.classifier = images, classifier

    async def ask(self, image: int) -> str:
        await asyncio.sleep(0)
        return str(self.classifier.predict(self.classifier.read(self.images[image])[None])[0]["classes"][0]["name"])

    def close(self) -> None:
        pass


def compare_in_process(arguments: argparse.Namespace, images: list[bytes], expected: list[str]) -> dict[str, dict[int, Result]]:
    import torch
    from serve_handlers import Classifier

    from vitrail.deploy.batching import Batcher
    from vitrail.deploy.model_set import DEFAULT, ModelFile, ModelSet
    from vitrail.deploy.served_model import default_pool_threads, limit_threads

    models = ModelSet([ModelFile(DEFAULT, arguments.weights)], arguments.device, arguments.precision, log=show)
    threads = torch.get_num_threads()
    batcher = Batcher(lambda key, inputs: key[0].compute(key[1], inputs), start=lambda: limit_threads(threads))
    pool = ThreadPoolExecutor(default_pool_threads(), initializer=lambda: limit_threads(1))
    classifier, served = Classifier(arguments.weights, arguments.device), models.find(None)
    makers: dict[str, Callable[[], Any]] = {
        "batcher": lambda: InProcessClient(images, served, batcher, pool),
        "plain handler": lambda: PlainClient(images, classifier),
    }
    results: dict[str, dict[int, Result]] = {name: {} for name in makers}
    for round_number in range(arguments.rounds):
        for name in rotate(list(makers), round_number):
            for clients in arguments.clients:
                show(f"round {round_number + 1} of {arguments.rounds}: {name}, {clients} clients")
                add(results[name], clients, asyncio.run(measure(makers[name], clients, arguments.seconds, expected)))
    batcher.close()
    return results


def compare_servers(arguments: argparse.Namespace, images: list[bytes], expected: list[str]) -> dict[str, dict[int, Result]]:
    if arguments.packages:
        sys.path.insert(0, str(arguments.packages))
    missing = [name for name, package in OTHERS.items() if find_spec(package) is None]
    for name in missing:
        show(f"{name} is left out: {OTHERS[name]} is not installed; give --packages FOLDER")
    names = [OURS, *(name for name in OTHERS if name not in missing)]
    results: dict[str, dict[int, Result]] = {name: {} for name in names}
    options = ["--precision", arguments.precision]
    for round_number in range(arguments.rounds):
        for name in rotate(list(results), round_number):
            try:
                with running(name, arguments.weights, arguments.device, arguments.packages, options) as (address, session):
                    measure_server(results[name], name, address, session, round_number, arguments, images, expected)
            except UserError as error:
                if name == OURS:
                    raise
                show(f"{name} is left out: {error}")
                del results[name]
    return results


def measure_server(
    results: dict[int, Result],
    name: str,
    address: str,
    session: int,
    round_number: int,
    arguments: argparse.Namespace,
    images: list[bytes],
    expected: list[str],
) -> None:
    def make_client() -> HttpClient:
        return HttpClient(address, images)

    deadline = time.monotonic() + START_SECONDS
    while not asyncio.run(measure(make_client, 4, 2.0, expected)).latencies:  # warm up; LitServe listens before it is ready
        if time.monotonic() > deadline:
            raise UserError(f"The server did not answer within {START_SECONDS} seconds.")
    for clients in arguments.clients:
        show(f"round {round_number + 1} of {arguments.rounds}: {name}, {clients} clients")
        before = cpu_seconds(session)
        found = asyncio.run(measure(make_client, clients, arguments.seconds, expected))
        found.cpu_seconds = (cpu_seconds(session) - before) * found.share
        add(results, clients, found)


def cpu_seconds(session: int) -> float:
    """CPU time of all processes of a session, which other programs on the machine do not increase by their own."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def add(results: dict[int, Result], clients: int, found: Result) -> None:
    total = results.setdefault(clients, Result())
    total.seconds += found.seconds
    total.latencies += found.latencies
    total.errors += found.errors
    total.agreement += found.agreement
    total.cpu_seconds += found.cpu_seconds


def rotate(names: list[str], by: int) -> list[str]:
    return names[by % len(names) :] + names[: by % len(names)]


def print_results(results: dict[str, dict[int, Result]], arguments: argparse.Namespace) -> None:
    where = machine(arguments.device)
    print(f"\n{where}; {arguments.weights}, {arguments.precision}; {IMAGES} JPEG images, shorter side {SIDE}; "
          f"n = {arguments.rounds} rounds of {arguments.seconds:g} s\n")  # fmt: skip
    print("| server | clients | images/s | p50 ms | p95 ms | p99 ms | CPU ms/image | requests | errors | same top-1 |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, by_clients in results.items():
        for clients, result in by_clients.items():
            times = " | ".join(f"{1000 * result.percentile(q):.1f}" for q in (50, 95, 99))
            same = 100 * result.agreement / max(len(result.latencies), 1)
            count = len(result.latencies)
            cpu = f"{1000 * result.cpu_seconds / count:.1f}" if result.cpu_seconds and count else ""
            values = (name, clients, f"{result.rate:.1f}", times, cpu, count, result.errors, f"{same:.1f} %")
            print(f"| {' | '.join(map(str, values))} |")
    ours, *others = results
    print()
    for other in others:
        ratios = [
            f"{clients} clients {mine.rate / theirs.rate:.2f}x ({mine.percentile(99) / theirs.percentile(99):.2f}x)"
            for clients, mine in results[ours].items()
            if (theirs := results[other][clients]).rate
        ]
        print(f"{ours} / {other}, throughput (p99): {', '.join(ratios)}")


def soak(arguments: argparse.Namespace, images: list[bytes], expected: list[str]) -> None:
    """Minutes of requests with numbers: memory, and answers that are lost, duplicated or those of other requests."""
    with running(OURS, arguments.weights, arguments.device, None, ["--precision", arguments.precision]) as (address, process):
        counts, memory = asyncio.run(send_numbered(address, process, images, expected, 60 * arguments.soak))
    settled = memory[len(memory) // 5 :]  # after the first fifth, in which memory pools fill
    growth = statistics.mean(settled[-len(settled) // 5 :]) - statistics.mean(settled[: max(len(settled) // 5, 1)])
    print(f"\n{arguments.soak:g} minutes, {SOAK_CLIENTS} clients: " + ", ".join(f"{v:,} {k}" for k, v in counts.items()))
    print(f"memory of the server after the first fifth: {min(settled):.0f} to {max(settled):.0f} MB, growth {growth:+.1f} MB")


async def send_numbered(
    address: str, process: int, images: list[bytes], expected: list[str], seconds: float
) -> tuple[dict[str, int], list[float]]:
    counts = dict.fromkeys(("sent", "answered", "lost", "of another request", "wrong", "duplicated"), 0)
    end, memory, seen = time.monotonic() + seconds, [], set()

    async def run(client: int) -> None:
        connection, number = Connection(address), 0
        while time.monotonic() < end and counts["sent"] < MAX_REQUESTS:
            number += 1
            image, identifier = (client * 7 + number) % len(images), f"{client}-{number}"
            counts["sent"] += 1
            try:
                status, headers, body = await asyncio.wait_for(connection.post(images[image], identifier), 60)
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
                counts["lost"] += 1
                connection.close()
                continue
            counts["answered"] += 1
            counts["of another request"] += headers.get("x-request-id") != identifier
            counts["wrong"] += status != 200 or first_name(body) != expected[image]
            counts["duplicated"] += identifier in seen or bool(connection.reader and connection.reader._buffer)  # type: ignore[attr-defined]
            seen.add(identifier)
        connection.close()

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(resident_megabytes(process))
            if len(memory) % 30 == 1:
                show(f"{end - time.monotonic():.0f} s left, {counts['answered']:,} answers, {memory[-1]:.0f} MB")
            await asyncio.sleep(min(1.0, seconds / 20))

    await asyncio.gather(watch(), *map(run, range(SOAK_CLIENTS)))
    return counts, memory


SOAK_CLIENTS = 8


def resident_megabytes(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def show(message: str) -> None:
    print(message, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="vitrail_tiny")
    parser.add_argument("--clients", type=positive, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="per measurement")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="of ours; others: float32")
    parser.add_argument("--packages", type=Path, help="a folder with fastapi and litserve")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--in-process", action="store_true", help="without HTTP")
    arguments = parser.parse_args()
    if not 0.1 <= arguments.seconds <= 600 or not 0 <= arguments.soak <= 24 * 60 or max(arguments.clients) > 1000:
        raise UserError("Give 0.1 to 600 seconds, at most 24 hours of soak and at most 1,000 clients.")
    if not arguments.in_process and find_spec("starlette") is None:
        raise UserError("The server needs starlette and uvicorn, which are not installed: give --in-process.")
    import vitrail

    images = make_images()
    predictions = vitrail.predict(
        arguments.weights, [Image.open(io.BytesIO(each)) for each in images], top=1, device=arguments.device
    )
    expected = [each.name for each in predictions]
    if arguments.soak:
        soak(arguments, images, expected)
    elif arguments.in_process:
        print_results(compare_in_process(arguments, images, expected), arguments)
    else:
        print_results(compare_servers(arguments, images, expected), arguments)


if __name__ == "__main__":
    run_program(main)
