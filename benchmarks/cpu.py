"""Inference on a CPU: `vitrail.optimize`, transformers and onnxruntime with the same weights; prints Markdown tables.

    python benchmarks/cpu.py --out cpu.json                                # DeiT-S and the others, batch sizes 1, 8 and 32
    python benchmarks/cpu.py --ours-only                                   # further models, ours only
    python benchmarks/cpu.py deit_tiny_patch16 --batch-sizes 1 --precisions int8 --rounds 3
    python benchmarks/cpu.py --cpu-time                                    # one thread, on a machine with other load

The other libraries are compared if they are installed: `pip install transformers onnxruntime onnx onnxscript`. timm is left
out: it cannot be imported with the CPU build of torch. onnxruntime has no bfloat16 products on a CPU.

In every round each candidate runs once untimed and then several times timed, and each round starts with another one. The
table has the median of the rounds, half the interquartile range, and the median over the rounds of (best other in the
precision / ours). The lower bound is the larger of two times: all multiply-adds at the peak of one large product, and reading
the weights once.
"""

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from arguments import check_file, positive, run_program
from torch import Tensor

import vitrail
from vitrail.atomic_files import atomic_write
from vitrail.bench.timing import choose_repeats, machine, summarize
from vitrail.deploy.parity import difference
from vitrail.models.flops import cost
from vitrail.models.registry import lookup

OURS_ONLY = ("deit_tiny_patch16", "deit_small_patch16", "resmlp_s12", "cait_xxs24", "patchconvnet_s60")
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS, PLAIN = "ours", "ours, plain"
Run = Callable[[], Any]
CPU = torch.device("cpu")
CLOCK = [time.perf_counter]


def time_run(run: Run, repeats: int = 1) -> float:
    """Seconds per run: wall-clock time, or CPU time of this process with `--cpu-time`."""
    start = CLOCK[0]()
    for _ in range(repeats):
        run()
    return (CLOCK[0]() - start) / repeats


def time_when_warm(run: Run) -> float:
    """Seconds per run, the median of five rounds after a warmup."""
    time_run(run)
    repeats = choose_repeats(time_run(run))
    return summarize([time_run(run, repeats) for _ in range(5)]).median


def measure_peak() -> tuple[dict[str, float], float]:
    """FLOP/s of 2048 x 2048 products by oneDNN in each precision, and bytes per second read from memory."""
    side, flops = 2048, {}
    for name, dtype in DTYPES.items():
        left, right = (torch.randn(side, side, dtype=dtype) for _ in range(2))
        packed = torch.ops.mkldnn._reorder_linear_weight(right, side)
        run = lambda x=left, w=packed: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")  # noqa: E731
        flops[name] = 2.0 * side**3 / time_when_warm(run)
    left8 = torch.randint(0, 255, (side, side), dtype=torch.uint8)
    right8 = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 127, (side, side), dtype=torch.int8), [side, side])
    scales, zeros = torch.ones(side), torch.zeros(side, dtype=torch.int32)
    epilogue = (None, 1.0, 0, torch.float32, "none", [], "")
    run8 = lambda: torch.ops.onednn.qlinear_pointwise(left8, 1.0, 128, right8, scales, zeros, *epilogue)  # noqa: E731
    flops["int8"] = 2.0 * side**3 / time_when_warm(run8)
    source = torch.ones(1 << 26)
    return flops, source.nbytes / time_when_warm(source.sum)


