"""Where the time of a step goes on a GPU: milliseconds of its kernels by kind, and the longest of them.

    python benchmarks/kernels.py deit_small_patch16 --task train --batch 256
    python benchmarks/kernels.py cait_s24 --task inference --batch 256 --longest 20

A step is one of `vitrail bench --mode own`. Times are those of torch's profiler, the mean of three steps.
"""

import argparse
from collections import defaultdict

import torch
from asking import positive, run_program
from torch.profiler import ProfilerActivity, profile

from vitrail.bench.candidates import open_contender
from vitrail.bench.output import headline
from vitrail.bench.settings import all_settings
from vitrail.bench.timing import machine
from vitrail.bench.workloads import make_run
from vitrail.errors import UserError
from vitrail.training.distributed import begin, choose_device

STEPS = 3
KINDS = {  # words in a kernel's name, the first that fits
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
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--task", choices=("inference", "train"), default="train")
    parser.add_argument("--batch", type=positive, default=256)
    parser.add_argument("--longest", type=positive, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("There is no GPU that torch can use here, and it is its kernels that are timed.")
    device = begin(choose_device("cuda"))
    contenders = [open_contender(name) for name in options.names]
    print(f"{headline(machine(device))}; {options.task}, batch {options.batch}, bf16; mean of {STEPS} steps")
    setting = all_settings([options.task], ["bf16"], ["own"], [options.batch])[0]
    for contender in contenders:
        run = make_run(contender, setting, device)
        for _ in range(4):
            run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                run()
            torch.cuda.synchronize()
        times: dict[str, list[float]] = defaultdict(list)
        for event in found.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name].append(event.time_range.elapsed_us() / 1e3 / STEPS)
        kinds: dict[str, float] = defaultdict(float)
        for kernel, each in times.items():
            kinds[kind_of(kernel)] += sum(each)
        print(f"\n{contender.name}: {sum(kinds.values()):.2f} ms of kernels")
        print("  ".join(f"{kind} {time:.2f}" for kind, time in sorted(kinds.items(), key=lambda pair: -pair[1])))
        for kernel, each in sorted(times.items(), key=lambda pair: -sum(pair[1]))[: options.longest]:
            print(f"{sum(each):9.2f} ms {len(each) / STEPS:6.0f} x  {kernel[:100]}")
        del run
        torch.compiler.reset()


if __name__ == "__main__":
    run_program(main)
