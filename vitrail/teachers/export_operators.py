"""The operators that a program of `torch.export` may call: functions of tensors and sizes, which open no file and run no code.

Every other name in a file is rejected. Operators that return random values, depend on the values of tensors or resize their input
are not among them.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# By name and overload, as in torch.ops.aten; those whose name ends with an underscore work in place.
LAYERS = """
conv1d.default conv2d.default conv2d.padding convolution.default linear.default matmul.default mm.default bmm.default
addmm.default baddbmm.default einsum.default scaled_dot_product_attention.default softmax.int _softmax.default log_softmax.int
batch_norm.default _native_batch_norm_legit_no_training.default layer_norm.default native_layer_norm.default
group_norm.default native_group_norm.default instance_norm.default rms_norm.default embedding.default
relu.default relu_.default relu6.default relu6_.default leaky_relu.default leaky_relu_.default elu.default elu_.default
gelu.default silu.default silu_.default mish.default mish_.default selu.default selu_.default prelu.default softplus.default
sigmoid.default sigmoid_.default tanh.default tanh_.default hardtanh.default hardtanh_.default hardswish.default
hardswish_.default hardsigmoid.default hardsigmoid_.default glu.default dropout.default dropout_.default feature_dropout.default
adaptive_avg_pool1d.default adaptive_avg_pool2d.default _adaptive_avg_pool2d.default adaptive_max_pool2d.default
avg_pool1d.default avg_pool2d.default max_pool2d.default max_pool2d_with_indices.default
upsample_nearest2d.default upsample_nearest2d.vec _upsample_nearest_exact2d.default _upsample_nearest_exact2d.vec
upsample_bilinear2d.default upsample_bilinear2d.vec _upsample_bilinear2d_aa.default _upsample_bilinear2d_aa.vec
upsample_bicubic2d.default upsample_bicubic2d.vec _upsample_bicubic2d_aa.default _upsample_bicubic2d_aa.vec
pad.default constant_pad_nd.default reflection_pad2d.default replication_pad2d.default
pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default im2col.default unfold.default
"""
ARITHMETIC = """
add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor sub_.Scalar rsub.Tensor rsub.Scalar
mul.Tensor mul.Scalar mul_.Tensor mul_.Scalar div.Tensor div.Scalar div_.Tensor div_.Scalar div.Tensor_mode div.Scalar_mode
addcmul.default addcdiv.default floor_divide.default remainder.Scalar remainder.Tensor fmod.Scalar lerp.Scalar lerp.Tensor
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar square.default sqrt.default rsqrt.default reciprocal.default exp.default
expm1.default log.default log2.default log1p.default sin.default cos.default atan.default erf.default abs.default
neg.default sign.default floor.default ceil.default round.default trunc.default cumsum.default
clamp.default clamp.Tensor clamp_.default clamp_min.default clamp_max.default maximum.default minimum.default
eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor
logical_and.default logical_or.default logical_not.default bitwise_not.default bitwise_and.Tensor bitwise_or.Tensor
where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar
isinf.default isnan.default isfinite.default nan_to_num.default
mean.default mean.dim sum.default sum.dim_IntList prod.dim_int amax.default amin.default max.dim min.dim argmax.default
any.default any.dim all.default all.dim var.correction var.dim var_mean.correction std.correction std.dim
norm.ScalarOpt_dim linalg_vector_norm.default logsumexp.default topk.default sort.default
"""
SHAPES = """
view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int permute.default transpose.int
t.default numpy_T.default movedim.int movedim.intlist unsqueeze.default unsqueeze_.default squeeze.default squeeze.dim
squeeze.dims squeeze_.dim
expand.default expand_as.default repeat.default tile.default repeat_interleave.self_int roll.default flip.default
cat.default stack.default select.int slice.Tensor narrow.default index.Tensor index_select.default gather.default
unbind.int chunk.default split.Tensor split.sizes split_with_sizes.default tril.default triu.default diagonal.default
meshgrid.default meshgrid.indexing broadcast_tensors.default view_as.default reshape_as.default
clone.default contiguous.default detach.default detach_.default alias.default lift_fresh_copy.default copy.default copy_.default
to.dtype to.dtype_layout to.device to.other _to_copy.default type_as.default slice_scatter.default select_scatter.default
zeros_like.default ones_like.default full_like.default new_zeros.default new_ones.default new_full.default
fill_.Scalar zero_.default sym_size.int sym_numel.default
"""
# These use the default device unless they get another one.
CREATION = """
zeros.default ones.default full.default scalar_tensor.default arange.default arange.start arange.start_step linspace.default
eye.default
"""
ATEN = frozenset((LAYERS + ARITHMETIC + SHAPES + CREATION).split())


def power(base: float, exponent: float) -> float:
    """Python's power of integers could take any time and memory; that of floats cannot."""
    result = math.pow(base, exponent)
    return int(result) if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0 else result


