"""GPU kernels of a step: milliseconds by kind, and the slowest kernels.

    python benchmarks/kernels.py deit_small_patch16 --task train --batch-size 256
    python benchmarks/kernels.py cait_s24 --task inference --batch-size 256 --top 20

A step is that of `vitrail bench --mode native`. Times are from the torch profiler, the mean of three steps.
"""

import argparse
from collections import defaultdict

import torch
from arguments import positive, run_program
from torch.profiler import ProfilerActivity, profile

from vitrail.bench.candidates import open_candidate
from vitrail.bench.output import describe_machine
from vitrail.bench.settings import make_settings
from vitrail.bench.timing import machine
from vitrail.bench.workloads import make_run
from vitrail.devices import choose_device, use_device
from vitrail.errors import UserError

STEPS = 3
KINDS = {  # substrings of kernel names; the first match decides
    "attention": ("flash", "fmha", "sdpa", "attention", "dot_do_o"),
    "talking heads": ("query_kernel", "key_kernel", "value_kernel", "talking"),
    "convolutions": ("conv", "wgrad", "dgrad", "fprop"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "optimizer": ("multi_tensor", "adam"),
    "compiled": ("triton",),
    "copies": ("memcpy", "memset", "copy"),
}


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--task", choices=("inference", "train"), default="train")
    parser.add_argument("--batch-size", type=positive, default=256)
    parser.add_argument("--top", type=positive, default=10, help="number of kernels to list")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("This benchmark needs a GPU, and torch finds none.")
    device = use_device(choose_device("cuda"))
    candidates = [open_candidate(name) for name in options.names]
    print(f"{describe_machine(machine(device))}; {options.task}, batch size {options.batch_size}, bf16; mean of {STEPS} steps")
    setting = make_settings([options.task], ["bf16"], ["native"], [options.batch_size])[0]
    for candidate in candidates:
        run = make_run(candidate, setting, device)
        for _ in range(4):
            run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                run()
            torch.cuda.synchronize()
        times: dict[str, list[float]] = defaultdict(list)
        for event in profiler.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name].append(event.time_range.elapsed_us() / 1e3 / STEPS)
        kinds: dict[str, float] = defaultdict(float)
        for kernel, each in times.items():
            kinds[kind_of(kernel)] += sum(each)
        print(f"\n{candidate.name}: {sum(kinds.values()):.2f} ms of kernels")
        print("  ".join(f"{kind} {time:.2f}" for kind, time in sorted(kinds.items(), key=lambda pair: -pair[1])))
        for kernel, each in sorted(times.items(), key=lambda pair: -sum(pair[1]))[: options.top]:
            print(f"{sum(each):9.2f} ms {len(each) / STEPS:6.0f} x  {kernel[:100]}")
        del run
        torch.compiler.reset()


if __name__ == "__main__":
    run_program(main)