class Others:
    """The network of transformers with our weights, and onnxruntime sessions exported from it."""

    def __init__(self, model: vitrail.VisionTransformer, threads: int):
        self.sessions: dict[str, Any] = {}
        self.network = None
        if not find_spec("transformers"):
            print("transformers is not installed: it is not compared.")
            return
        from transformers import AutoModelForImageClassification

        with tempfile.TemporaryDirectory() as folder:
            vitrail.save(model, Path(folder) / "hf", format="hf")
            self.network = AutoModelForImageClassification.from_pretrained(Path(folder) / "hf").eval()
            if not all(find_spec(name) for name in ("onnxruntime", "onnx", "onnxscript")):
                print("onnxruntime, onnx or onnxscript is not installed: onnxruntime is not compared.")
                return
            self._open_sessions(Path(folder), model.architecture.image_size, threads)

    def _open_sessions(self, folder: Path, size: tuple[int, int], threads: int) -> None:
        import onnx
        import onnxruntime
        from onnxruntime import quantization

        plain, dynamic_batch = folder / "plain.onnx", {0: torch.export.Dim("batch", min=1, max=256)}
        image = torch.randn(2, 3, *size)
        options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
        torch.onnx.export(self.network, (image,), plain, input_names=["image"], dynamic_shapes=(dynamic_batch,), **options)
        graph = onnx.load(plain)
        del graph.graph.value_info[:]  # shapes from before the exporter transposed the weight of the classifier
        onnx.save(graph, plain)
        quantization.quantize_dynamic(plain, folder / "dynamic.onnx", per_channel=True, weight_type=quantization.QuantType.QInt8)

        class RandomImages(quantization.CalibrationDataReader):
            def __init__(self) -> None:
                self.remaining = [{"image": torch.randn(2, 3, *size).numpy()} for _ in range(4)]

            def get_next(self) -> dict | None:
                return self.remaining.pop() if self.remaining else None

        types = {"weight_type": quantization.QuantType.QInt8, "activation_type": quantization.QuantType.QUInt8}
        operators = {"op_types_to_quantize": ["MatMul", "Gemm"], "extra_options": {"MatMulConstBOnly": True}}
        form = quantization.QuantFormat.QDQ
        quantization.quantize_static(plain, folder / "static.onnx", RandomImages(), form, per_channel=True, **types, **operators)
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = threads
        for name in ("plain", "dynamic", "static"):
            path = folder / f"{name}.onnx"
            self.sessions[name] = onnxruntime.InferenceSession(path, session_options, providers=["CPUExecutionProvider"])

    def runs(self, precision: str, image: Tensor) -> dict[str, Run]:
        runs: dict[str, Run] = {}
        if self.network is not None and precision in DTYPES:
            network, inputs = copy.deepcopy(self.network).to(DTYPES[precision]), image.to(DTYPES[precision])
            runs["transformers"] = lambda: network(inputs).logits
        kinds, array = {"fp32": ("plain",), "int8": ("dynamic", "static")}.get(precision, ()), image.numpy()
        for kind in kinds:
            if kind in self.sessions:
                session = self.sessions[kind]
                name = "onnxruntime" if kind == "plain" else f"onnxruntime, {kind}"
                runs[name] = lambda session=session: torch.from_numpy(session.run(None, {"image": array})[0])
        return runs


