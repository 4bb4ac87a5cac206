"""Exact search in an index of images, ours and faiss-cpu's IndexFlatIP, timed in turns in one process; prints a Markdown table.

    python benchmarks/search.py                                     # 100,000 random unit vectors of 256 numbers
    python benchmarks/search.py --count 1000 --width 16 --rounds 1  # in miniature

faiss is used where it is installed. "build" is the time to make the vectors searchable, and for ours also to write the file and
to read it again with its checks. Recall is measured against products in float64; equal similarities count as right. The
embedding of the images, which takes much longer, is not included: `vitrail index` prints its images per second.
"""

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from arguments import positive, run_program
from timing import machine
from torch import Tensor
from torch.nn import functional as F

from vitrail.evaluation.image_index import ImageIndex, search
from vitrail.evaluation.index_file import load_index, save_index


def measure_recall(vectors: Tensor, queries: Tensor, rows: Tensor) -> float:
    """The share of the k results whose similarity, in float64, is at least that of the k-th of all."""
    found, k = 0, rows.shape[1]
    for query, own in zip(queries.double(), rows, strict=True):
        scores = vectors.double() @ query
        found += int((scores[own] >= scores.topk(k).values[-1] - 1e-7).sum())
    return found / rows.numel()


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=positive, default=100_000)
    parser.add_argument("--width", type=positive, default=256)
    parser.add_argument("--k", type=positive, default=10)
    parser.add_argument("--queries", type=positive, nargs="+", default=[1, 10, 100, 1000], help="at a time")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--checked", type=positive, default=20, help="queries whose recall is measured")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    vectors = F.normalize(torch.randn(options.count, options.width), dim=1)
    faiss: Any = importlib.import_module("faiss") if importlib.util.find_spec("faiss") else None
    print(f"{machine('cpu')}, {options.threads} threads; {options.count:,} vectors of {options.width}, k {options.k}; ", end="")
    print(f"median of n = {options.rounds} rounds in turns; faiss {faiss.__version__ if faiss else 'is not installed'}")

    index = ImageIndex(vectors, [""] * options.count, [b""] * options.count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vectors.index")
        written, _ = timed(lambda: save_index(index, path))
        read, index = timed(lambda: load_index(path))
    print(f"\nours: written in {written:.2f} s, read and checked in {read:.2f} s")
    flat = None
    if faiss is not None:
        faiss.omp_set_num_threads(options.threads)
        flat = faiss.IndexFlatIP(options.width)
        print(f"faiss: built in {timed(lambda: flat.add(vectors.numpy()))[0]:.2f} s, in memory")

    print("\n| queries at a time | ours, ms | faiss, ms | faiss / ours (min to max) | recall of ours |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for count in options.queries:
        queries = F.normalize(torch.randn(count, options.width), dim=1)
        own: list[float] = []
        others: list[float] = []
        rows = search(index.vectors, queries, options.k)[1]
        for _ in range(options.rounds):
            own.append(timed(partial(search, index.vectors, queries, options.k))[0])
            if flat is not None:
                others.append(timed(partial(flat.search, queries.numpy(), options.k))[0])
        recall = measure_recall(vectors, queries[: options.checked], rows[: options.checked])
        ratios = sorted(theirs / ours for theirs, ours in zip(others, own, strict=False))
        compared = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else ""
        theirs = f"{1e3 * statistics.median(others):.2f}" if others else ""
        print(f"| {count} | {1e3 * statistics.median(own):.2f} | {theirs} | {compared} | {recall:.4f} |", flush=True)


if __name__ == "__main__":
    run_program(main)
