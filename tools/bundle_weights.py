"""Writes `vitrail/checkpoints/bundled/NAME.safetensors`: the best weights of a run in half precision, as they ship.

    python tools/bundle_weights.py runs/tiny-imagenet vitrail_tiny

Matrices and vectors become float16, which halves the file; running statistics of norms stay as they are. What the run says of
itself (classes, preprocessing, recipe, result; its data, machine and curve) goes along, and the largest difference that the
rounding makes is printed. `--data` is the name of the data that users will know it by.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints import bundled, load
from vitrail.checkpoints.bundled import NAMES
from vitrail.checkpoints.model_io import save_tensors
from vitrail.checkpoints.parity import logit_difference
from vitrail.errors import UserError

LIMIT = 12_000_000  # bytes that a package may carry for a first run


def history(run: Path, data: str) -> dict[str, Any]:
    """What the folder of a run knows beside the weights: the data, the machine, accuracy and loss of every validation."""
    if not (run / "run.json").exists():
        return {}
    facts = json.loads((run / "run.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    known = {name: facts["data"][name] for name in ("train", "validation", "fingerprint")}
    curve = [[line["epoch"], line["top1"], round(line["loss"], 4)] for line in lines if line["kind"] == "validation"]
    made = {name: facts[name] for name in ("versions", "started", "seconds", "steps")} | {"device": facts["machine"]["device"]}
    made["code"] = facts.get("code")  # the commit of Vitrail that trained it
    return {"data": {"name": data or facts["data"]["name"]} | known, "made": made, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="the folder of a run, or its weights")
    parser.add_argument("name", choices=list(NAMES))
    parser.add_argument("--data", default="", help="what to call the data")
    parser.add_argument("--out", type=Path, help="another file than the one that ships")
    given = parser.parse_args()
    out = given.out or Path(bundled.__file__).with_name(f"{given.name}.safetensors")
    model = load(given.weights)
    statistics = {name for name, _ in model.named_buffers()}
    tensors = {
        name: tensor if name in statistics or not tensor.is_floating_point() else tensor.to(torch.float16)
        for name, tensor in model.state_dict().items()
    }
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} has numbers that float16 cannot hold.")
    model.name = given.name
    save_tensors(
        out, model, tensors, {name: json.dumps(value) for name, value in history(Path(given.weights), given.data).items()}
    )
    size = out.stat().st_size
    print(f"SHA-256, for vitrail/checkpoints/bundled/__init__.py: {hashlib.sha256(out.read_bytes()).hexdigest()}")
    difference, largest = logit_difference(model, load(out))
    print(f"{out}: {size / 1e6:.2f} MB; largest logit difference {difference:.2g} (largest logit {largest:.3g})")
    if size > LIMIT:
        raise UserError(f"That is more than {LIMIT / 1e6:g} MB: too large to ship.")


if __name__ == "__main__":
    try:
        main()
    except UserError as problem:
        print(f"bundle_weights.py: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