def time_rounds(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds per run of each candidate in every round."""
    for run in runs.values():
        time_run(run, 2)
    repeats = {name: choose_repeats(time_run(run)) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            runs[name]()  # lets the threads of the previous library go to sleep
            times[name].append(time_run(runs[name], repeats[name]))
    return times


def make_candidates(model: vitrail.VisionTransformer, precision: str, image: Tensor, others: Others | None) -> dict[str, Run]:
    """Our runs first, then those of the other libraries; all must give the same logits."""
    optimized = vitrail.optimize(model, "latency" if len(image) == 1 else "throughput", precision=precision, example=image[:8])
    runs: dict[str, Run] = {OURS: lambda: optimized(image)}
    if precision in DTYPES:
        dtype = DTYPES[precision]
        plain, inputs = vitrail.create(model.name, device="meta").to_empty(device="cpu"), image.to(dtype)
        plain.load_state_dict(model.state_dict())
        plain.to(dtype).eval()
        runs[PLAIN] = lambda: plain(inputs)
    expected = model(image)
    for name, run in (others.runs(precision, image) if others else {}).items():
        error = difference(run(), expected)
        if not error < {"fp32": 1e-3, "bf16": 0.1, "int8": 0.5}[precision]:
            raise SystemExit(f"the logits of {name} in {precision} differ by {error:.1e} of the largest")
        runs[name] = run
    return runs


def measure(
    model: vitrail.VisionTransformer,
    batch_size: int,
    precision: str,
    rounds: int,
    others: Others | None,
    peak: tuple[dict[str, float], float],
) -> list[dict]:
    torch.manual_seed(0)
    image = torch.randn(batch_size, model.architecture.channels, *model.architecture.image_size)
    times = time_rounds(make_candidates(model, precision, image, others), rounds)
    with torch.enable_grad():  # cost() also counts the backward pass
        model_cost = cost(model.architecture)
    lower_bound = max(2.0 * batch_size * model_cost.macs / peak[0][precision], BYTES[precision] * model_cost.parameters / peak[1])
    others_times = [values for name, values in times.items() if name not in (OURS, PLAIN)]
    rows = []
    for name, values in times.items():
        summary = summarize(values)
        row = {
            "model": model.name,
            "batch_size": batch_size,
            "precision": precision,
            "by": name,
            "milliseconds": 1e3 * summary.median,
        }
        row |= {
            "spread": summary.spread,
            "rounds": summary.n,
            "lower_bound": 1e3 * lower_bound,
            "ratio": None,
            "ratio_spread": None,
        }
        if name == OURS and others_times:
            ratio = summarize([min(each) / own for own, *each in zip(values, *others_times, strict=True)])
            row |= {"ratio": ratio.median, "ratio_spread": ratio.spread}
        rows.append(row)
    return rows


def show(row: dict) -> str:
    name = f"`{row['model']}` | {row['batch_size']} | {row['precision']} | {row['by']}"
    images_per_second = 1e3 * row["batch_size"] / row["milliseconds"]
    speed = f"{row['milliseconds']:.1f} ±{row['spread']:.1%} | {images_per_second:.1f} | {row['lower_bound']:.1f}"
    ratio = f"{row['ratio']:.2f} ±{row['ratio_spread']:.1%}" if row["ratio"] else ""
    return f"| {name} | {speed} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ours-only", action="store_true", help="do not compare with other libraries")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--precisions", nargs="+", choices=tuple(BYTES), default=list(BYTES))
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--threads", type=positive, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread instead of wall-clock time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.names or (OURS_ONLY if options.ours_only else ("deit_small_patch16",))
    for name in names:
        lookup(name)
    check_file(options.out)
    if options.cpu_time:
        options.threads, CLOCK[0] = 1, time.process_time
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    info, started = machine(CPU), time.time()
    peak = measure_peak()
    threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
    print(f"{info['device']}, {threads}; torch {info['torch']}; load average {os.getloadavg()[0]:.2f};", end=" ")
    clock = "; CPU time" if options.cpu_time else ""
    print(f"n = {options.rounds} interleaved rounds; median ± half the interquartile range{clock}")
    print("peak: " + ", ".join(f"{flops / 1e9:.0f} GFLOP/s {name}" for name, flops in peak[0].items()), end=", ")
    print(f"{peak[1] / 1e9:.1f} GB/s read\n")
    print(
        "| model | batch size | precision | by | ms | images/s | lower bound, ms | best other / ours |\n" + "| --- " * 8 + "|",
        flush=True,
    )
    rows: list[dict] = []
    for name in names:
        torch.manual_seed(0)
        model = vitrail.create(name).eval()
        model.head.weight.normal_(0.0, 0.5) if hasattr(model.head, "weight") else None  # a new head gives zero logits
        others = None if options.ours_only else Others(model, options.threads)
        for batch_size in options.batch_sizes:
            for precision in options.precisions:
                for row in measure(model, batch_size, precision, options.rounds, others, peak):
                    rows.append(row)
                    print(show(row), flush=True)
                if options.out:
                    text = json.dumps({"machine": info, "seconds": time.time() - started, "peak": peak, "rows": rows}, indent=1)
                    atomic_write(options.out, lambda path, text=text: path.write_text(text))


if __name__ == "__main__":
    run_program(main)
