"""Length and learning rate of a training: pure functions of the recipe's schedule.

The released DeiT engine (deit/main.py with timm 0.3.2) is by_epoch=True, warmup_prefix=False, lag_epochs=1: the learning rate is
constant within an epoch, the cosine starts at step 0 under the warmup, and everything is one epoch late. Google's code (vit_jax,
big_vision) multiplies a cosine or linear schedule that starts after the warmup by min(step / warmup, 1): warmup_prefix=True,
warmup_lr=0.
"""

import dataclasses
import math
from collections.abc import Callable

from vitrail.errors import UserError
from vitrail.recipes.schema import ScheduleConfig, parse_duration

SHORT_WARMUP = "10%"  # of a training that is shorter than twice the warmup of its recipe


def duration_to_steps(text: str, steps_per_epoch: int, length: int | None = None) -> int:
    """ "5 epochs", "100 steps" or "5%" (of `length` steps) as a number of steps, rounded."""
    number, unit = parse_duration(text)
    if unit == "step":
        return round(number)
    if unit == "epoch":
        return round(number * steps_per_epoch)
    if length is None:
        raise UserError(f"{text!r} is relative to a length that is not defined here: give epochs or steps.")
    return round(number * length / 100)


def total_steps(schedule: ScheduleConfig, steps_per_epoch: int) -> int:
    """Steps of a training, including the cooldown."""
    length = duration_to_steps(schedule.length, steps_per_epoch)
    return length + duration_to_steps(schedule.cooldown, steps_per_epoch, length)


def fit_warmup(schedule: ScheduleConfig, steps_per_epoch: int) -> ScheduleConfig:
    """The schedule; a warmup of more than half of its length is replaced by a short one.

    A training that was shortened would end before its learning rate is reached, or soon after.
    """
    length = duration_to_steps(schedule.length, steps_per_epoch)
    fits = 2 * duration_to_steps(schedule.warmup, steps_per_epoch, length) <= length
    return schedule if fits else dataclasses.replace(schedule, warmup=SHORT_WARMUP)


def cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    return 1 - progress


def constant(progress: float) -> float:
    return 1.0


# Progress in [0, 1] -> position between min_lr (0) and the base learning rate (1).
SHAPES: dict[str, Callable[[float], float]] = {"cosine": cosine, "linear": linear, "constant": constant}


def lr_at(schedule: ScheduleConfig, base_lr: float, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0.

    `warmup_lr` and `min_lr` are absolute. A `min_lr` above the base learning rate is valid, as in the released code: the learning
    rate then rises. After `length` every schedule is at `min_lr`.
    """
    length = duration_to_steps(schedule.length, steps_per_epoch)
    warmup = duration_to_steps(schedule.warmup, steps_per_epoch, length)
    time = max(step - schedule.lag_epochs * steps_per_epoch, 0)
    if schedule.by_epoch:
        time -= time % steps_per_epoch
    if time >= length:
        return schedule.min_lr
    if time < warmup:
        return schedule.warmup_lr + (base_lr - schedule.warmup_lr) * time / warmup
    start = warmup if schedule.warmup_prefix else 0
    if schedule.kind == "step" and schedule.milestones:
        decays = sum(time >= round(share * length) for share in schedule.milestones)
        return max(base_lr * schedule.gamma**decays, schedule.min_lr)
    if schedule.kind == "step":
        # Integer arithmetic: rounding must not move a decay by one step.
        decays = (time - start) // max(duration_to_steps(schedule.step_size, steps_per_epoch, length), 1)
        return max(base_lr * schedule.gamma**decays, schedule.min_lr)
    progress = (time - start) / (length - start)
    return schedule.min_lr + (base_lr - schedule.min_lr) * SHAPES[schedule.kind](progress)
