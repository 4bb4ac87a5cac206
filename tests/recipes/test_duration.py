"""--epochs N is N epochs in total, including the cooldown."""

import pytest

from vitrail.errors import UserError
from vitrail.recipes import list_recipes, lookup
from vitrail.recipes.arguments import recipe_changes
from vitrail.recipes.duration import describe_cooldown, set_total_epochs
from vitrail.recipes.schema import ScheduleConfig, parse_duration
from vitrail.training.schedules import lr_at, total_steps


@pytest.mark.parametrize("name", ["lvvit_s", "deit_base", "laptop"])
@pytest.mark.parametrize("epochs", [1, 5, 12.5, 300])
@pytest.mark.parametrize("steps", [1, 20, 1251])
def test_the_total_length_is_the_requested_one(name, epochs, steps):
    recipe = lookup(name)
    shorter = recipe.set(set_total_epochs(recipe.schedule, epochs))
    assert total_steps(shorter.schedule, steps) == pytest.approx(epochs * steps, abs=1)


def test_the_length_of_the_recipe_changes_nothing():
    schedule = lookup("lvvit_s").schedule
    assert (schedule.length, schedule.cooldown) == ("300 epochs", "10 epochs")
    assert set_total_epochs(schedule, 310) == {"schedule.length": "300 epochs", "schedule.cooldown": "10 epochs"}
    assert set_total_epochs(lookup("deit_base").schedule, 300) == {"schedule.length": "300 epochs"}


def test_the_cooldown_keeps_its_fraction_and_its_learning_rate():
    recipe = lookup("lvvit_s").set(set_total_epochs(lookup("lvvit_s").schedule, 31) | {"schedule.by_epoch": False})
    rates = [lr_at(recipe.schedule, recipe.lr, step, 100) for step in range(3100)]
    lowest = [rate == recipe.schedule.min_lr for rate in rates]
    assert sum(lowest) == 100
    assert all(lowest[-100:])


@pytest.mark.parametrize(
    ("cooldown", "length"), [("25%", "4 epochs"), ("0 epochs", "5 epochs"), ("7 steps", "5 epochs"), ("300 epochs", "2.5 epochs")]
)
def test_cooldowns_in_other_units(cooldown, length):
    assert set_total_epochs(ScheduleConfig("300 epochs", cooldown=cooldown), 5)["schedule.length"] == length


def test_the_epochs_option():
    assert recipe_changes("lvvit_s", {}, {"epochs": 31}) == {"schedule.length": "30 epochs", "schedule.cooldown": "1 epochs"}
    for key in ("schedule.cooldown", "cooldown_epochs"):
        assert recipe_changes("lvvit_s", {key: "0 epochs"}, {"epochs": 31})["schedule.length"] == "31 epochs"
    assert recipe_changes("laptop", {}, {"epochs": 2.5}) == {"schedule.length": "2.5 epochs"}
    assert recipe_changes(None, {}, {"epochs": 2}) == {"schedule.length": "2 epochs"}
    with pytest.raises(UserError, match="no recipe"):
        recipe_changes("nothing_like_it", {}, {"epochs": 2})


def test_the_default_recipes_have_no_cooldown():
    """So --epochs does not depend on which of them is chosen."""
    assert not any(parse_duration(lookup(name).schedule.cooldown)[0] for name in ("small", "laptop", "finetune"))
    assert any(parse_duration(lookup(name).schedule.cooldown)[0] for name in list_recipes())


def test_the_message():
    assert describe_cooldown(ScheduleConfig("300 epochs")) == []
    (message,) = describe_cooldown(lookup("lvvit_s").schedule)
    assert message == "310 epochs in total: 300 epochs of schedule, then 10 epochs of cooldown at the minimum learning rate"
    assert describe_cooldown(ScheduleConfig("200 steps", cooldown="10%"))[0].startswith("220 steps in total: 200 steps")
    assert describe_cooldown(ScheduleConfig("2 epochs", cooldown="5 steps"))[0].startswith(
        "2 epochs of schedule, then 5 steps of cooldown"
    )
