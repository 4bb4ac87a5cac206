"""Logits of all classes from the k largest that a label store contains.

The logit of a class that was not stored is set by `outside`:

* zero: 0, as in TokenLabeling's released code (LV-ViT, arXiv 2104.10858);
* drop: minus infinity; the stored classes share all of the probability;
* spread: the value that gives the stored classes the teacher's probabilities and shares the rest equally among the others.
"""

import math

import torch
from torch import Tensor

from vitrail.errors import UserError

OUTSIDE = ("zero", "drop", "spread")


def expand_top_k(values: Tensor, indices: Tensor, classes: int, outside: str, rest: Tensor | None) -> Tensor:
    """Logits [B, classes, ...] from values and class indices [B, k, ...]; `rest` [B, ...] is the log-sum-exp of the others."""
    if outside not in OUTSIDE:
        raise UserError(f"outside={outside!r} is unknown: choose from {', '.join(OUTSIDE)}.")
    k = values.shape[1]
    if k == classes:
        fill: Tensor = values.new_zeros(())
    elif outside == "spread":
        if rest is None:
            raise UserError(
                "The label store does not contain the probability outside the stored classes: use outside=zero or drop."
            )
        fill = (rest - math.log(classes - k))[:, None]
    else:
        fill = values.new_full((), 0.0 if outside == "zero" else -math.inf)
    logits = fill.expand(len(values), classes, *values.shape[2:]).contiguous()
    return logits.scatter_(1, indices, values)


def class_probabilities(logits: Tensor, outside: str) -> Tensor:
    """Softmax over the classes, [B, C, ...]; uniform where `outside` is "drop" and none of these classes was stored."""
    if outside != "drop":
        return logits.softmax(1)
    empty = (logits == -math.inf).all(1, keepdim=True)
    return torch.where(empty, 0.0, logits).softmax(1)
