"""Relevance maps by name: which parts of an image a prediction depends on, for every architecture of the catalogue."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording, record, without_autocast
from vitrail.interpret.evidence import evidence_of, has_patch_logits, input_gradient, occlusion
from vitrail.interpret.rollout import class_tokens, gradient_attention, pooled_queries, rollout_of
from vitrail.layers.attention import ATTENTION
from vitrail.models.config import Architecture
from vitrail.models.vision_transformer import VisionTransformer

MASS = 0.6  # of the attention of a head, which `threshold_mass` keeps


class Method(NamedTuple):
    """One way to compute a map."""

    compute: Callable[[Recording, Tensor], Tensor]  # a recording and classes [B] to a map [B, rows, columns], not negative
    missing: Callable[[Architecture], str]  # what the architecture lacks for it, or ""
    description: str
    gradients: bool = False


def attention_map(recording: Recording, layer: int = -1, head: int | None = None, classes: Tensor | None = None) -> Tensor:
    """The attention of one layer and head (default: the mean of all) from the pooled token to the patches: [B, rows, columns].

    The pooled token is the class token or the query of the pooling; with mean pooling the map is the mean over all patches,
    with a distillation token that of the tokens which `fusion` uses.
    """
    heads = attention_maps(recording, layer, classes)
    if head is not None and not -heads.shape[1] <= head < heads.shape[1]:
        raise UserError(f"Head {head} does not exist: layer {layer} has {heads.shape[1]} heads, 0 being the first.")
    return heads.mean(1) if head is None else heads[:, head]


@without_autocast()
def attention_maps(recording: Recording, layer: int = -1, classes: Tensor | None = None) -> Tensor:
    """The attention of every head of a layer from the pooled token to the patches: [B, heads, rows, columns].

    A query per class is the one of `classes` [B], by default of the predicted ones.
    """
    layer = recording.layer_index(layer)
    prefix = recording.prefix_of(layer)
    if recording.is_pooling(layer):
        chosen = pooled_queries(recording, recording.logits.argmax(1) if classes is None else classes)
        rows = torch.einsum("bs,bhst->bht", chosen, recording.attention_rows(layer))
    elif prefix and recording.model.architecture.pooling == "class":
        rows = torch.einsum("p,bhpt->bht", class_tokens(recording, prefix), recording.attention_rows(layer, range(prefix)))
    else:  # mean pooling, blocks before the class token is prepended, and blocks before a pooling with queries
        parts = [weights[:, :, index >= prefix].sum(2) for index, weights in recording.row_chunks(layer)]
        rows = torch.stack(parts).sum(0) / (recording.grid[0] * recording.grid[1])
    out: Tensor = rows[..., prefix:].unflatten(-1, recording.grid)
    return out


def class_attention(recording: Recording, classes: Tensor) -> Tensor:
    """The attention of the first block of the pooling, averaged over the heads (CaiT Fig. 7, PatchConvNet Figs 5.5 and 5.6)."""
    return attention_map(recording, len(recording.blocks), classes=classes)


def threshold_mass(maps: Tensor, mass: float = MASS) -> Tensor:
    """Which patches of [..., rows, columns] hold the given part of the sum, the largest first (DINO's thresholded heads)."""
    flat = maps.flatten(-2)
    values, order = flat.sort(dim=-1, descending=True)
    before = (values.cumsum(-1) - values) / values.sum(-1, keepdim=True)  # the sum of the larger ones
    out: Tensor = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, order, before < mass).unflatten(-1, maps.shape[-2:])
    return out


def thresholded_heads(recording: Recording, classes: Tensor) -> Tensor:
    """The share of heads of the last layer whose largest attention weights, up to 60% of their sum, include a patch."""
    return threshold_mass(attention_maps(recording, -1, classes)).float().mean(1)


def attention_layers(a: Architecture) -> bool:
    return a.depth > 0 and a.mixer in (*ATTENTION, "axial")


def lacks_attention(a: Architecture) -> str:
    return "" if attention_layers(a) or a.pooling in ("class_attention", "per_class") else "this model has no attention"


def lacks_last_attention(a: Architecture) -> str:
    return lacks_attention(a) or ("the last layer of this model has no attention" if a.pooling == "class_mlp" else "")


def lacks_rollout(a: Architecture) -> str:
    return lacks_last_attention(a) or ("" if attention_layers(a) else "the blocks of this model have no attention")


def lacks_class_attention(a: Architecture) -> str:
    return "" if a.pooling in ("class_attention", "per_class") else f"this model has the pooling {a.pooling!r}"


