"""The load of `benchmarks/serve.py`: clients, throughput and latency of a server, and numbered requests for the soak."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

MAX_REQUESTS = 1_000_000  # of all clients in one measurement
SOAK_CLIENTS = 8
REQUEST_SECONDS = 60
FAILURES = (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, RuntimeError)  # of a request


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

    def add(self, other: "Result") -> None:
        self.seconds += other.seconds
        self.latencies += other.latencies
        self.errors += other.errors
        self.agreement += other.agreement
        self.cpu_seconds += other.cpu_seconds

    def to_dict(self) -> dict[str, float | int | None]:
        """The columns of the table; None where there is no answer, or no CPU time."""
        count = len(self.latencies)
        times = {f"p{q}_ms": 1000 * self.percentile(q) if count else None for q in (50, 95, 99)}
        cpu = 1000 * self.cpu_seconds / count if self.cpu_seconds and count else None
        same = self.agreement / count if count else None
        counts = {"requests": count, "errors": self.errors, "same_top1": same}
        return {"images_per_second": self.rate, **times, "cpu_ms_per_image": cpu, **counts}


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


class HttpClient(Connection):
    def __init__(self, address: str, images: list[bytes]) -> None:
        super().__init__(address)
        self.images = images

    async def ask(self, image: int) -> str:
        status, _, body = await self.post(self.images[image])
        if status != 200:
            raise RuntimeError(status)
        return first_name(body)


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
                name = await asyncio.wait_for(client.ask(image), REQUEST_SECONDS)
            except FAILURES:
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


async def send_numbered(
    address: str, process: int, images: list[bytes], expected: list[str], seconds: float, show: Callable[[str], object]
) -> tuple[dict[str, int], list[float]]:
    """What became of numbered requests, and the memory of the server in MB every second. A request with an error is lost."""
    counts = dict.fromkeys(("sent", "answered", "lost", "of another request", "wrong", "duplicated"), 0)
    end, memory, seen = time.monotonic() + seconds, [], set()

    async def run(client: int) -> None:
        connection, number = Connection(address), 0
        while time.monotonic() < end and counts["sent"] < MAX_REQUESTS:
            number += 1
            image, identifier = (client * 7 + number) % len(images), f"{client}-{number}"
            counts["sent"] += 1
            try:
                status, headers, body = await asyncio.wait_for(connection.post(images[image], identifier), REQUEST_SECONDS)
                if status != 200:
                    raise RuntimeError(status)
            except FAILURES:
                counts["lost"] += 1
                connection.close()
                continue
            counts["answered"] += 1
            counts["of another request"] += headers.get("x-request-id") != identifier
            counts["wrong"] += first_name(body) != expected[image]
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


def resident_megabytes(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
