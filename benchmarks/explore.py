"""Answers of the explorer's server over HTTP: the first forward pass of an image, then the attention of one patch at a time.

    python benchmarks/explore.py                                 # the figures in docs/how-to/explore.md
    python benchmarks/explore.py --models deit3_small_patch16 --requests 500 --threads 2

For each model a real server runs in this process and one client asks for random blocks and patches of one image, one request
after the other, as a moving pointer does. Weights of models that are not bundled are random, which changes no time. The table has
milliseconds: of the first request, with its forward pass, and quantiles of the others; and the size of an answer.
"""

import argparse
import http.client
import time
from urllib.parse import urlsplit

import numpy as np
import torch
from arguments import positive, run_program

import vitrail
from vitrail.bench.output import describe_machine
from vitrail.bench.timing import machine
from vitrail.explore.explored_model import ExploredModel, to_jpeg
from vitrail.explore.explorer import Explorer
from vitrail.explore.routes import make_routes
from vitrail.web.server import make_app, running_server
from vitrail.web.uploads import Upload

MODELS = ("vitrail_tiny", "deit_tiny_patch16", "deit3_small_patch16", "deit3_base_patch16")
QUANTILES = (0.5, 0.9, 0.99, 1.0)
LIMIT = 100.0  # milliseconds


def open_explored(name: str) -> ExploredModel:
    model = vitrail.load(name) if name == "vitrail_tiny" else vitrail.create(name, classes=1000)
    return ExploredModel(model, name)


def measure(name: str, requests: int, seed: int) -> str:
    """One row of the table."""
    rng = np.random.default_rng(seed)
    explored = open_explored(name)
    explorer = Explorer([explored], None)
    (key,) = explorer.add([Upload("noise", to_jpeg(rng.integers(0, 256, (480, 640, 3), dtype=np.uint8)))])
    patches = explored.grid[0] * explored.grid[1]
    milliseconds, size = [], 0
    with running_server(make_app(make_routes(explorer, name))) as address:
        connection = http.client.HTTPConnection(urlsplit(address).netloc)

        def ask(path: str) -> float:
            nonlocal size
            start = time.perf_counter()
            connection.request("GET", path)
            response = connection.getresponse()
            size = len(response.read())
            assert response.status == 200
            return 1000 * (time.perf_counter() - start)

        first = ask(f"/api/predictions?model=0&image={key}")
        for _ in range(requests):
            layer, query = rng.choice(explored.layers), rng.integers(patches)
            milliseconds.append(ask(f"/api/attention?model=0&image={key}&layer={layer}&query={query}"))
        connection.close()
    quantiles = np.quantile(milliseconds, QUANTILES)
    late = sum(value > LIMIT for value in milliseconds)
    return f"{name:<22} {first:8.1f} " + "".join(f"{value:9.1f}" for value in quantiles) + f" {late:9} {size:9,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--requests", type=positive, default=300)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{describe_machine(machine(torch.device('cpu')))}; {arguments.requests} requests per model, milliseconds")
    print(f"{'model':<22} {'forward':>8}    median      90 %      99 %   slowest  > 100 ms     bytes")
    for name in arguments.models:
        print(measure(name, arguments.requests, arguments.seed), flush=True)


if __name__ == "__main__":
    run_program(main)
