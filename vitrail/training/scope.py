"""Which weights are trained; the others are frozen and have neither gradients nor optimizer state."""

import re

from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import parse_scope

NORM_PARAMETER = re.compile(r"(^|\.)norm\d*\.[^.]+$")


def apply_scope(model: VisionTransformer, scope: str) -> int:
    """Freeze all parameters outside the scope; returns the number of trainable parameters.

    Parameters that the architecture freezes stay frozen. The classifier is always trained, with its hidden layer (`pre_logits`).
    `attention` and `ffn` train those weights of every block (in every branch) and the position embedding, which a new image size
    changes; `norm` trains every norm layer, `last_norm` (FixRes) the last of them; `last:n` trains the last n blocks and all that
    follows them.
    A BatchNorm that is not trained keeps its statistics too (`batch_norm.py: frozen_norms`).
    """
    kind, count = parse_scope(scope)
    depth = len(model.layers)
    if kind in ("attention", "ffn") and not model.blocks:
        raise UserError(
            f"init.scope={scope} trains transformer blocks, and {model.name or 'this model'} is a convnet: give norm, last_norm, "
            "last:n, head or full."
        )
    norms = [name.rpartition(".")[0] for name, _ in model.named_parameters() if NORM_PARAMETER.search(name)]
    if count > depth:
        raise UserError(f"init.scope={scope} exceeds the depth of the model, {depth} blocks: give last:{depth}, or full.")

    def is_trained(name: str) -> bool:
        parts = name.split(".")
        if kind == "full" or parts[0].startswith(("head", "pre_logits")):
            return True
        if kind == "attention":
            return parts[0] == "pos_embed" or (".mix." in name and ".body." in name) or ".attention." in name
        if kind == "ffn":
            return parts[0] == "pos_embed" or (".ffn." in name and ("body" in parts or parts[0] == "pooling"))
        if kind == "norm":
            return any(part.startswith("norm") for part in parts)
        if kind == "last_norm":
            return name.rpartition(".")[0] in norms[-1:]
        if kind == "last":
            if model.architecture.convnet and parts[:2] == ["stem", "blocks"]:
                return int(parts[2]) >= depth - count
            own = len(model.blocks)
            return int(parts[1]) >= own - count if parts[0] == "blocks" else parts[0] in ("norm", "pooling")
        return False

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and is_trained(name))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
