"""From the few largest logits that a store keeps back to one score per class.

What was not kept has to be given some score. `OUTSIDE` says which:

* zero: a logit of 0, as TokenLabeling's released code has it (LV-ViT, arXiv 2104.10858);
* drop: minus infinity, so that the kept classes share all of the probability;
* spread: what gives the kept classes the probability the teacher gave them, and the others equal parts of what is left.
"""

import math

import torch
from torch import Tensor

from vitrail.errors import UserError

OUTSIDE = ("zero", "drop", "spread")


def expand(values: Tensor, classes: Tensor, count: int, outside: str, rest: Tensor | None) -> Tensor:
    """Values and class numbers [B, k, ...] to scores [B, count, ...]; `rest` [B, ...] is log-sum-exp of what was not kept."""
    if outside not in OUTSIDE:
        raise UserError(f"outside={outside!r} is not known; choose from {', '.join(OUTSIDE)}.")
    kept = values.shape[1]
    if kept == count:
        fill: Tensor = values.new_zeros(())
    elif outside == "spread":
        if rest is None:
            raise UserError("This store does not know how much probability lies outside the kept classes; ask for zero or drop.")
        fill = (rest - math.log(count - kept))[:, None]
    else:
        fill = values.new_full((), 0.0 if outside == "zero" else -math.inf)
    scores = fill.expand(len(values), count, *values.shape[2:]).contiguous()
    return scores.scatter_(1, classes, values)


def probabilities(scores: Tensor, outside: str) -> Tensor:
    """Softmax over the classes, [B, C, ...]; equal parts where none of these classes was kept and the others were dropped."""
    if outside != "drop":
        return scores.softmax(1)
    lost = (scores == -math.inf).all(1, keepdim=True)
    return torch.where(lost, 0.0, scores).softmax(1)
