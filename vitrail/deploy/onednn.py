"""Pack a folded network for the CPU: products by oneDNN with prepacked weights, in float32, bfloat16 or int8."""

import torch
from torch import Tensor, nn

from vitrail.deploy.cpu_kernels import LANES, CpuKernels, load_cpu_kernels, unavailable_reason
from vitrail.deploy.fold import Notes, PrecomputedConv
from vitrail.deploy.folded_layers import FoldedAttention, FoldedAttentionPooling, FoldedFeedForward, FoldedModel, FoldedResidual
from vitrail.deploy.onednn_layers import (
    NO_OP,
    Int8Linear,
    Int8Norm,
    PackedAttention,
    PackedConv,
    PackedFeedForward,
    PackedLinear,
    PackedPatches,
    PackedResidual,
    PostOp,
    Product,
)
from vitrail.deploy.quantize import QuantParams, calibrate
from vitrail.layers.patch_embed import LinearStem
from vitrail.layers.pos_embed import RELATIVE

MIN_WIDTH = 32  # of a product; smaller ones gain nothing
PRODUCTS = "products with weights prepacked for oneDNN"
CONVOLUTIONS = "convolutions with weights prepacked for oneDNN"
INT8_PRODUCTS = "products in int8"
ATTENTIONS = "attention layers with the AVX-512 kernel"


