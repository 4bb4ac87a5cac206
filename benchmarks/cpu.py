"""Inference on a processor: `vitrail.optimize` beside transformers and onnxruntime with the same weights; tables in Markdown.

    python benchmarks/cpu.py --out cpu.json                                # DeiT-S beside the others, batches 1, 8 and 32
    python benchmarks/cpu.py --alone                                       # further models, ours only
    python benchmarks/cpu.py deit_tiny_patch16 --batches 1 --precisions int8 --rounds 3
    python benchmarks/cpu.py --processor-time                              # one thread, on a machine that others use, too

Others take part where they are installed: `pip install transformers onnxruntime onnx onnxscript`. timm is not among them: it does
not import beside the CPU build of torch. onnxruntime has no products in bfloat16 on a processor.

In every round each contender runs once unmeasured and then several times measured, and each round another one begins. Printed are
the median of the rounds, half the interquartile range, and the median over the rounds of best other in the precision / ours.
The floor is the longer of two times: all multiply-adds at the pace of one large product, and the weights once through memory.
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
from asking import check_file, positive, run_program
from torch import Tensor

import vitrail
from vitrail.atomic_files import write_aside
from vitrail.bench.timing import enough_repeats, machine, summarize
from vitrail.deploy.parity import difference
from vitrail.models.flops import cost
from vitrail.models.registry import lookup

ALONE = ("deit_tiny_patch16", "deit_small_patch16", "resmlp_s12", "cait_xxs24", "patchconvnet_s60")
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS, PLAIN = "ours", "ours, plain"
Run = Callable[[], Any]
CPU = torch.device("cpu")
CLOCK = [time.perf_counter]


def timed(run: Run, repeats: int = 1) -> float:
    """Seconds per run, by the clock on the wall or, where `--processor-time` is asked for, of this process."""
    start = CLOCK[0]()
    for _ in range(repeats):
        run()
    return (CLOCK[0]() - start) / repeats


def steady(run: Run) -> float:
    """The median of five rounds."""
    timed(run)
    repeats = enough_repeats(timed(run))
    return summarize([timed(run, repeats) for _ in range(5)]).median


def measure_ceiling() -> tuple[dict[str, float], float]:
    """Operations per second of products of 2048 x 2048 by oneDNN in each precision, bytes per second read from memory."""
    side, found = 2048, {}
    for name, dtype in DTYPES.items():
        left, right = (torch.randn(side, side, dtype=dtype) for _ in range(2))
        packed = torch.ops.mkldnn._reorder_linear_weight(right, side)
        run = lambda x=left, w=packed: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")  # noqa: E731
        found[name] = 2.0 * side**3 / steady(run)
    left8 = torch.randint(0, 255, (side, side), dtype=torch.uint8)
    right8 = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 127, (side, side), dtype=torch.int8), [side, side])
    scales, zeros = torch.ones(side), torch.zeros(side, dtype=torch.int32)
    behind = (None, 1.0, 0, torch.float32, "none", [], "")
    run8 = lambda: torch.ops.onednn.qlinear_pointwise(left8, 1.0, 128, right8, scales, zeros, *behind)  # noqa: E731
    found["int8"] = 2.0 * side**3 / steady(run8)
    source = torch.ones(1 << 26)
    return found, source.nbytes / steady(source.sum)


class Others:
    """transformers' network with our weights, and onnxruntime's sessions made of it."""

    def __init__(self, model: vitrail.VisionTransformer, threads: int):
        self.sessions: dict[str, Any] = {}
        self.network = None
        if not find_spec("transformers"):
            print("transformers is not installed and takes no part.")
            return
        from transformers import AutoModelForImageClassification

        with tempfile.TemporaryDirectory() as folder:
            vitrail.save(model, Path(folder) / "hf", format="hf")
            self.network = AutoModelForImageClassification.from_pretrained(Path(folder) / "hf").eval()
            if not all(find_spec(name) for name in ("onnxruntime", "onnx", "onnxscript")):
                print("onnxruntime, onnx or onnxscript is not installed; onnxruntime takes no part.")
                return
            self._open_sessions(Path(folder), model.architecture.image_size, threads)

    def _open_sessions(self, folder: Path, size: tuple[int, int], threads: int) -> None:
        import onnx
        import onnxruntime
        from onnxruntime import quantization as coding

        plain, fresh = folder / "plain.onnx", {0: torch.export.Dim("batch", min=1, max=256)}
        image = torch.randn(2, 3, *size)
        told: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
        torch.onnx.export(self.network, (image,), plain, input_names=["image"], dynamic_shapes=(fresh,), **told)
        graph = onnx.load(plain)
        del graph.graph.value_info[:]  # shapes from before the exporter turned the classifier's weight around
        onnx.save(graph, plain)
        coding.quantize_dynamic(plain, folder / "dynamic.onnx", per_channel=True, weight_type=coding.QuantType.QInt8)

        class Images(coding.CalibrationDataReader):
            def __init__(self) -> None:
                self.rest = [{"image": torch.randn(2, 3, *size).numpy()} for _ in range(4)]

            def get_next(self) -> dict | None:
                return self.rest.pop() if self.rest else None

        kinds = {"weight_type": coding.QuantType.QInt8, "activation_type": coding.QuantType.QUInt8}
        which = {"op_types_to_quantize": ["MatMul", "Gemm"], "extra_options": {"MatMulConstBOnly": True}}
        form = coding.QuantFormat.QDQ
        coding.quantize_static(plain, folder / "static.onnx", Images(), form, per_channel=True, **kinds, **which)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        for name in ("plain", "dynamic", "static"):
            path = folder / f"{name}.onnx"
            self.sessions[name] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def runs(self, precision: str, image: Tensor) -> dict[str, Run]:
        found: dict[str, Run] = {}
        if self.network is not None and precision in DTYPES:
            network, given = copy.deepcopy(self.network).to(DTYPES[precision]), image.to(DTYPES[precision])
            found["transformers"] = lambda: network(given).logits
        kinds, array = {"fp32": ("plain",), "int8": ("dynamic", "static")}.get(precision, ()), image.numpy()
        for kind in kinds:
            if kind in self.sessions:
                session = self.sessions[kind]
                name = "onnxruntime" if kind == "plain" else f"onnxruntime, {kind}"
                found[name] = lambda session=session: torch.from_numpy(session.run(None, {"image": array})[0])
        return found


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of one run of each contender in every round."""
    for run in runs.values():
        timed(run, 2)
    repeats = {name: enough_repeats(timed(run)) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            runs[name]()  # threads of the one before go to sleep
            times[name].append(timed(runs[name], repeats[name]))
    return times


def contenders(model: vitrail.VisionTransformer, precision: str, image: Tensor, others: Others | None) -> dict[str, Run]:
    """Ours first; those of the others that answer as our plain model does."""
    optimized = vitrail.optimize(model, "latency" if len(image) == 1 else "throughput", precision=precision, example=image[:8])
    runs: dict[str, Run] = {OURS: lambda: optimized(image)}
    if precision in DTYPES:
        own = DTYPES[precision]
        plain, given = vitrail.create(model.name, device="meta").to_empty(device="cpu"), image.to(own)
        plain.load_state_dict(model.state_dict())
        plain.to(own).eval()
        runs[PLAIN] = lambda: plain(given)
    expected = model(image)
    for name, run in (others.runs(precision, image) if others else {}).items():
        apart = difference(run(), expected)
        if not apart < {"fp32": 1e-3, "bf16": 0.1, "int8": 0.5}[precision]:
            raise SystemExit(f"{name} is another function in {precision}: {apart:.1e} of the largest logit apart")
        runs[name] = run
    return runs


def measure(
    model: vitrail.VisionTransformer,
    batch: int,
    precision: str,
    rounds: int,
    others: Others | None,
    ceiling: tuple[dict[str, float], float],
) -> list[dict]:
    torch.manual_seed(0)
    image = torch.randn(batch, model.architecture.channels, *model.architecture.image_size)
    times = in_turns(contenders(model, precision, image, others), rounds)
    with torch.enable_grad():  # the counter follows gradients, too
        price = cost(model.architecture)
    floor = max(2.0 * batch * price.macs / ceiling[0][precision], BYTES[precision] * price.parameters / ceiling[1])
    rivals = [values for name, values in times.items() if name not in (OURS, PLAIN)]
    rows = []
    for name, values in times.items():
        found = summarize(values)
        row = {"model": model.name, "batch": batch, "precision": precision, "by": name, "milliseconds": 1e3 * found.median}
        row |= {"spread": found.spread, "rounds": found.n, "floor": 1e3 * floor, "ratio": None, "ratio_spread": None}
        if name == OURS and rivals:
            ratio = summarize([min(each) / own for own, *each in zip(values, *rivals, strict=True)])
            row |= {"ratio": ratio.median, "ratio_spread": ratio.spread}
        rows.append(row)
    return rows


def show(row: dict) -> str:
    name = f"`{row['model']}` | {row['batch']} | {row['precision']} | {row['by']}"
    speed = (
        f"{row['milliseconds']:.1f} ±{row['spread']:.1%} | {1e3 * row['batch'] / row['milliseconds']:.1f} | {row['floor']:.1f}"
    )
    ratio = f"{row['ratio']:.2f} ±{row['ratio_spread']:.1%}" if row["ratio"] else ""
    return f"| {name} | {speed} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--alone", action="store_true", help="ours only")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--precisions", nargs="+", choices=tuple(BYTES), default=list(BYTES))
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--threads", type=positive, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--processor-time", action="store_true", help="of one thread, instead of the clock's")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.names or (ALONE if options.alone else ("deit_small_patch16",))
    for name in names:
        lookup(name)
    check_file(options.out)
    if options.processor_time:
        options.threads, CLOCK[0] = 1, time.process_time
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    facts, begun = machine(CPU), time.time()
    ceiling = measure_ceiling()
    threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
    print(f"{facts['device']}, {threads}; torch {facts['torch']}; load {os.getloadavg()[0]:.2f} before;", end=" ")
    clock = "; processor time" if options.processor_time else ""
    print(f"n = {options.rounds} rounds in turns; median, ± half the interquartile range{clock}")
    print("ceiling: " + ", ".join(f"{rate / 1e9:.0f} GFLOP/s {name}" for name, rate in ceiling[0].items()), end=", ")
    print(f"{ceiling[1] / 1e9:.1f} GB/s read\n")
    print("| model | batch | precision | by | ms | images/s | floor, ms | best other / ours |\n" + "| --- " * 8 + "|", flush=True)
    rows: list[dict] = []
    for name in names:
        torch.manual_seed(0)
        model = vitrail.create(name).eval()
        model.head.weight.normal_(0.0, 0.5) if hasattr(model.head, "weight") else None  # a fresh head says nothing
        others = None if options.alone else Others(model, options.threads)
        for batch in options.batches:
            for precision in options.precisions:
                for row in measure(model, batch, precision, options.rounds, others, ceiling):
                    rows.append(row)
                    print(show(row), flush=True)
                if options.out:
                    text = json.dumps(
                        {"machine": facts, "seconds": time.time() - begun, "ceiling": ceiling, "rows": rows}, indent=1
                    )
                    write_aside(options.out, lambda path, text=text: path.write_text(text))


if __name__ == "__main__":
    run_program(main)
