"""Layers of a network packed for the CPU: prepacked weights, with the activation or the residual sum fused into the product.

Bodies of residual branches are called as body(x, layout, relative, onto) and return their output plus `onto`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.deploy.cpu_kernels import CpuKernels
from vitrail.deploy.fold import PrecomputedConv
from vitrail.deploy.quantize import QuantParams, quantize_weights
from vitrail.layers.bit_resnet import pad_same
from vitrail.layers.fold import frozen_parameter
from vitrail.layers.layout import Grid, Layout

# An operation on the output of a product, as oneDNN names it: operation and algorithm.
PostOp = tuple[str, str]
NO_OP: PostOp = ("none", "")


class Packed(nn.Module):
    """A product with weights in oneDNN's layout. It is immutable, so a deep copy returns the same object.

    `stored` are its weights in the usual layout, for a file; `restore` packs those of a file.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packed":
        return self


class PackedLinear(Packed):
    """[..., K] to [..., D] in float32 or bfloat16, with a fused activation or, given `onto`, a fused sum."""

    def __init__(self, linear: nn.Linear, rows: int, post_op: PostOp = NO_OP):
        super().__init__()
        self.rows, self.post_op = rows, post_op
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), rows)
        self.bias = None if linear.bias is None else frozen_parameter(linear.bias)

    def stored(self) -> dict[str, Tensor]:
        return {"weight": self.weight.to_dense()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(tensors["weight"].contiguous(), self.rows)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        if onto is None:
            operation, algorithm = self.post_op
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, operation, [], algorithm)
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, onto.contiguous(), self.weight, self.bias, "add")
        return out


class Int8Linear(Packed):
    """[..., K] to [..., D] in int8: inputs quantized by fixed `params`, weights per channel, sums in int32.

    Inputs that are not uint8 yet are quantized; with `output` parameters the outputs are quantized, too.
    """

    def __init__(
        self,
        linear: nn.Linear,
        rows: int,
        params: QuantParams,
        dtype: torch.dtype = torch.float32,
        post_op: PostOp = NO_OP,
        output: QuantParams | None = None,
    ):
        super().__init__()
        self.rows = rows
        weight, scales = quantize_weights(linear.weight.detach())
        self.weight = torch.ops.onednn.qlinear_prepack(weight, [rows, weight.shape[1]])
        self.scales, self.zero_points = scales, torch.zeros(len(scales), dtype=torch.int32)
        self.bias = None if linear.bias is None else frozen_parameter(linear.bias.float())
        self.params, self.post_op = params, post_op
        self.dtype = torch.uint8 if output else dtype
        self.output = output or QuantParams(1.0, 0)

    def stored(self) -> dict[str, Tensor]:
        ranges = torch.tensor([*self.params, *self.output], dtype=torch.float64)
        return {"weight": self.weight.to_dense().T, "scales": self.scales, "ranges": ranges}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        weight, self.scales = tensors["weight"].contiguous(), tensors["scales"]
        self.weight = torch.ops.onednn.qlinear_prepack(weight, [self.rows, weight.shape[1]])
        scale, zero_point, output_scale, output_zero_point = tensors["ranges"].tolist()
        self.params = QuantParams(scale, int(zero_point))
        self.output = QuantParams(output_scale, int(output_zero_point))

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        x = x.contiguous() if x.dtype == torch.uint8 else self.params.quantize(x)
        inputs = (x, *self.params, self.weight, self.scales, self.zero_points)
        if onto is None:
            operation, algorithm = self.post_op
            out: Tensor = torch.ops.onednn.qlinear_pointwise(
                *inputs, self.bias, *self.output, self.dtype, operation, [], algorithm
            )
        else:
            total = onto.clone(memory_format=torch.contiguous_format)  # the sum is written into it
            out = torch.ops.onednn.qlinear_pointwise.binary(
                *inputs, total, self.bias, *self.output, self.dtype, 1.0, 0, "sum", 1.0, "none", [], ""
            )
        return out


Product = PackedLinear | Int8Linear


class PackedConv(nn.Conv2d):
    """A convolution [B, C, H, W] to [B, D, h, w], channels last, computed in `dtype`; packed for each size of its input."""

    MAX_SIZES = 8

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype):
        super().__init__(conv.in_channels, conv.out_channels, 1, device="meta")
        for name in ("kernel_size", "stride", "padding", "dilation", "groups"):
            setattr(self, name, getattr(conv, name))
        self.pads_same = isinstance(conv, PrecomputedConv)
        self.weight = frozen_parameter(conv.weight)
        self.bias = None if conv.bias is None else frozen_parameter(conv.bias)
        self.dtype = dtype
        self.packed: dict[tuple[int, ...], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedConv":
        return self  # its weights never change

    def forward(self, x: Tensor) -> Tensor:
        if self.pads_same:
            x = pad_same(x, self.kernel_size[0], self.stride[0])
        x = x.to(self.dtype).contiguous(memory_format=torch.channels_last)
        options, size = (self.padding, self.stride, self.dilation, self.groups), tuple(x.shape[1:])
        weight = self.packed.get(size)
        if weight is None:
            if len(self.packed) == self.MAX_SIZES:
                self.packed.clear()
            # In the layout for another size a convolution can take a hundred times as long; the batch size does not matter.
            plain = self.weight.to(self.dtype).contiguous()
            weight = self.packed[size] = torch.ops.mkldnn._reorder_convolution_weight(plain, *options, [1, *size])
        bias = None if self.bias is None else self.bias.to(self.dtype)
        out: Tensor = torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *options, "none", [], "")
        return out.to(self.weight.dtype)