def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch has oneDNN products in this dtype here."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    half = dtype == torch.bfloat16
    return dtype == torch.float32 or (half and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def can_quantize() -> bool:
    """Whether torch has oneDNN's int8 products here."""
    return can_pack(torch.float32) and "onednn" in torch.backends.quantized.supported_engines


def pack(folded: FoldedModel, notes: Notes, images: Tensor | None = None) -> None:
    """Rewrite a folded network in its own dtype, or in int8 calibrated on images [B, K, height, width]."""
    packer = Packer(folded, notes)
    if images is not None:
        packer.calibrate(images)
    packer.rewrite()


def pack_skeleton(folded: FoldedModel, int8: bool) -> None:
    """As `pack`, for weights and ranges that come from a file afterwards."""
    packer = Packer(folded, Notes())
    if int8:
        packer.params = dict.fromkeys(packer.observed(), QuantParams(1.0, 0))
    packer.rewrite()


class Packer:
    """Rewrites one network in place."""

    def __init__(self, folded: FoldedModel, notes: Notes):
        self.folded, self.notes = folded, notes
        a, (height, width) = folded.backbone.architecture, folded.backbone.grid
        self.rows = height * width + a.num_prefix_tokens
        self.dtype = next(folded.parameters()).dtype
        self.half = can_pack(torch.bfloat16)
        self.params: dict[nn.Linear, QuantParams] = {}
        self.kernels: CpuKernels | None = load_cpu_kernels()
        if self.kernels is None:
            notes.leave(f"AVX-512 attention kernel: {unavailable_reason()}")

    def calibrate(self, images: Tensor) -> None:
        """Choose int8 parameters for the products of the blocks."""
        observed = self.observed()
        self.params = dict(zip(observed, calibrate(self.folded, list(observed.values()), images), strict=True))

    def observed(self) -> dict[nn.Linear, nn.Module]:
        """Products of the blocks and the modules with their inputs; the patch embedding and the head stay in higher precision."""
        parts = list(self.folded.backbone.blocks.modules())
        observed: dict[nn.Linear, nn.Module] = {part: part for part in parts if type(part) is nn.Linear and large(part)}
        # With `num_output_tokens`, `qkv` itself is never called; its attention layer has the same input.
        observed |= {
            part.qkv: part
            for part in parts
            if isinstance(part, FoldedAttention) and part.num_output_tokens and part.qkv in observed
        }
        return observed

    def rewrite(self) -> None:
        self._rewrite_stem()
        for module in list(self.folded.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, FoldedResidual):
                    setattr(module, name, self._residual(child))
        for module in list(self.folded.modules()):
            for name, child in list(module.named_children()):
                # The pooling uses the weights of its layer directly.
                if type(child) is nn.Linear and large(child) and not isinstance(module, FoldedAttentionPooling):
                    setattr(module, name, self._product(child))

    def _rewrite_stem(self) -> None:
        """The stem stays in higher precision where the products of the blocks are in int8."""
        stem = self.folded.backbone.stem
        dtype = torch.bfloat16 if self.params and self.half else self.dtype
        if not isinstance(stem, LinearStem) or not all(isinstance(part, nn.Identity) for part in (stem.norm, stem.activation)):
            self._pack_convolutions(stem, dtype)
            return
        weight = stem.proj.weight.flatten(1).to(dtype)
        flat = nn.Linear(weight.shape[1], weight.shape[0], bias=stem.proj.bias is not None, device="meta")
        flat.weight = nn.Parameter(weight, requires_grad=False)
        if stem.proj.bias is not None:
            flat.bias = nn.Parameter(stem.proj.bias.to(dtype), requires_grad=False)
        product = PackedLinear(flat, self.rows)
        self.notes.done[PRODUCTS] += 1
        self.folded.backbone.stem = PackedPatches(product, stem.patch, dtype, self.dtype)  # type: ignore[assignment]

    def _pack_convolutions(self, stem: nn.Module, dtype: torch.dtype) -> None:
        for module in list(stem.modules()):
            for name, child in list(module.named_children()):
                if type(child) in (nn.Conv2d, PrecomputedConv):
                    assert isinstance(child, nn.Conv2d)
                    setattr(module, name, PackedConv(child, dtype))
                    self.notes.done[CONVOLUTIONS] += 1

    def _product(self, linear: nn.Linear, dtype: torch.dtype = torch.float32, post_op: PostOp = NO_OP) -> Product:
        if linear in self.params:
            self.notes.done[INT8_PRODUCTS] += 1
            return Int8Linear(linear, self.rows, self.params[linear], dtype, post_op)
        self.notes.done[PRODUCTS] += 1
        return PackedLinear(linear, self.rows, post_op)

    def _residual(self, residual: FoldedResidual) -> nn.Module:
        body = residual.bodies[0]
        if len(residual.bodies) > 1:
            return residual
        new: nn.Module
        if isinstance(body, FoldedAttention) and not body.axis:
            new, first = self._attention(body), body.qkv
        elif isinstance(body, FoldedFeedForward):
            new, first = self._feed_forward(body), body.fc1
        else:
            return residual
        norm, width = residual.norm, first.in_features
        plain = isinstance(norm, nn.LayerNorm) and norm.weight is None
        if plain and first in self.params and self.kernels is not None and width % LANES == 0:
            assert isinstance(norm, nn.LayerNorm)
            norm = Int8Norm(norm, self.params[first], self.kernels)
        return PackedResidual(norm, new, residual.post, residual.num_output_tokens)

    def _attention(self, body: FoldedAttention) -> PackedAttention:
        inner = body.proj.in_features
        size, dtype = inner // (body.branches * body.heads), self.dtype
        if self.kernels is not None and self.folded.backbone.architecture.pos_embed not in RELATIVE:
            if body.qkv in self.params and self.kernels.supports(torch.bfloat16, size):
                dtype = torch.bfloat16  # half the time of float32, and more exact than the int8 input and output
            self.notes.done[ATTENTIONS] += self.kernels.supports(dtype, size)
        query, pair = None, body.qkv
        if body.num_output_tokens:
            query, pair = split_linear(body.qkv, inner)
            if body.qkv in self.params:
                self.params[query] = self.params[pair] = self.params[body.qkv]
        query_product = None if query is None else self._product(query, dtype)
        products = query_product, self._product(pair, dtype), self._product(body.proj)
        return PackedAttention(products, body.heads, body.branches, body.scale, body.num_output_tokens, self.kernels)

    def _feed_forward(self, body: FoldedFeedForward) -> PackedFeedForward:
        post_op = post_op_of(body.activation)
        activation = body.activation if post_op == NO_OP else nn.Identity()
        if body.fc1 in self.params and body.fc2 in self.params and post_op != NO_OP:
            self.notes.done[INT8_PRODUCTS] += 1
            fc1 = Int8Linear(body.fc1, self.rows, self.params[body.fc1], post_op=post_op, output=self.params[body.fc2])
            return PackedFeedForward(fc1, activation, self._product(body.fc2))
        return PackedFeedForward(self._product(body.fc1, post_op=post_op), activation, self._product(body.fc2))


def large(linear: nn.Linear) -> bool:
    return min(linear.in_features, linear.out_features) >= MIN_WIDTH


def post_op_of(activation: nn.Module) -> PostOp:
    """The activation as an operation that oneDNN applies to the output of a product; NO_OP if it has no such operation."""
    if isinstance(activation, nn.GELU):
        return "gelu", activation.approximate
    return ("relu", "") if type(activation) is nn.ReLU else NO_OP


def split_linear(linear: nn.Linear, first: int) -> tuple[nn.Linear, nn.Linear]:
    """Two layers: one for the first outputs, one for the others."""
    parts = []
    for weight, bias in zip(*(each.tensor_split([first]) for each in (linear.weight, linear.bias)), strict=True):
        part = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        part.weight = nn.Parameter(weight, requires_grad=False)
        part.bias = nn.Parameter(bias, requires_grad=False)
        parts.append(part)
    return parts[0], parts[1]
