"""Cost of a model: parameters, multiply-adds as counted in papers, activation memory, tokens.

The model runs on fake tensors, without computing anything, and its operators are counted.
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from vitrail.formatting import format_bytes
from vitrail.models.config import Architecture, format_size
from vitrail.models.registry import build, model_pages
from vitrail.models.vision_transformer import VisionTransformer


class Cost(NamedTuple):
    """Cost of a forward pass of one image."""

    image_size: tuple[int, int]
    tokens: int  # tokens in the blocks, prefix tokens included
    parameters: int
    macs: int  # multiply-adds of matrix products and convolutions, one image
    flops: int  # macs + 5 per LayerNorm element + 1 per element of a mean over tokens, as in the tables of later papers
    activation_bytes: int  # stored for the backward pass, one image, float32

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()


ATEN = torch.ops.aten
BATCH = 2  # BatchNorm needs more than one image
# The counter reports two operations per multiply-add, so these single operations are doubled.
SINGLE = {
    ATEN.native_layer_norm: lambda shape, *args, **kwargs: 2 * 5 * math.prod(shape),
    ATEN.mean: lambda shape, *args, **kwargs: 2 * math.prod(shape) * (len(shape) == 3),  # of tokens, not of filters
}


def attention(query: Sequence[int], key: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Two products [T, d] x [d, keys] per head."""
    return 2 * 2 * math.prod(query) * key[-2]


def cost_of(model: VisionTransformer) -> Cost:
    """The cost of a model at its image size; its parameters include those of the head of a task, the other numbers do not."""
    return cost(model.architecture)._replace(parameters=sum(parameter.numel() for parameter in model.parameters()))


@cache
def cost(architecture: Architecture) -> Cost:
    """The cost of one image at the image size of the architecture.

    Blocks are equal, so every count is affine in the depth: it is extrapolated from two shallow models.
    """
    a = architecture
    if a.depth <= 5 or a.class_token_at:
        return count(a)
    depth = 2 + a.depth % 2  # axial blocks come in pairs
    shallow, deeper = count(a.replace(depth=depth)), count(a.replace(depth=depth + 2))
    deep = [one + (two - one) * (a.depth - depth) // 2 for one, two in zip(shallow[1:], deeper[1:], strict=True)]
    return Cost(a.image_size, *deep)


def count(architecture: Architecture) -> Cost:
    """The cost of a forward pass, counted operator by operator."""
    deterministic = architecture.replace(drop_path=0.0, dropout=0.0, attention_dropout=0.0)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    model = build(deterministic, name="-", device="meta").train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        image = torch.empty(BATCH, architecture.channels, *architecture.image_size)
        mapping = SINGLE | {ATEN._scaled_dot_product_flash_attention_for_cpu: attention}
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:  # noqa: SIM117
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model.classify(model.features(image))  # with the final norm of all patches, as papers count
    counts = {op: total // (2 * BATCH) for op, total in counter.get_flop_counts()["Global"].items()}
    single = sum(number for op, number in counts.items() if op in SINGLE)
    macs = sum(counts.values()) - single
    return Cost(
        image_size=architecture.image_size,
        tokens=model.grid[0] * model.grid[1] + architecture.num_prefix_tokens,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        macs=macs,
        flops=macs + single,
        activation_bytes=sum(storage.nbytes() for cdata, storage in kept.items() if cdata not in parameters) // BATCH,
    )


def show(value: int) -> str:
    """12345678 as 12.3 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            digits = 2 if value < 10 * size else 1
            return f"{value / size:.{digits}f} {unit}"
    return str(value)


def row(name: str, cost: Cost) -> list[str]:
    """One row of the table of models."""
    memory = format_bytes(cost.activation_bytes)
    return [name, format_size(cost.image_size), str(cost.tokens), show(cost.parameters), show(cost.macs), memory]


TABLE = Path(__file__).with_name("costs.json")


@cache
def known_costs() -> dict[str, Cost]:
    """The cost of every registered model at its own image size, read from a file so that listing is fast."""
    rows = json.loads(TABLE.read_text())
    return {name: Cost(tuple(size), *numbers) for name, (size, *numbers) in rows.items()}


if __name__ == "__main__":  # python -m vitrail.models.flops: update the file after a change of the pages
    lines = [f"  {json.dumps(name)}: {json.dumps(cost(page.MODELS[name]))}" for name, page in model_pages().items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
