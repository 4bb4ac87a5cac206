"""--epochs N is N epochs, whatever a recipe does after its schedule."""

import pytest

from vitrail.cli.train import leaves_of
from vitrail.errors import UserError
from vitrail.recipes import list_recipes, lookup
from vitrail.recipes.duration import told, whole_length
from vitrail.recipes.schema import ScheduleConfig, parse_span
from vitrail.training.schedules import rate_at, total_steps


@pytest.mark.parametrize("name", ["lvvit_s", "deit_base", "laptop"])
@pytest.mark.parametrize("epochs", [1, 5, 12.5, 300])
@pytest.mark.parametrize("steps", [1, 20, 1251])
def test_all_of_it_takes_as_long_as_asked_for(name, epochs, steps):
    recipe = lookup(name)
    shorter = recipe.set(whole_length(recipe.schedule, epochs))
    assert total_steps(shorter.schedule, steps) == pytest.approx(epochs * steps, abs=1)


def test_as_many_as_the_recipe_has_is_the_recipe():
    schedule = lookup("lvvit_s").schedule
    assert (schedule.length, schedule.cooldown) == ("300 epochs", "10 epochs")
    assert whole_length(schedule, 310) == {"schedule.length": "300 epochs", "schedule.cooldown": "10 epochs"}
    assert whole_length(lookup("deit_base").schedule, 300) == {"schedule.length": "300 epochs"}


def test_the_cool_down_keeps_its_share_and_its_rate():
    recipe = lookup("lvvit_s").set(whole_length(lookup("lvvit_s").schedule, 31) | {"schedule.by_epoch": False})
    rates = [rate_at(recipe.schedule, recipe.lr, step, 100) for step in range(3100)]
    lowest = [rate == recipe.schedule.min_lr for rate in rates]
    assert sum(lowest) == 100
    assert all(lowest[-100:])


@pytest.mark.parametrize(
    ("cooldown", "length"), [("25%", "4 epochs"), ("0 epochs", "5 epochs"), ("7 steps", "5 epochs"), ("300 epochs", "2.5 epochs")]
)
def test_other_cool_downs(cooldown, length):
    assert whole_length(ScheduleConfig("300 epochs", cooldown=cooldown), 5)["schedule.length"] == length


def test_what_is_typed():
    assert leaves_of(None, None, 31, None, "lvvit_s") == {"schedule.length": "30 epochs", "schedule.cooldown": "1 epochs"}
    given = ["schedule.cooldown=0 epochs"]
    assert leaves_of(given, None, 31, None, "lvvit_s")["schedule.length"] == "31 epochs"
    assert leaves_of(None, None, 2.5, None, "laptop") == {"schedule.length": "2.5 epochs"}
    assert leaves_of(None, None, 2, None, None) == {"schedule.length": "2 epochs"}
    with pytest.raises(UserError, match="no recipe"):
        leaves_of(None, None, 2, None, "nothing_like_it")


def test_the_usual_recipes_have_no_cool_down():
    """For them --epochs need not be told which it is."""
    assert not any(parse_span(lookup(name).schedule.cooldown)[0] for name in ("small", "laptop", "finetune"))
    assert any(parse_span(lookup(name).schedule.cooldown)[0] for name in list_recipes())


def test_it_is_said():
    assert told(ScheduleConfig("300 epochs")) == []
    (sentence,) = told(lookup("lvvit_s").schedule)
    assert sentence == "310 epochs in all: 300 epochs of the schedule, then a cool-down of 10 epochs at its lowest rate"
    assert told(ScheduleConfig("200 steps", cooldown="10%"))[0].startswith("220 steps in all: 200 steps")
    assert told(ScheduleConfig("2 epochs", cooldown="5 steps"))[0].startswith(
        "2 epochs of the schedule, then a cool-down of 5 steps"
    )