class PackedPatches(nn.Module):
    """Patch embedding of non-overlapping P x P patches as one matrix product: images [B, C, H, W] to tokens [B, T, D]."""

    def __init__(self, product: PackedLinear, patch: int, dtype: torch.dtype, output_dtype: torch.dtype):
        super().__init__()
        self.product, self.patch, self.dtype, self.output_dtype = product, patch, dtype, output_dtype

    def grid(self, height: int, width: int) -> Grid:
        return height // self.patch, width // self.patch

    def forward(self, image: Tensor) -> Tensor:
        side, (height, width) = self.patch, self.grid(*image.shape[-2:])
        image = image[..., : height * side, : width * side].to(self.dtype)
        rows = image.unflatten(3, (width, side)).unflatten(2, (height, side)).permute(0, 2, 4, 1, 3, 5)
        rows = rows.reshape(len(image), height * width, image.shape[1] * side**2)
        out: Tensor = self.product(rows).to(self.output_dtype)
        return out


class PackedAttention(nn.Module):
    """Attention of `FoldedAttention`; if only the first S tokens are computed, `query` is separate from `pair` (keys, values)."""

    def __init__(
        self,
        products: tuple[Product | None, Product, Product],  # query, pair or all three, proj
        heads: int,
        branches: int,
        scale: float | None,
        num_output_tokens: int,
        kernels: CpuKernels | None,
    ):
        super().__init__()
        (self.query, self.pair, self.proj), self.kernels = products, kernels
        self.heads, self.branches, self.scale, self.num_output_tokens = heads, branches, scale, num_output_tokens

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None, onto: Tensor) -> Tensor:
        heads = self.branches * self.heads
        if self.query is None:
            query, key, value = self.pair(x).unflatten(-1, (3, heads, -1)).unbind(2)  # [B, T, H, K]
        else:
            query = self.query(x[:, : self.num_output_tokens]).unflatten(-1, (heads, -1))
            key, value = self.pair(x).unflatten(-1, (2, heads, -1)).unbind(2)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        if relative is None and self.kernels is not None and self.kernels.supports(query.dtype, query.shape[-1]):
            affine = self.proj.params.affine if isinstance(self.proj, Int8Linear) else None
            mixed = self.kernels.attend(query, key, value, scale, affine)
        else:
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
            bias = relative(query, layout) if relative is not None else None
            if bias is not None and bias.shape[1] != heads:  # one bias per head, the same in every branch
                bias = bias.repeat(1, self.branches, 1, 1)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale).transpose(1, 2).flatten(2)
        out: Tensor = self.proj(mixed, onto)
        return out


class PackedFeedForward(nn.Module):
    """MLP of two products, the activation fused into the first where oneDNN has it."""

    def __init__(self, fc1: Product, activation: nn.Module, fc2: Product):
        super().__init__()
        self.fc1, self.activation, self.fc2 = fc1, activation, fc2

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None, onto: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.activation(self.fc1(x)), onto)
        return out


class Int8Norm(nn.Module):
    """LayerNorm without weights, [B, T, D] to quantized uint8 [B, T, D]."""

    def __init__(self, norm: nn.LayerNorm, params: QuantParams, kernels: CpuKernels):
        super().__init__()
        self.eps, self.affine, self.kernels = norm.eps, params.affine, kernels

    def stored(self) -> dict[str, Tensor]:
        return {"affine": torch.tensor(self.affine, dtype=torch.float64)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        factor, offset = tensors["affine"].tolist()
        self.affine = factor, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.norm_to_int8(x, self.eps, *self.affine)


class PackedResidual(nn.Module):
    """x + body(norm(x)), summed by the body's last product; with `num_output_tokens` = S the first S tokens only."""

    def __init__(self, norm: nn.Module, body: nn.Module, post: nn.Module, num_output_tokens: int):
        super().__init__()
        self.norm, self.body, self.post, self.num_output_tokens = norm, body, post, num_output_tokens

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        onto = x[:, : self.num_output_tokens] if self.num_output_tokens else x
        out: Tensor = self.post(self.body(self.norm(x), layout, relative, onto))
        return out
