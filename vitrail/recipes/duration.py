"""The total length of a training, including its cooldown."""

from vitrail.recipes.schema import ScheduleConfig, parse_duration


def set_total(schedule: ScheduleConfig, length: str) -> dict[str, str]:
    """Changes by which the training takes this duration in total; a cooldown is only part of one in epochs."""
    number, unit = parse_duration(length)
    return set_total_epochs(schedule, number) if unit == "epoch" else {"schedule.length": length, "schedule.cooldown": "0%"}


def set_total_epochs(schedule: ScheduleConfig, epochs: float) -> dict[str, str]:
    """Changes by which the training takes this many epochs in total; the cooldown keeps its fraction of the total.

    A cooldown in another unit than the length has no such fraction before the data is known; it is added to the total.
    """
    length, unit = parse_duration(schedule.length)
    cooldown, cooldown_unit = parse_duration(schedule.cooldown)
    if cooldown_unit == "%":
        return {"schedule.length": format_epochs(epochs / (1 + cooldown / 100))}
    if not cooldown or cooldown_unit != unit:
        return {"schedule.length": format_epochs(epochs)}
    fraction = cooldown / (length + cooldown)
    return {"schedule.length": format_epochs(epochs * (1 - fraction)), "schedule.cooldown": format_epochs(epochs * fraction)}


def format_epochs(epochs: float) -> str:
    return f"{epochs:.10g} epochs"  # exact to the step in trainings of any length


def describe_cooldown(schedule: ScheduleConfig) -> list[str]:
    """A message about the cooldown, if there is one: it is included in the estimated time."""
    length, unit = parse_duration(schedule.length)
    cooldown, cooldown_unit = parse_duration(schedule.cooldown)
    if not cooldown:
        return []
    cooldown, cooldown_unit = (cooldown * length / 100, unit) if cooldown_unit == "%" else (cooldown, cooldown_unit)
    total = f"{show(length + cooldown, unit)} in total: " if cooldown_unit == unit else ""
    parts = f"{show(length, unit)} of schedule, then {show(cooldown, cooldown_unit)} of cooldown"
    return [f"{total}{parts} at the minimum learning rate"]


def show(duration: float, unit: str) -> str:
    return f"{duration:.4g} {unit}{'' if duration == 1 else 's'}"
