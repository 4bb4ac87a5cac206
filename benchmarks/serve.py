"""Throughput and latency of `vitrail serve` beside other servers with the same weights and images; prints a Markdown table.

    pip install --target packages --no-deps fastapi litserve ...           # the others; they are left out where they are missing
    python benchmarks/serve.py --packages packages                         # 1, 8 and 64 clients, three rounds
    python benchmarks/serve.py --packages packages --precision bf16        # all in bfloat16 instead of float32
    python benchmarks/serve.py --packages packages --device cuda           # LitServe batches on the GPU, too
    python benchmarks/serve.py --packages packages "fastapi, threads" litserve  # two of the others only
    python benchmarks/serve.py --seconds 2 --rounds 1 --clients 8          # short
    python benchmarks/serve.py --soak 30                                   # 30 minutes: memory, lost and duplicated answers
    python benchmarks/serve.py --in-process --device cuda                  # without HTTP: needs no further packages

A client sends its next request when it has the answer to the last one, over one connection to this machine. In every round each
server is started, warmed up and measured with each number of clients; the order rotates. The images are photographs of the
bundled pets, enlarged so that decoding costs what it does for photographs on the web. A latency percentile is over all requests
of all rounds. CPU ms/image is the CPU time of the server's processes, which says something on a busy machine too.

All servers compute in the same precision. "draft" decodes JPEGs at reduced size, as `vitrail serve` does where the image is at
least twice as large as needed. "2 processes" are two servers with half of the threads each, between which the clients are
divided evenly, as an ideal load balancer does. --soak ends with the exit code 1 if an answer was lost, duplicated or another's.
--packages may also contain starlette and uvicorn, which `vitrail serve` needs, where they are not installed.
"""

import argparse
import asyncio
import io
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from arguments import check_file, positive, run_program
from PIL import Image
from serve_load import SOAK_CLIENTS, HttpClient, Result, measure, send_numbered
from timing import machine

from vitrail.atomic_files import atomic_write_text
from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode
from vitrail.errors import UserError

HANDLERS = Path(__file__).with_name("serve_handlers.py")
OURS = "vitrail serve"
IMAGES, SIDE = 64, 500  # number of images and their shorter side
START_SECONDS, STOP_SECONDS = 240, 20  # on a GPU, the start compiles a model and captures graphs of six batch sizes
FATAL = ("lost", "of another request", "duplicated")  # answers of the soak
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Opponent:
    """A server of serve_handlers.py."""

    kind: str
    options: tuple[str, ...] = ()
    processes: int = 1  # between which the clients are divided evenly
    threads: int | None = None  # of torch in each process; None: its default

    @property
    def package(self) -> str:
        return self.kind.partition("-")[0]


