"""How long a training is and which learning rate each step has: pure functions of the recipe's schedule.

The rate of the released DeiT engine (deit/main.py on timm 0.3.2) is by_epoch=True, shifted=False, lag=1: constant inside an
epoch, the cosine runs from step 0 under the warm-up, and everything comes one epoch late. Google's code (vit_jax, big_vision)
multiplies a cosine or a line that starts after the warm-up by min(step / warm-up, 1): shifted=True, warmup_from=0.
"""

import math
from collections.abc import Callable

from vitrail.errors import UserError
from vitrail.recipes.schema import ScheduleConfig, parse_span


def span_steps(text: str, steps_per_epoch: int, length: int | None = None) -> int:
    """ "5 epochs", "100 steps" or, of `length` steps, "5%" in steps, to the nearest."""
    number, micro_batch = parse_span(text)
    if micro_batch == "step":
        return round(number)
    if micro_batch == "epoch":
        return round(number * steps_per_epoch)
    if length is None:
        raise UserError(f"{text!r} is a share of a length that is not known here: give epochs or steps.")
    return round(number * length / 100)


def total_steps(schedule: ScheduleConfig, steps_per_epoch: int) -> int:
    """Length and cool-down together."""
    length = span_steps(schedule.length, steps_per_epoch)
    return length + span_steps(schedule.cooldown, steps_per_epoch, length)


def cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    return 1 - progress


def constant(progress: float) -> float:
    return 1.0


# Progress in [0, 1] to the share of the way from the floor up to the base rate.
SHAPES: dict[str, Callable[[float], float]] = {"cosine": cosine, "linear": linear, "constant": constant}


def rate_at(schedule: ScheduleConfig, base: float, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, 0 being the first.

    Warm-up start and floor are absolute rates. A floor above the base rate is legal, as in the released code: the rate then
    rises. After the length every shape is at the floor.
    """
    length = span_steps(schedule.length, steps_per_epoch)
    warmup = span_steps(schedule.warmup, steps_per_epoch, length)
    time = max(step - schedule.lag_epochs * steps_per_epoch, 0)
    if schedule.by_epoch:
        time -= time % steps_per_epoch
    if time >= length:
        return schedule.min_lr
    if time < warmup:
        return schedule.warmup_lr + (base - schedule.warmup_lr) * time / warmup
    start = warmup if schedule.warmup_prefix else 0
    if schedule.kind == "step":
        # Whole steps, not progress: a stair must not move by one step because of a rounding.
        stairs = (time - start) // max(span_steps(schedule.step_size, steps_per_epoch, length), 1)
        return max(base * schedule.gamma**stairs, schedule.min_lr)
    progress = (time - start) / (length - start)
    return schedule.min_lr + (base - schedule.min_lr) * SHAPES[schedule.kind](progress)
