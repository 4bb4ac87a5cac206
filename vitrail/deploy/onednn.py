"""Pack a folded network for a processor: products by oneDNN, weights laid out once, in float32, bfloat16 or eight bits."""

import torch
from torch import Tensor, nn

from vitrail.deploy.cpu_kernels import LANES, Native, native, why_not
from vitrail.deploy.fold import Notes
from vitrail.deploy.folded_layers import AttentionReadout, Folded, FoldedResidual, WideAttention, WideFeedForward
from vitrail.deploy.onednn_layers import (
    NOTHING,
    Behind,
    CodedLinear,
    CodedNorm,
    PackedAttention,
    PackedFeedForward,
    PackedLinear,
    PackedPatches,
    PackedResidual,
    Product,
)
from vitrail.deploy.quantize import Steps, learn_steps
from vitrail.layers.patch_embed import LinearStem
from vitrail.layers.pos_embed import RELATIVE

SMALLEST = 32  # inputs and outputs of a product; smaller ones gain nothing
PRODUCTS = "products with weights laid out for the processor"
CODED = "products in eight bits"
ATTENTIONS = "attentions by a kernel compiled for this processor"


def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch has oneDNN here, for products in this precision."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    half = dtype == torch.bfloat16
    return dtype == torch.float32 or (half and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def can_code() -> bool:
    """Whether torch has oneDNN's products in eight bits here."""
    return can_pack(torch.float32) and "onednn" in torch.backends.quantized.supported_engines


def pack(folded: Folded, notes: Notes, images: Tensor | None = None) -> None:
    """Rewrite a folded network in its own precision, or in eight bits learned from images [B, K, height, width]."""
    packer = Packer(folded, notes)
    if images is not None:
        packer.learn(images)
    packer.rewrite()


class Packer:
    """One network on its way; it is changed in place."""

    def __init__(self, folded: Folded, notes: Notes):
        self.folded, self.notes = folded, notes
        a, (height, width) = folded.trunk.architecture, folded.trunk.grid
        self.rows = height * width + a.trunk_tokens
        self.dtype = next(folded.parameters()).dtype
        self.half = can_pack(torch.bfloat16)
        self.steps: dict[nn.Linear, Steps] = {}
        self.native: Native | None = native()
        if self.native is None:
            notes.leave(f"attention by a kernel of our own: {why_not()}")

    def learn(self, images: Tensor) -> None:
        """Eight bits for the products of the blocks; patches come in and logits go out in more."""
        parts = list(self.folded.trunk.blocks.modules())
        watched: dict[nn.Linear, nn.Module] = {part: part for part in parts if type(part) is nn.Linear and large(part)}
        # Where only some tokens ask, the layer itself is never called; its attention is given the same.
        watched |= {part.qkv: part for part in parts if isinstance(part, WideAttention) and part.only and part.qkv in watched}
        self.steps = dict(zip(watched, learn_steps(self.folded, list(watched.values()), images), strict=True))

    def rewrite(self) -> None:
        self._rewrite_stem()
        for module in list(self.folded.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, FoldedResidual):
                    setattr(module, name, self._residual(child))
        for module in list(self.folded.modules()):
            for name, child in list(module.named_children()):
                # The pooling takes weights out of its layer.
                if type(child) is nn.Linear and large(child) and not isinstance(module, AttentionReadout):
                    setattr(module, name, self._product(child))

    def _rewrite_stem(self) -> None:
        stem = self.folded.trunk.stem
        if not isinstance(stem, LinearStem) or not isinstance(stem.norm, nn.Identity):
            return
        if not isinstance(stem.activation, nn.Identity):
            return
        dtype = torch.bfloat16 if self.steps and self.half else self.dtype
        weight = stem.proj.weight.flatten(1).to(dtype)
        flat = nn.Linear(weight.shape[1], weight.shape[0], bias=stem.proj.bias is not None, device="meta")
        flat.weight = nn.Parameter(weight, requires_grad=False)
        if stem.proj.bias is not None:
            flat.bias = nn.Parameter(stem.proj.bias.to(dtype), requires_grad=False)
        product = PackedLinear(flat, self.rows)
        self.notes.done[PRODUCTS] += 1
        self.folded.trunk.stem = PackedPatches(product, stem.patch, dtype, self.dtype)  # type: ignore[assignment]

    def _product(self, linear: nn.Linear, dtype: torch.dtype = torch.float32, behind: Behind = NOTHING) -> Product:
        if linear in self.steps:
            self.notes.done[CODED] += 1
            return CodedLinear(linear, self.rows, self.steps[linear], dtype, behind)
        self.notes.done[PRODUCTS] += 1
        return PackedLinear(linear, self.rows, behind)

    def _residual(self, residual: FoldedResidual) -> nn.Module:
        body = residual.bodies[0]
        if len(residual.bodies) > 1:
            return residual
        new: nn.Module
        if isinstance(body, WideAttention) and not body.axis:
            new, first = self._attention(body), body.qkv
        elif isinstance(body, WideFeedForward):
            new, first = self._feed_forward(body), body.fc1
        else:
            return residual
        norm, width = residual.norm, first.in_features
        plain = isinstance(norm, nn.LayerNorm) and norm.weight is None
        if plain and first in self.steps and self.native is not None and width % LANES == 0:
            assert isinstance(norm, nn.LayerNorm)
            norm = CodedNorm(norm, self.steps[first], self.native)
        return PackedResidual(norm, new, residual.post, residual.only)

    def _attention(self, body: WideAttention) -> PackedAttention:
        inner = body.proj.in_features
        size, dtype = inner // (body.branches * body.heads), self.dtype
        if self.native is not None and self.folded.trunk.architecture.pos_embed not in RELATIVE:
            if body.qkv in self.steps and self.native.attends_to(torch.bfloat16, size):
                dtype = torch.bfloat16  # half the time of float32, and finer than the eight bits that come and go
            self.notes.done[ATTENTIONS] += self.native.attends_to(dtype, size)
        query, pair = None, body.qkv
        if body.only:
            query, pair = split_rows(body.qkv, inner)
            if body.qkv in self.steps:
                self.steps[query] = self.steps[pair] = self.steps[body.qkv]
        asking = None if query is None else self._product(query, dtype)
        products = asking, self._product(pair, dtype), self._product(body.proj)
        return PackedAttention(products, body.heads, body.branches, body.scale, body.only, self.native)

    def _feed_forward(self, body: WideFeedForward) -> PackedFeedForward:
        behind = behind_of(body.activation)
        activation = body.activation if behind == NOTHING else nn.Identity()
        if body.fc1 in self.steps and body.fc2 in self.steps and behind != NOTHING:
            self.notes.done[CODED] += 1
            fc1 = CodedLinear(body.fc1, self.rows, self.steps[body.fc1], behind=behind, coded=self.steps[body.fc2])
            return PackedFeedForward(fc1, activation, self._product(body.fc2))
        return PackedFeedForward(self._product(body.fc1, behind=behind), activation, self._product(body.fc2))


def large(linear: nn.Linear) -> bool:
    return min(linear.in_features, linear.out_features) >= SMALLEST


def behind_of(activation: nn.Module) -> Behind:
    """What the library can do behind a product; nothing where it cannot do this activation."""
    if isinstance(activation, nn.GELU):
        return "gelu", activation.approximate
    return ("relu", "") if type(activation) is nn.ReLU else NOTHING


def split_rows(linear: nn.Linear, first: int) -> tuple[nn.Linear, nn.Linear]:
    """A layer as two: its first outputs, and the others."""
    parts = []
    for weight, bias in zip(*(each.tensor_split([first]) for each in (linear.weight, linear.bias)), strict=True):
        part = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        part.weight = nn.Parameter(weight, requires_grad=False)
        part.bias = nn.Parameter(bias, requires_grad=False)
        parts.append(part)
    return parts[0], parts[1]
