"""Which weights a training changes; the rest is frozen and costs neither gradients nor optimizer state."""

from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import parse_scope


def apply_scope(model: VisionTransformer, scope: str) -> int:
    """Freeze what lies outside the scope; the number of parameters that stay trained. What the architecture froze stays so.

    The classifier is always trained. `attention` and `ffn` are those weights of every block (of every branch of it) and, since
    a new size changes them, the positions; `norm` is every norm; `last:n` is the last n blocks and all that follows
    them, and refused where there are fewer.
    """
    kind, count = parse_scope(scope)
    depth = len(model.blocks)
    if count > depth:
        raise UserError(f"init.scope={scope} is more than this network has, {depth} blocks: give last:{depth}, or full.")

    def inside(name: str) -> bool:
        parts = name.split(".")
        if kind == "full" or parts[0].startswith("head"):
            return True
        if kind == "attention":
            return parts[0] == "pos_embed" or (".mix." in name and ".body." in name) or ".attention." in name
        if kind == "ffn":
            return parts[0] == "pos_embed" or (".ffn." in name and ("body" in parts or parts[0] == "pooling"))
        if kind == "norm":
            return any(part.startswith("norm") for part in parts)
        if kind == "last":
            return int(parts[1]) >= depth - count if parts[0] == "blocks" else parts[0] in ("norm", "pooling", "pre_logits")
        return False

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and inside(name))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