def list_opponents(device: str) -> dict[str, Opponent]:
    """The servers by the names of the table; of each package the usual configuration first."""
    half, workers = max(CORES // 2, 1), 2 if device == "cpu" else min(CORES, 8)
    return {
        "fastapi": Opponent("fastapi"),
        "fastapi, threads": Opponent("fastapi-threads", threads=1),
        "fastapi, draft": Opponent("fastapi", ("--draft",)),
        "fastapi, 2 processes": Opponent("fastapi", processes=2, threads=half),
        "fastapi, 2 processes, draft": Opponent("fastapi", ("--draft",), processes=2, threads=half),
        "litserve": Opponent("litserve"),
        f"litserve, {workers} workers, draft": Opponent(
            "litserve", ("--draft", "--workers", str(workers)), threads=max(CORES // workers, 1)
        ),
    }


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(opponent: Opponent | None, arguments: argparse.Namespace) -> Iterator[list[tuple[str, int]]]:
    """The processes of a server, ours if it is None: address and process id of each."""
    with ExitStack() as stack:
        count = opponent.processes if opponent is not None else 1
        yield [stack.enter_context(run_process(opponent, arguments)) for _ in range(count)]


@contextmanager
def run_process(opponent: Opponent | None, arguments: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """One server in a process of its own: its address and process id."""
    port, environment = free_port(), dict(os.environ)
    if arguments.packages:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(arguments.packages), environment.get("PYTHONPATH", "")]))
    options = [arguments.weights, "--port", str(port), "--device", arguments.device, "--precision", arguments.precision]
    if opponent is None:
        command = ["-m", "vitrail", "serve", *options, "--no-watch"]
    else:
        command = [str(HANDLERS), opponent.kind, *options, *opponent.options]
        environment["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin make a server a hundred times slower where a core is busy
        if opponent.threads is not None:
            environment["OMP_NUM_THREADS"] = str(opponent.threads)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
        try:
            wait_until_ready(process, port, log)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            stop_session(process)
        if lines := read_lines(log):
            show(f"the server wrote {len(lines)} lines to stderr, the last one: {lines[-1]}")


def stop_session(process: "subprocess.Popen[bytes]") -> None:
    """End a server and the processes it started, such as LitServe's workers; it may have ended by itself."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: IO[bytes]) -> None:
    """Until the server accepts connections."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"The server did not start: {(read_lines(log) or ['no message'])[-1]}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise UserError(f"The server did not start within {START_SECONDS} seconds.")


def read_lines(log: IO[bytes]) -> list[str]:
    log.seek(0)
    return log.read().decode(errors="replace").strip().splitlines()


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
        return str(self.served.class_names[int(probabilities.argmax())])

    def close(self) -> None:
        pass


class PlainClient:
    """A handler without HTTP, one image at a time as in `async def`, or in a pool of threads."""

    def __init__(self, images: list[bytes], classifier: Any, pool: ThreadPoolExecutor | None) -> None:
        self.images, self.classifier, self.pool = images, classifier, pool

    def predict(self, content: bytes) -> str:
        return str(self.classifier.predict(self.classifier.read(content)[None])[0]["classes"][0]["name"])

    async def ask(self, image: int) -> str:
        if self.pool is not None:
            return await asyncio.get_running_loop().run_in_executor(self.pool, self.predict, self.images[image])
        await asyncio.sleep(0)
        return self.predict(self.images[image])

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
    classifier = Classifier(arguments.weights, arguments.device, arguments.precision, draft=True)
    served = models.find(None)
    makers: dict[str, Callable[[], Any]] = {
        "batcher": lambda: InProcessClient(images, served, batcher, pool),
        "handler": lambda: PlainClient(images, classifier, None),
        "handler, threads": lambda: PlainClient(images, classifier, pool),
    }
    results: dict[str, dict[int, Result]] = {name: {} for name in makers}
    for round_number in range(arguments.rounds):
        for name in rotate(list(makers), round_number):
            for clients in arguments.clients:
                show(f"round {round_number + 1} of {arguments.rounds}: {name}, {clients} clients")
                found = asyncio.run(measure(makers[name], clients, arguments.seconds, expected))
                results[name].setdefault(clients, Result()).add(found)
    batcher.close()
    pool.shutdown()
    return results


def compare_servers(arguments: argparse.Namespace, images: list[bytes], expected: list[str]) -> dict[str, dict[int, Result]]:
    servers: dict[str, Opponent | None] = {OURS: None}
    opponents = list_opponents(arguments.device)
    for name in arguments.others or opponents:
        opponent = opponents[name]
        if find_spec(opponent.package) is not None:
            servers[name] = opponent
        else:
            show(f"{name} is left out: {opponent.package} is not installed; give --packages FOLDER")
    results: dict[str, dict[int, Result]] = {name: {} for name in servers}
    for round_number in range(arguments.rounds):
        for name in rotate(list(results), round_number):
            try:
                with running(servers[name], arguments) as processes:
                    measure_server(results[name], f"round {round_number + 1}: {name}", processes, arguments, images, expected)
                write_rows(results, arguments)
            except UserError as error:
                if name == OURS:
                    raise
                show(f"{name} is left out: {error}")
                del results[name]
    return results


def measure_server(
    results: dict[int, Result],
    title: str,
    processes: list[tuple[str, int]],
    arguments: argparse.Namespace,
    images: list[bytes],
    expected: list[str],
) -> None:
    addresses = itertools.cycle(address for address, _ in processes)
    sessions = {session for _, session in processes}

    def run(clients: int, seconds: float) -> Result:
        return asyncio.run(measure(lambda: HttpClient(next(addresses), images), clients, seconds, expected))

    deadline = time.monotonic() + START_SECONDS
    while not run(4, 0.5).latencies:  # LitServe listens before it is ready
        if time.monotonic() > deadline:
            raise UserError(f"The server did not answer within {START_SECONDS} seconds.")
    run(4, 2.0)  # all processes and workers are ready: warm up
    for clients in arguments.clients:
        show(f"{title}, {clients} clients")
        before = cpu_seconds(sessions)
        found = run(clients, arguments.seconds)
        found.cpu_seconds = (cpu_seconds(sessions) - before) * found.share
        results.setdefault(clients, Result()).add(found)


def cpu_seconds(sessions: set[int]) -> float:
    """CPU time of all processes of these sessions, which other programs on the machine do not increase by their own."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in sessions:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rotate(names: list[str], by: int) -> list[str]:
    return names[by % len(names) :] + names[: by % len(names)]


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": machine(arguments.device),
        "weights": arguments.weights,
        "precision": arguments.precision,
        "shorter_side": SIDE,
        "images": IMAGES,
    }


def write_results(content: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        atomic_write_text(path, json.dumps(content, indent=1))


def write_rows(results: dict[str, dict[int, Result]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table, which are also written to --out."""
    rows: list[dict[str, Any]] = [
        {"server": name, "clients": clients, **result.to_dict()}
        for name, by_clients in results.items()
        for clients, result in by_clients.items()
    ]
    write_results({**settings(arguments), "rounds": arguments.rounds, "seconds": arguments.seconds, "rows": rows}, arguments.out)
    return rows


def report(results: dict[str, dict[int, Result]], arguments: argparse.Namespace) -> None:
    """Print the table and the ratios."""
    facts = settings(arguments)
    print(f"\n{facts['machine']}; {arguments.weights}, {arguments.precision}; {IMAGES} JPEG images, shorter side {SIDE}; "
          f"n = {arguments.rounds} rounds of {arguments.seconds:g} s\n")  # fmt: skip
    print("| server | clients | images/s | p50 ms | p95 ms | p99 ms | CPU ms/image | requests | errors | same top-1 |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in write_rows(results, arguments):
        name, clients, same = row.pop("server"), row.pop("clients"), row.pop("same_top1")
        cells = ["" if value is None else str(value) if isinstance(value, int) else f"{value:.1f}" for value in row.values()]
        print(f"| {' | '.join([name, str(clients), *cells, '' if same is None else f'{100 * same:.1f} %'])} |")
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
    with running(None, arguments) as ((address, process),):
        counts, memory = asyncio.run(send_numbered(address, process, images, expected, 60 * arguments.soak, show))
    settled = memory[len(memory) // 5 :]  # after the first fifth, in which memory pools fill
    growth = statistics.mean(settled[-len(settled) // 5 :]) - statistics.mean(settled[: max(len(settled) // 5, 1)])
    print(f"\n{arguments.soak:g} minutes, {SOAK_CLIENTS} clients: " + ", ".join(f"{v:,} {k}" for k, v in counts.items()))
    print(f"memory of the server after the first fifth: {min(settled):.0f} to {max(settled):.0f} MB, growth {growth:+.1f} MB")
    found = {"minutes": arguments.soak, "clients": SOAK_CLIENTS, **counts}
    found |= {"memory_mb": [min(settled), max(settled)], "growth_mb": growth}
    write_results({**settings(arguments), "soak": found}, arguments.out)
    if any(counts[name] for name in FATAL):
        raise SystemExit(1)


def show(message: str) -> None:
    print(message, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="*", help="names of the servers to compare with, as in the table; default: all")
    parser.add_argument("--weights", default="vitrail_tiny")
    parser.add_argument("--clients", type=positive, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="per measurement")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of all servers")
    parser.add_argument("--packages", type=Path, help="a folder with fastapi, litserve and, where it is not installed, starlette")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--in-process", action="store_true", help="without HTTP")
    parser.add_argument("--out", type=Path, metavar="JSON", help="also write the results here")
    arguments = parser.parse_args()
    if not 0.1 <= arguments.seconds <= 600 or not 0 <= arguments.soak <= 24 * 60 or max(arguments.clients) > 1000:
        raise UserError("Give 0.1 to 600 seconds, at most 24 hours of soak and at most 1,000 clients.")
    if unknown := set(arguments.others) - set(names := list_opponents(arguments.device)):
        raise UserError(f"There is no server {min(unknown)!r}: choose from {'; '.join(names)}.")
    if arguments.packages:
        sys.path.insert(0, str(arguments.packages))
    if not arguments.in_process and find_spec("starlette") is None:
        raise UserError("The server needs starlette and uvicorn, which are not installed: give --packages or --in-process.")
    check_file(arguments.out)
    import vitrail

    images = make_images()
    predictions = vitrail.predict(
        arguments.weights, [Image.open(io.BytesIO(each)) for each in images], top=1, device=arguments.device
    )
    expected = [each.name for each in predictions]
    if arguments.soak:
        soak(arguments, images, expected)
    elif arguments.in_process:
        report(compare_in_process(arguments, images, expected), arguments)
    else:
        report(compare_servers(arguments, images, expected), arguments)


if __name__ == "__main__":
    run_program(main)
