"""Writes `vitrail/checkpoints/bundled/NAME.safetensors`, the bundled weights: the best weights of a run in half precision.

    python tools/bundle_weights.py runs/tiny-imagenet vitrail_tiny

Parameters become float16, which halves the file; running statistics of norms are not changed. The file has the metadata of
the run (classes, preprocessing, recipe, metrics, data, machine and validation curve). The largest difference of the logits by
the rounding is printed. `--data` is the public name of the data.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints import bundled, load
from vitrail.checkpoints.artifact import save_tensors
from vitrail.checkpoints.bundled import NAMES
from vitrail.checkpoints.model_io import logit_difference
from vitrail.errors import UserError

LIMIT = 12_000_000  # bytes, the size limit of bundled weights


def history(run: Path, data: str) -> dict[str, Any]:
    """Metadata of a run directory: the data, the machine, accuracy and loss of every validation."""
    if not (run / "run.json").exists():
        return {}
    metadata = json.loads((run / "run.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    data_info = {name: metadata["data"][name] for name in ("train", "validation", "fingerprint")}
    curve = [[line["epoch"], line["top1"], round(line["loss"], 4)] for line in lines if line["kind"] == "validation"]
    provenance = {name: metadata[name] for name in ("versions", "started", "seconds", "steps")} | {
        "device": metadata["machine"]["device"]
    }
    provenance["code"] = metadata.get("code")  # the commit of Vitrail that trained it
    return {"data": {"name": data or metadata["data"]["name"]} | data_info, "made": provenance, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="a run directory, or its weights")
    parser.add_argument("name", choices=list(NAMES))
    parser.add_argument("--data", default="", help="name of the data; default: that of the run")
    parser.add_argument("--out", type=Path, help="default: the bundled file")
    options = parser.parse_args()
    out = options.out or Path(bundled.__file__).with_name(f"{options.name}.safetensors")
    model = load(options.weights)
    statistics = {name for name, _ in model.named_buffers()}
    tensors = {
        name: tensor if name in statistics or not tensor.is_floating_point() else tensor.to(torch.float16)
        for name, tensor in model.state_dict().items()
    }
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} has values that float16 cannot represent.")
    model.name = options.name
    save_tensors(
        out, model, tensors, {name: json.dumps(value) for name, value in history(Path(options.weights), options.data).items()}
    )
    size = out.stat().st_size
    print(f"SHA-256, for vitrail/checkpoints/bundled/__init__.py: {hashlib.sha256(out.read_bytes()).hexdigest()}")
    difference, largest = logit_difference(model, load(out))
    print(f"{out}: {size / 1e6:.2f} MB; largest logit difference {difference:.2g} (largest logit {largest:.3g})")
    if size > LIMIT:
        raise UserError(f"The file has more than {LIMIT / 1e6:g} MB: too large for bundled weights.")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"bundle_weights.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
