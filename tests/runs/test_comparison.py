"""Comparison of runs: groups, recipe changes, the choice of the test, tables."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vitrail.errors import UserError
from vitrail.runs import comparison
from vitrail.runs.comparison import (
    METRICS,
    Group,
    Result,
    compare,
    comparison_to_dict,
    describe_changes,
    group_results,
    to_markdown,
)

PLAIN = {"name": "laptop", "seed": 0, "about.paper": "", "optimizer.lr": 0.001, "mixing.mixup": 0.8, "model": "deit"}


def result(folder, seed, value, data="abc", origin="", **changes):
    leaves = PLAIN | {name.replace("__", "."): each for name, each in changes.items()} | {"seed": seed}
    return Result(Path(folder), leaves, data, value, origin)


def several(folder, values, first=0, **changes):
    return [result(f"{folder}/seed-{seed}", seed, value, **changes) for seed, value in enumerate(values, first)]


def test_runs_that_differ_by_seed_alone_are_a_group():
    results = several("runs/plain", [0.5, 0.6]) + several("runs/fast", [0.7, 0.9], optimizer__lr=0.01)
    results.insert(2, result("elsewhere/plain", 7, 0.55, name="another name", about__paper="x"))
    groups, messages = group_results(results)
    assert [(group.name, group.values) for group in groups] == [("plain …", [0.5, 0.6, 0.55]), ("fast", [0.7, 0.9])]
    assert messages == []


def test_other_data_form_another_group():
    groups, _ = group_results([result("a", 0, 0.5), result("b", 1, 0.5, data="other")])
    assert len(groups) == 2


def test_repeated_runs_are_ignored():
    groups, messages = group_results([*several("a", [0.5, 0.6]), result("again", 1, 0.6)])
    assert groups[0].values == [0.5, 0.6]
    assert messages == ["again is ignored: a/seed-1 has the same recipe, data and seed."]


def test_groups_by_folder():
    results = [result("a/x", 0, 0.5, origin="a"), result("a/y", 0, 0.6, origin="a", optimizer__lr=1.0)]
    results += [result("b/x", 1, 0.7, origin="b"), result("b/y", 1, 0.9, origin="b", optimizer__lr=1.0)]
    groups, _ = group_results(results, by_folder=True)
    assert [(group.name, group.values) for group in groups] == [("a", [0.5, 0.6]), ("b", [0.7, 0.9])]
    assert groups[0].by_seed == {}  # two runs per seed cannot be paired
    assert compare(groups)[1].difference.test == "Welch t"


def test_group_names_are_unique():
    results = several("one/plain", [0.5]) + several("two/plain", [0.5], optimizer__lr=1.0)
    assert [group.name for group in group_results(results)[0]] == ["one/plain", "two/plain"]
    results = [*several("x", [0.5]), *several("x", [0.6], first=3, optimizer__lr=1.0)]  # one folder, two recipes
    assert len({group.name for group in group_results(results)[0]}) == 2


def test_paired_by_seed():
    first, second = [0.50, 0.62, 0.55], [0.53, 0.66, 0.60]
    rows = compare([Group("a", tuple(several("a", first))), Group("b", tuple(reversed(several("b", second))))])
    found = rows[1].difference
    assert (found.test, found.n) == ("paired t", 3)
    assert found.p == pytest.approx(stats.ttest_rel(second, first).pvalue)
    assert rows[0].difference is None


def test_only_common_seeds_are_paired():
    rows = compare([Group("a", tuple(several("a", [0.5, 0.6, 0.7, 0.75]))), Group("b", tuple(several("b", [0.8, 0.9], 2)))])
    assert (rows[1].difference.n, rows[1].difference.mean) == (2, pytest.approx(0.125))
    assert "only the common seeds are paired" in comparison.footnote(rows)


def test_welch_for_different_seeds():
    first, second = [0.50, 0.62, 0.55], [0.53, 0.66, 0.60, 0.7]
    rows = compare([Group("a", tuple(several("a", first))), Group("b", tuple(several("b", second, 10)))])
    assert rows[1].difference.p == pytest.approx(stats.ttest_ind(second, first, equal_var=False).pvalue)
    assert "Welch" in comparison.footnote(rows)


def test_one_run_each_has_a_difference_and_no_test():
    rows = compare([Group("a", tuple(several("a", [0.5]))), Group("b", tuple(several("b", [0.75])))])
    assert rows[1].difference[:4] == ("none", 1, 0.25, None)
    assert comparison.footnote(rows) == ""
    assert comparison.cells(rows[1], METRICS["top1"], 2) == ["b", "1", "75.00", "", "", "+25.00", "", ""]


def test_holm_adjusts_several_comparisons():
    values = np.random.default_rng(0).normal(0.5, 0.01, (4, 5))
    rows = compare([Group(str(index), tuple(several(str(index), each.tolist()))) for index, each in enumerate(values)])
    for row in rows[1:]:
        assert row.p_holm >= row.difference.p
    assert comparison.columns(rows)[-1] == "p (Holm)"
    assert len(comparison.cells(rows[0], METRICS["top1"], 4)) == len(comparison.columns(rows))


def test_recipe_changes():
    groups = [Group("a", tuple(several("a", [0.5]))), Group("b", tuple(several("b", [0.5], mixing__mixup=0.0, model="")))]
    row = compare(groups)[1]
    assert row.changes == {"mixing.mixup": (0.8, 0.0), "model": ("deit", "")}
    assert describe_changes(row) == 'mixing.mixup 0.8 -> 0.0, model deit -> ""'
    extra = Group("c", tuple(several("c", [0.5], architecture__depth=3)))
    assert describe_changes(compare([groups[0], extra])[1]) == "architecture.depth unset -> 3"


def test_markdown_and_json():
    groups = [Group("a|b", tuple(several("a", [0.5, 0.6]))), Group("c", tuple(several("c", [0.7, 0.9], mixing__mixup=0.0)))]
    rows = compare(groups)
    text = to_markdown(rows, METRICS["top1"], "best")
    assert "| a\\|b | 2 | 55.00 | 7.07 | 0.00 to 100.00 |" in text
    assert "* c: mixing.mixup 0.8 -> 0.0" in text
    heads, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {heads.count("|")}
    content = json.loads(json.dumps(comparison_to_dict(rows, METRICS["top1"], "best"), allow_nan=False))
    assert content["groups"][1]["difference"]["p"] == pytest.approx(stats.ttest_rel([0.7, 0.9], [0.5, 0.6]).pvalue)
    assert [run["seed"] for run in content["groups"][0]["runs"]] == [0, 1]


def test_small_p_values():
    assert [comparison.format_p(p) for p in (None, 0.5, 0.001, 0.0004)] == ["", "0.500", "0.001", "4e-04"]


def test_nothing_to_compare():
    with pytest.raises(UserError, match="no finished run"):
        compare([])
