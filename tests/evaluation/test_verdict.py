"""What is said about an accuracy: interval, baselines, few images, the choice of the best epoch."""

import numpy as np
import pytest
from scipy import stats

from vitrail.evaluation.statistics import wilson
from vitrail.evaluation.verdict import judge_run, majority_share, make_verdict


@pytest.mark.parametrize(("correct", "images"), [(0, 1), (1, 1), (7, 12), (95, 100), (49_000, 50_000)])
def test_wilsons_interval(correct, images):
    expected = stats.binomtest(correct, images).proportion_ci(0.95, "wilson")
    assert wilson(correct / images, images) == pytest.approx((expected.low, expected.high), abs=1e-12)


def make_lines(*accuracies):
    return [{"kind": "validation", "step": step, "epoch": step, "top1": value} for step, value in enumerate(accuracies, 1)]


def judge(best, step, accuracies, images=100, **more):
    run = {"best": {"top1": best, "images": images, "step": step}, "data": {"classes": ["a", "b", "c", "d"]}} | more
    return judge_run(run, make_lines(*accuracies))


def test_the_interval_and_baselines_are_named():
    verdict = judge(0.8, 3, [0.5, 0.7, 0.8, 0.72], baselines={"majority": 0.31, "probe": 0.69})
    assert verdict.plus_minus == "80.00 % ± 7.8"
    first, few, selection = verdict.describe()
    assert first == (
        "95 % interval 71.1 to 86.7 % from 100 images; chance 25.0 %, always the most frequent class 31.0 %, "
        "a probe on the frozen features 69.0 %."
    )
    assert few == "Only 100 images: the interval is ± 8 points; differences below that are noise."
    assert selection == (
        "It is the best of 4 validations on the same images and therefore optimistic: the validations next to it have 71.0 %, "
        "so by up to about 9.0 points."
    )
    assert verdict.to_dict()["neighbors"] == pytest.approx(0.71)


def test_a_later_validation_than_the_highest():
    run = {"best": {"top1": 0.7, "images": 100, "step": 3, "highest": 0.73, "highest_step": 1}}
    assert (
        judge_run(run, make_lines(0.73, 0.6, 0.7)).describe()[-1].startswith("The highest of 3 validations is 73.0 %; the latest")
    )
    assert judge_run({"best": run["best"] | {"highest": "x"}}, make_lines(0.73, 0.6, 0.7)).highest is None


def test_results_that_are_not_better_than_a_baseline():
    text = " ".join(judge(0.8, 1, [0.8], baselines={"majority": 0.75, "probe": 0.9}).describe())
    assert "not clearly better than always predicting the most frequent class" in text
    assert "best of" not in text  # a single validation chooses nothing
    text = " ".join(judge(0.8, 1, [0.8], 1000, baselines={"majority": 0.25, "probe": 0.79}).describe())
    assert "difference to the probe on the frozen features is within the interval" in text
    assert "Only" not in text
    text = " ".join(judge(0.8, 0, [0.7], 1000, baselines={"probe": 0.8}).describe())
    assert "with its classifier; a longer training (--minutes, --epochs) may." in text
    assert "within the interval" not in text
    text = " ".join(judge(1.0, 0, [1.0], 1000, baselines={"probe": 1.0}).describe())
    assert "Training did not improve on the probe, so these are the initial weights with its classifier." in text


def test_the_last_validation_is_compared_with_the_two_before():
    assert judge(0.8, 4, [0.1, 0.7, 0.74, 0.8]).neighbors == pytest.approx(0.72)


def test_initial_weights_are_not_compared_with_trained_ones():
    lines = [{"kind": "validation", "step": step, "top1": top1} for step, top1 in enumerate((0.8, 0.6, 0.7))]
    run = {"best": {"top1": 0.8, "images": 100, "step": 0}}
    assert judge_run(run, lines).neighbors == pytest.approx(0.65)
    assert judge_run(run | {"baselines": {"probe": 0.8}}, lines).neighbors is None


def test_the_best_of_two_validations_has_no_estimate():
    assert judge(0.8, 2, [0.7, 0.8]).describe()[-1].endswith("of 2 validations on the same images and therefore optimistic.")
    assert judge(0.8, 3, [0.8, 0.8, 0.8]).describe()[-1].endswith("therefore optimistic.")  # not "by up to about 0.0 points"
    assert judge(0.8, 9, [0.7, 0.8]).neighbors is None  # the metrics do not have the best step


@pytest.mark.parametrize(
    "best",
    [{}, {"top1": 0.5}, {"top1": "nan", "images": 5}, {"top1": 7.0, "images": 5}, {"top1": 0.5, "images": 2.5}],
)
def test_runs_without_an_accuracy_have_no_verdict(best):
    assert judge_run({"best": best}, []) is None
    assert judge_run({"best": {"top1": 0.5, "images": 4}, "metric": {"name": "error"}}, []) is None


def test_baselines_that_are_not_numbers_are_ignored():
    assert judge(0.8, 1, [0.8], baselines={"majority": "nan", "probe": None}).majority is None


def test_the_majority_is_that_of_the_training_images():
    assert majority_share(np.array([1, 1, 0, -1]), np.array([0, 0, 1, 1, 0, -1])) == pytest.approx(2 / 5)


def test_chance_needs_classes():
    assert make_verdict(0.5, 1000).describe() == ["95 % interval 46.9 to 53.1 % from 1,000 images."]
