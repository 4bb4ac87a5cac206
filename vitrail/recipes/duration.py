"""How long a training is, its cool-down included."""

from vitrail.recipes.schema import ScheduleConfig, parse_span


def whole_length(schedule: ScheduleConfig, epochs: float) -> dict[str, str]:
    """Changes of leaves by which all of a training takes so many epochs; its cool-down keeps its share of the whole.

    A cool-down in another unit than the length has no such share before the data is known, and comes on top.
    """
    length, unit = parse_span(schedule.length)
    cooldown, its_unit = parse_span(schedule.cooldown)
    if its_unit == "%":
        return {"schedule.length": span(epochs / (1 + cooldown / 100))}
    if not cooldown or its_unit != unit:
        return {"schedule.length": span(epochs)}
    share = cooldown / (length + cooldown)
    return {"schedule.length": span(epochs * (1 - share)), "schedule.cooldown": span(epochs * share)}


def span(epochs: float) -> str:
    return f"{epochs:.10g} epochs"  # exact to the step in trainings of any length


def told(schedule: ScheduleConfig) -> list[str]:
    """A sentence on the cool-down, if there is one: it is a part of the time that is said, and of what one waits for."""
    length, unit = parse_span(schedule.length)
    cooldown, its_unit = parse_span(schedule.cooldown)
    if not cooldown:
        return []
    cooldown, its_unit = (cooldown * length / 100, unit) if its_unit == "%" else (cooldown, its_unit)
    whole = f"{length + cooldown:.4g} {unit}s in all: " if its_unit == unit else ""
    return [f"{whole}{length:.4g} {unit}s of the schedule, then a cool-down of {cooldown:.4g} {its_unit}s at its lowest rate"]