# Functions of numbers, with which sizes are computed
SIZES: dict[str, Callable[..., Any]] = {
    "_operator.add": operator.add,
    "_operator.sub": operator.sub,
    "_operator.mul": operator.mul,
    "_operator.floordiv": operator.floordiv,
    "_operator.truediv": operator.truediv,
    "_operator.mod": operator.mod,
    "_operator.neg": operator.neg,
    "_operator.pow": power,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "torch.sym_float": float,
    "torch.sym_int": int,
    "torch.sym_max": max,
    "torch.sym_min": min,
}
# Assertions return nothing and are left out.
ASSERTIONS = frozenset(
    (
        *("torch.ops.aten._assert_scalar.default", "torch.ops.aten._assert_tensor_metadata.default"),
        *("torch.ops.aten.sym_constrain_range.default", "torch.ops.aten.sym_constrain_range_for_size.default"),
        *("_operator.eq", "_operator.ne", "_operator.lt", "_operator.le", "_operator.gt", "_operator.ge"),
    )
)


class Operator(NamedTuple):
    function: Callable[..., Any]
    named: bool  # its arguments are given by name
    needs_device: bool
    pieces: Callable[..., int] | None  # the number of tensors that it returns, if its arguments could ask for any number


def find_operator(target: str) -> Operator | None:
    """The operator of a node; None for assertions and comparisons, which only they use."""
    if target in ASSERTIONS:
        return None
    if target in SIZES:
        return Operator(SIZES[target], False, False, None)
    name, _, overload = target.removeprefix("torch.ops.aten.").partition(".")
    known = f"{name}.{overload}"
    if known not in ATEN or target != f"torch.ops.aten.{known}":
        raise ValueError(f"it calls {target[:80]!r}, which is not among the supported operators")
    function = getattr(getattr(torch.ops.aten, name), overload)
    check = CHECKS.get(known) or CHECKS.get(name)
    if check is not None:
        function = functools.partial(call_checked, function, check)
    return Operator(function, True, known in CREATION.split(), PIECES.get(known))


# torch does not check these arguments itself: it would read memory that belongs to others, or end the process.


def call_checked(function: Callable[..., Any], check: Callable[..., None], **arguments: Any) -> Any:
    check(**arguments)
    return function(**arguments)


def check_statistics(input: Tensor, **others: Any) -> None:
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = others.get(name)
        if value is not None and value.shape != (input.shape[1],):
            raise ValueError(f"{name} has the shape {list(value.shape)} for {input.shape[1]} channels")


def check_scales(self: Tensor | None = None, input: Tensor | None = None, output_size: Any = None, **others: Any) -> None:
    image = self if self is not None else input
    scales = [others.get("scales_h"), others.get("scales_w")]
    if image is None or output_size is None:
        return
    for before, after, scale in zip(image.shape[-2:], output_size, scales, strict=True):
        if scale is not None and abs(before * scale - after) > 1:
            raise ValueError(f"a size of {after} is not {scale} times {before}")


def check_division(self: Any, other: Any, **_: Any) -> None:
    dividend, divisor = torch.as_tensor(self), torch.as_tensor(other)
    if dividend.is_floating_point() or divisor.is_floating_point() or dividend.is_meta or divisor.is_meta:
        return
    if (divisor == -1).any() and (dividend == torch.iinfo(dividend.dtype).min).any():
        raise ValueError("an integer division overflows")


CHECKS: dict[str, Callable[..., None]] = {
    "_native_batch_norm_legit_no_training": check_statistics,
    "batch_norm": check_statistics,
    "_upsample_bilinear2d_aa.default": check_scales,
    "_upsample_bicubic2d_aa.default": check_scales,
    "upsample_bilinear2d.default": check_scales,
    "upsample_bicubic2d.default": check_scales,
    "upsample_nearest2d.default": check_scales,
    "_upsample_nearest_exact2d.default": check_scales,
    "div.Tensor_mode": check_division,
    "div.Scalar_mode": check_division,
    "floor_divide": check_division,
    "remainder": check_division,
    "fmod": check_division,
}


def count_unbound(self: Tensor, dim: int = 0) -> int:
    return self.shape[dim]


def count_chunks(self: Tensor, chunks: int, dim: int = 0) -> int:
    return count_splits(self, -(-self.shape[dim] // max(chunks, 1)), dim)


def count_splits(self: Tensor, split_size: int, dim: int = 0) -> int:
    return max(-(-self.shape[dim] // max(split_size, 1)), 1)


PIECES: dict[str, Callable[..., int]] = {
    "unbind.int": count_unbound,
    "chunk.default": count_chunks,
    "split.Tensor": count_splits,
}
