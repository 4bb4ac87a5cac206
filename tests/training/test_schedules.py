"""Learning lrs against the formulas of the released code, written independently."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from vitrail.errors import UserError
from vitrail.recipes.schema import ScheduleConfig
from vitrail.training.schedules import duration_to_steps, lr_at, total_steps


def released(epoch, base, warmup_lr, min_lr, warmup, total):
    """deit/main.py: the scheduler steps after each epoch, so that each epoch runs at the learning rate of the one before."""
    time = max(epoch - 1, 0)
    if time < warmup:
        return warmup_lr + time * (base - warmup_lr) / warmup
    return min_lr + 0.5 * (base - min_lr) * (1 + math.cos(math.pi * time / total))


@pytest.mark.parametrize(("base", "min_lr", "warmup"), [(1e-3, 1e-5, 5), (1e-5, 1e-5, 5), (5e-6, 1e-5, 5), (4e-3, 1e-6, 0)])
def test_released_engine(base, min_lr, warmup):
    schedule = ScheduleConfig(
        "300 epochs", f"{warmup} epochs", 1e-6, "cosine", min_lr, warmup_prefix=False, by_epoch=True, lag_epochs=1
    )
    steps = 7
    for step in range(300 * steps):
        expected = released(step // steps, base, 1e-6, min_lr, warmup, 300)
        assert math.isclose(lr_at(schedule, base, step, steps), expected, rel_tol=1e-12)
    assert lr_at(schedule, base, 0, steps) == lr_at(schedule, base, 2 * steps - 1, steps)
    assert math.isclose(lr_at(schedule, 1e-3, 2099, steps), released(299, 1e-3, 1e-6, min_lr, warmup, 300), rel_tol=1e-12)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 500])
def test_google(shape, warmup):
    """vit_jax and big_vision: a schedule that starts after the warmup, times min(1, step / warmup)."""
    total, base, end = 2000, 0.03, 1e-5 if shape == "linear" else 0.0
    schedule = ScheduleConfig("2000 steps", f"{warmup} steps", 0.0, shape, end)
    for step in range(total):
        progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
        lr = end + (base - end) * (1 - progress) if shape == "linear" else base * 0.5 * (1 + math.cos(math.pi * progress))
        lr *= min(1.0, step / warmup) if warmup else 1.0
        assert math.isclose(lr_at(schedule, base, step, 100), lr, rel_tol=1e-12, abs_tol=1e-18)


def test_cooldown_follows_the_length():
    """TokenLabeling: 300 epochs become 310, the last ten at min_lr; by epoch, without lag."""
    schedule = ScheduleConfig(
        "300 epochs", "5 epochs", 1e-6, "cosine", 1e-5, warmup_prefix=False, by_epoch=True, cooldown="10 epochs"
    )
    assert total_steps(schedule, 4) == 1240
    assert {lr_at(schedule, 1e-3, step, 4) for step in range(1200, 1240)} == {1e-5}
    assert lr_at(schedule, 1e-3, 1199, 4) > 1e-5
    assert math.isclose(lr_at(schedule, 1e-3, 700, 4), released(176, 1e-3, 1e-6, 1e-5, 5, 300))
    assert lr_at(ScheduleConfig("10 steps", "0 steps", kind="constant", min_lr=0.5, cooldown="20%"), 2.0, 11, 3) == 0.5


def test_step_schedule():
    """A tenth at epochs 30, 60 and 90; with warmup_prefix counted from the end of the warmup."""
    schedule = ScheduleConfig("100 epochs", "5 epochs", 0.0, "step", warmup_prefix=False, by_epoch=True)
    lrs = [lr_at(schedule, 0.1, epoch * 3, 3) for epoch in range(100)]
    assert lrs[5:] == pytest.approx([0.1 * 0.1 ** (epoch // 30) for epoch in range(5, 100)])
    halved = ScheduleConfig("60 epochs", "5 epochs", 1e-6, "step", step_size="10 epochs", gamma=0.5)
    assert lr_at(halved, 8e-6, 14 * 3 + 2, 3) == 8e-6
    assert lr_at(halved, 8e-6, 15 * 3, 3) == 4e-6
    assert lr_at(ScheduleConfig("90 steps", "0 steps", kind="step", step_size="30 steps", min_lr=0.5), 1.0, 89, 1) == 0.5
    detection = ScheduleConfig("36 epochs", "0 steps", kind="step", milestones=(27 / 36, 33 / 36))  # whatever the length
    for epoch, wanted in ((0, 1.0), (26, 1.0), (27, 0.1), (32, 0.1), (33, 0.01), (35, 0.01)):
        assert lr_at(detection, 1.0, epoch * 7, 7) == pytest.approx(wanted)
        assert lr_at(replace(detection, length="72 epochs"), 1.0, 2 * epoch * 7, 7) == pytest.approx(wanted)


def test_durations():
    assert duration_to_steps("5 epochs", 10) == 50
    assert duration_to_steps("0.5 epochs", 10) == 5
    assert duration_to_steps("1 epoch", 10) == 10
    assert duration_to_steps("100 steps", 10) == 100
    assert duration_to_steps("5%", 10, 1000) == 50
    assert total_steps(ScheduleConfig("20 epochs", cooldown="5%"), 10) == 210
    with pytest.raises(UserError, match="relative to a length"):
        duration_to_steps("5%", 10)
    with pytest.raises(UserError, match="not a duration"):
        duration_to_steps("soon", 10)


@some.composite
def schedules(draw):
    length = draw(some.integers(1, 400))
    return ScheduleConfig(
        length=f"{length} steps",
        warmup=f"{draw(some.integers(0, 450))} steps",
        warmup_lr=draw(some.floats(0, 0.1)),
        kind=draw(some.sampled_from(["cosine", "linear", "constant", "step"])),
        min_lr=draw(some.floats(0, 0.1)),
        warmup_prefix=draw(some.booleans()),
        by_epoch=draw(some.booleans()),
        lag_epochs=draw(some.integers(0, 2)),
        cooldown=f"{draw(some.integers(0, 20))} steps",
        step_size=f"{draw(some.integers(1, 100))} steps",
    )


@settings(deadline=None, derandomize=True)
@given(schedules(), some.floats(0.1, 10), some.integers(1, 50))
def test_lr_stays_within_its_bounds(schedule, base, steps_per_epoch):
    total = total_steps(schedule, steps_per_epoch)
    lrs = [lr_at(schedule, base, step, steps_per_epoch) for step in range(total + 2)]
    least = min(schedule.min_lr, schedule.warmup_lr)
    assert all(least * (1 - 1e-9) <= lr <= base * (1 + 1e-9) for lr in lrs)
    if not schedule.lag_epochs and not schedule.by_epoch:
        assert lrs[-1] == schedule.min_lr


@settings(deadline=None, derandomize=True)
@given(schedules().filter(lambda schedule: schedule.kind in ("cosine", "linear")), some.floats(0.1, 10))
def test_schedules_after_the_warmup_are_continuous(schedule, base):
    length, warmup = duration_to_steps(schedule.length, 1), duration_to_steps(schedule.warmup, 1)
    if not schedule.warmup_prefix or warmup > length:
        return
    lrs = [lr_at(schedule, base, step, 1) for step in range(length + 3)]
    steepest = base * max(1 / max(warmup, 1), math.pi / 2 / max(length - warmup, 1))
    assert max(abs(after - before) for before, after in itertools.pairwise(lrs)) <= steepest * (1 + 1e-9)


@settings(deadline=None, derandomize=True)
@given(schedules(), some.integers(1, 50))
def test_constant_inside_an_epoch(schedule, steps_per_epoch):
    if schedule.by_epoch:
        for epoch in range(4):
            inside = {lr_at(schedule, 1.0, epoch * steps_per_epoch + step, steps_per_epoch) for step in range(steps_per_epoch)}
            assert len(inside) == 1
