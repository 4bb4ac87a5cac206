"""Every figure of parameters and multiply-adds that the papers print, and what exact arithmetic makes of each model.

A table numbered 3.5, 4.3, 5.1 or 6.7 is one of Touvron's thesis, which gathers DeiT, CaiT, ResMLP, PatchConvNet and
DeiT III; all other numbers are those of the named paper. A name may end in an image size (`cait_m48_448`).
"""

from collections.abc import Callable, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, NamedTuple

Rule = Callable[[Decimal, str], bool]  # (our value, the figure as printed) -> do they agree?


def digit(figure: str) -> Decimal:
    """One unit of the last digit given: 0.1 for "17.5", 1000 for "1E+3"."""
    return Decimal(1).scaleb(int(Decimal(figure).as_tuple().exponent))


def rounded(value: Decimal, figure: str) -> bool:
    return abs(value - Decimal(figure)) <= digit(figure) / 2


def cut(value: Decimal, figure: str) -> bool:
    """Further digits dropped, not rounded: 86.57 printed as 86."""
    return Decimal(figure) <= value < Decimal(figure) + digit(figure)


def within(share: str) -> Rule:
    return lambda value, figure: abs(value / Decimal(figure) - 1) <= Decimal(share)


def near(gap: str) -> Rule:
    return lambda value, figure: abs(value - Decimal(figure)) <= Decimal(gap)


class Table(NamedTuple):
    title: str
    #     name, parameters (an integer: exact; text: millions; None: not given), billions of operations, overrides
    rows: list[tuple]
    parameters: Rule = rounded
    operations: Rule = rounded
    field: str = "macs"  # "flops" also counts 5 per LayerNorm element and 1 per element of a squeeze
    overrides: Mapping[str, Any] = MappingProxyType({})


def at(name: str, sizes: tuple[int, ...], figures: str, parameters: int | None = None) -> list[tuple]:
    """One row per size: the figures are separated by blanks."""
    return [(f"{name}_{size}", parameters, figure) for size, figure in zip(sizes, figures.split(), strict=True)]


ROW = {"pos_embed_prefix": True}  # a position for the class token, which the released DeiT III code does without
ROW_PLAIN = ROW | {"residual": "plain"}
TEXT = {"residual": "affine", "final_norm": False}  # ResMLP by its equations: a shift after each branch, no last Affine
MIX = {"mixer": "talking_heads", "heads": 8}
CLASS_ATTENTION = {"pooling": "class_attention"}
NO_TALK = {"mixer": "attention"}
# LV-ViT-S on its way from DeiT-S: DeiT's biases, no classifier of patches.
STEP = {"qkv_bias": True, "dense_head": False}
SIZES = (224, 288, 320, 384, 512)


def tower(kernels: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, Any]:
    return STEP | {"stem_kernels": kernels, "stem_strides": strides}
