"""The parts of a network packed for a processor: weights lie as its products read them, and what follows a product is done in it.

Bodies are called body(x, layout, relative, onto): what they answer is added to `onto`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.deploy.cpu_kernels import Native
from vitrail.deploy.folded_layers import frozen
from vitrail.deploy.quantize import Steps, round_weights
from vitrail.layers.layout import Layout
from vitrail.layers.pos_embed import Grid

# The activation behind a product as oneDNN calls it: operation and algorithm.
Behind = tuple[str, str]
NOTHING: Behind = ("none", "")


class Packed(nn.Module):
    """A product whose weights have left torch's own layout. Nothing in it ever changes, so a copy of it is itself."""

    def __deepcopy__(self, memo: dict) -> "Packed":
        return self


class PackedLinear(Packed):
    """[..., K] to [..., D] in float32 or bfloat16, an activation behind it, onto what is already there."""

    def __init__(self, linear: nn.Linear, rows: int, behind: Behind = NOTHING):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), rows)
        self.bias = None if linear.bias is None else frozen(linear.bias)
        self.behind = behind

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        if onto is None:
            operation, algorithm = self.behind
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, operation, [], algorithm)
        return torch.ops.mkldnn._linear_pointwise.binary(x, onto.contiguous(), self.weight, self.bias, "add")


class CodedLinear(Packed):
    """[..., K] to [..., D] in eight bits: inputs by fixed steps, weights by channel, sums in whole numbers.

    Inputs that are not in eight bits yet are brought there; with `coded` steps the answers are left in them.
    """

    def __init__(
        self,
        linear: nn.Linear,
        rows: int,
        steps: Steps,
        dtype: torch.dtype = torch.float32,
        behind: Behind = NOTHING,
        coded: Steps | None = None,
    ):
        super().__init__()
        weight, factors = round_weights(linear.weight.detach())
        self.weight = torch.ops.onednn.qlinear_prepack(weight, [rows, weight.shape[1]])
        self.factors, self.zeros = factors, torch.zeros(len(factors), dtype=torch.int32)
        self.bias = None if linear.bias is None else frozen(linear.bias.float())
        self.steps, self.behind = steps, behind
        self.dtype = torch.uint8 if coded else dtype
        self.answers = coded or Steps(1.0, 0)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        x = x.contiguous() if x.dtype == torch.uint8 else self.steps.encode(x)
        given = (x, *self.steps, self.weight, self.factors, self.zeros)
        if onto is None:
            operation, algorithm = self.behind
            return torch.ops.onednn.qlinear_pointwise(*given, self.bias, *self.answers, self.dtype, operation, [], algorithm)
        own = onto.clone(memory_format=torch.contiguous_format)  # the sum is written over it
        return torch.ops.onednn.qlinear_pointwise.binary(
            *given, own, self.bias, *self.answers, self.dtype, 1.0, 0, "sum", 1.0, "none", [], ""
        )


Product = PackedLinear | CodedLinear


class PackedPatches(nn.Module):
    """Non-overlapping P x P patches and one linear map as a plain product of patches laid out in rows."""

    def __init__(self, product: PackedLinear, patch: int, dtype: torch.dtype, answers: torch.dtype):
        super().__init__()
        self.product, self.patch, self.dtype, self.answers = product, patch, dtype, answers

    def grid(self, height: int, width: int) -> Grid:
        return height // self.patch, width // self.patch

    def forward(self, image: Tensor) -> Tensor:
        side, (height, width) = self.patch, self.grid(*image.shape[-2:])
        image = image[..., : height * side, : width * side].to(self.dtype)
        rows = image.unflatten(3, (width, side)).unflatten(2, (height, side)).permute(0, 2, 4, 1, 3, 5)
        rows = rows.reshape(len(image), height * width, image.shape[1] * side**2)
        return self.product(rows).to(self.answers)


class PackedAttention(nn.Module):
    """Attention of `WideAttention`; `query` is apart from `pair` where the first S tokens alone are answered."""

    def __init__(
        self,
        products: tuple[Product | None, Product, Product],  # query, pair or all three, proj
        heads: int,
        branches: int,
        scale: float | None,
        only: int,
        native: Native | None,
    ):
        super().__init__()
        (self.query, self.pair, self.proj), self.native = products, native
        self.heads, self.branches, self.scale, self.only = heads, branches, scale, only

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None, onto: Tensor) -> Tensor:
        heads = self.branches * self.heads
        if self.query is None:
            query, key, value = self.pair(x).unflatten(-1, (3, heads, -1)).unbind(2)  # [B, T, H, K]
        else:
            query = self.query(x[:, : self.only]).unflatten(-1, (heads, -1))
            key, value = self.pair(x).unflatten(-1, (2, heads, -1)).unbind(2)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        if relative is None and self.native is not None and self.native.attends_to(query.dtype, query.shape[-1]):
            code = self.proj.steps.code if isinstance(self.proj, CodedLinear) else None
            return self.proj(self.native.attend(query, key, value, scale, code), onto)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        bias = relative(query, layout) if relative is not None else None
        if bias is not None and bias.shape[1] != heads:  # one number per head, the same in every branch
            bias = bias.repeat(1, self.branches, 1, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
        return self.proj(mixed.transpose(1, 2).flatten(2), onto)


class PackedFeedForward(nn.Module):
    """Two products, the activation inside the first where the library has it."""

    def __init__(self, fc1: Product, activation: nn.Module, fc2: Product):
        super().__init__()
        self.fc1, self.activation, self.fc2 = fc1, activation, fc2

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None, onto: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)), onto)


class CodedNorm(nn.Module):
    """A LayerNorm that learned nothing, its answers in eight bits, [B, T, D]."""

    def __init__(self, norm: nn.LayerNorm, steps: Steps, native: Native):
        super().__init__()
        self.epsilon, self.code, self.native = norm.eps, steps.code, native

    def forward(self, x: Tensor) -> Tensor:
        return self.native.norm_bytes(x, self.epsilon, *self.code)


class PackedResidual(nn.Module):
    """x plus its body, whose last product adds; with `only` = S nothing but the first S tokens goes on."""

    def __init__(self, norm: nn.Module, body: nn.Module, post: nn.Module, only: int):
        super().__init__()
        self.norm, self.body, self.post, self.only = norm, body, post, only

    def forward(self, x: Tensor, layout: Layout, relative: nn.Module | None = None) -> Tensor:
        onto = x[:, : self.only] if self.only else x
        return self.post(self.body(self.norm(x), layout, relative, onto))
