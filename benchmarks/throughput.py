"""Images per second, Vitrail beside timm in one process: inference and training step, bfloat16, compiled or not.

    python benchmarks/throughput.py --compile            # needs a GPU and timm
    python benchmarks/throughput.py deit_small_patch16 --device cpu --batch 8 --rounds 3

Each round times both in turn; the table gives the median of the rounds, the spread, the ratio of the medians, and the share
of the device's peak that the multiply-adds of the model alone would take (forward 1x, training step 3x).
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from timing import half_spread, in_turns, machine

import vitrail
from vitrail.models.cost import cost
from vitrail.training.speed import device_peak

NAMES = {  # ours -> timm's
    "deit_small_patch16": "deit_small_patch16_224",
    "vit_base_patch16": "vit_base_patch16_224",
    "deit3_base_patch16": "deit3_base_patch16_224",
    "cait_s24": "cait_s24_224",
    "resmlp_s24": "resmlp_24_224",
    "vit_small_patch16_18x2": "vit_small_patch16_18x2_224",
    "vit_base_r50_s16": "vit_base_r50_s16_224",
    "patchconvnet_s60": None,
    "lvvit_s": None,
}


def runner(model, image, train: bool, compiled: bool, device: str):
    model = model.to(device).train(train)
    forward = torch.compile(model) if compiled else model

    def run():
        with torch.autocast(device, torch.bfloat16), torch.set_grad_enabled(train):
            output = forward(image)
            output = output[0] if isinstance(output, tuple) else output
        if train:
            output.float().square().mean().backward()
            for parameter in model.parameters():
                parameter.grad = None

    return run


def measure(name: str, options: argparse.Namespace, train: bool) -> dict:
    import timm

    ours = vitrail.create(name)
    size = ours.architecture.image_size
    image = torch.randn(options.batch, 3, *size, device=options.device)
    runs = {"vitrail": runner(ours, image, train, options.compile, options.device)}
    if NAMES.get(name):
        runs["timm"] = runner(timm.create_model(NAMES[name]), image, train, options.compile, options.device)
    times = in_turns(runs, options.device, options.rounds, options.repeats)
    rates = {key: [options.batch / seconds for seconds in values] for key, values in times.items()}
    row = {"model": name, "mode": "train" if train else "infer", "compile": options.compile, "batch": options.batch}
    for key, values in rates.items():
        row[key] = statistics.median(values)
        row[f"{key}_spread"] = half_spread(values)
    if "timm" in row:
        row["ratio"] = row["vitrail"] / row["timm"]
    peak = device_peak(torch.device(options.device))
    if peak:
        row["of_peak"] = row["vitrail"] * cost(ours.architecture).macs * 2 * (3 if train else 1) / peak
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = machine(options.device)
    print(f"{device}; n = {options.rounds} rounds of {options.repeats}; bfloat16 autocast")
    rows = []
    for name in options.names:
        for train in (False, True):
            row = measure(name, options, train)
            rows.append(row)
            text = f"{name:24} {row['mode']:5} vitrail {row['vitrail']:8.0f}/s ±{row['vitrail_spread']:.1%}"
            if "timm" in row:
                text += f"  timm {row['timm']:8.0f}/s ±{row['timm_spread']:.1%}  ratio {row['ratio']:.3f}"
            print(text + (f"  {row['of_peak']:.0%} of peak" if "of_peak" in row else ""), flush=True)
            if options.out:
                options.out.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