def lacks_patch_logits(a: Architecture) -> str:
    return "" if has_patch_logits(a) else "its classifier does not give logits of patches"


def lacks_classifier(a: Architecture) -> str:
    return "" if a.classes else "this model has no classifier"


def lacks_gradient_attention(a: Architecture) -> str:
    return lacks_last_attention(a) or lacks_classifier(a)


# The default order, see docs/how-to/explain.md for what supports it; occlusion last: it needs up to 64 forward passes.
METHODS = {
    "class_attention": Method(class_attention, lacks_class_attention, "attention of the class query to the patches"),
    "gradient_attention": Method(
        gradient_attention, lacks_gradient_attention, "attention weighted with its gradient, through all blocks", gradients=True
    ),
    "attention": Method(
        lambda recording, classes: attention_map(recording, classes=classes),
        lacks_last_attention,
        "attention of the last layer, mean of the heads",
    ),
    "rollout": Method(rollout_of, lacks_rollout, "attention rollout through all blocks"),
    "thresholded_heads": Method(thresholded_heads, lacks_last_attention, "heads of the last layer, 60% of their attention"),
    "evidence": Method(
        lambda recording, classes: evidence_of(recording, classes).clamp(min=0), lacks_patch_logits, "logit of each patch"
    ),
    "input_gradient": Method(input_gradient, lacks_classifier, "input x gradient", gradients=True),
    "occlusion": Method(occlusion, lacks_classifier, "fall of the log-probability where a part is hidden"),
}


def available_methods(model: VisionTransformer) -> list[str]:
    """The methods that this architecture supports, in the default order."""
    return [name for name, method in METHODS.items() if not method.missing(model.architecture)]


def default_methods(model: VisionTransformer) -> list[str]:
    """The methods of `vitrail explain`: the first three that need at most one forward and one backward pass."""
    found = [name for name in available_methods(model) if name != "occlusion"][:3]
    if not found:
        raise UserError(
            "This model has no classifier, and its last layer no attention to show instead: train a classifier with "
            "`vitrail train --from`."
        )
    return found


def relevance_map(model: VisionTransformer, images: Tensor, method: str, classes: Tensor | None = None) -> Tensor:
    """How relevant each patch is for `classes` [B] (default: the predicted ones): images [B, 3, H, W] to [B, rows, columns].

    `method` is one of `available_methods(model)`, or `attention:LAYER` or `attention:LAYER:HEAD`. Values are not negative.
    """
    check_method(model, method)
    return compute_map(record(model, images, needs_gradients(method)), method, classes)


@without_autocast()
def compute_map(recording: Recording, method: str, classes: Tensor | None = None) -> Tensor:
    """`relevance_map` of a recorded forward pass."""
    name, layer, head = parse_method(method)
    chosen = recording.logits.argmax(1) if classes is None else classes.to(recording.images.device)
    if layer is not None:
        return attention_map(recording, layer, head, chosen)
    return METHODS[name].compute(recording, chosen).detach()


def needs_gradients(method: str) -> bool:
    return METHODS[parse_method(method)[0]].gradients


def check_method(model: VisionTransformer, method: str) -> None:
    """Raise UserError, with the reason, if this model does not support a method."""
    name, layer, _ = parse_method(method)
    missing = METHODS[name].missing if layer is None else lacks_attention
    if reason := missing(model.architecture):
        others = ", ".join(available_methods(model)) or "none"
        raise UserError(f"The method {name} is not available: {reason}. Available: {others}.")


def parse_method(method: str) -> tuple[str, int | None, int | None]:
    """Name, layer and head of `rollout`, `attention`, `attention:3` or `attention:3:1`."""
    match = re.fullmatch(r"(\w+)(?::(-?\d{1,4}))?(?::(-?\d{1,4}))?", method)
    if match is None or match[1] not in METHODS:
        raise UserError(
            f"The method {method!r} is not known: choose from {', '.join(METHODS)}, attention:LAYER, attention:LAYER:HEAD."
        )
    if match[2] and match[1] != "attention":
        raise UserError(f"The method {match[1]} uses all its layers: only the method attention has a layer and a head to choose.")
    return match[1], int(match[2]) if match[2] else None, int(match[3]) if match[3] else None


def resize_map(maps: Tensor, recording: Recording, mode: str = "bilinear") -> Tensor:
    """Maps [B, rows, columns] at the size of the images; pixels that no patch covers have no relevance, 0."""
    (height, width), size = recording.covered, recording.images.shape[-2:]
    return F.pad(
        F.interpolate(maps[:, None].float(), (height, width), mode=mode)[:, 0], (0, size[1] - width, 0, size[0] - height)
    )
