"""Statistics of a few values, against SciPy, printed tables and edge cases."""

import math

import numpy as np
import pytest
from scipy import stats

from vitrail.evaluation import statistics

A = [0.981, 0.986, 0.979, 0.990, 0.984]
B = [0.985, 0.993, 0.981, 0.991, 0.992]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4.7, 10, 30, 1000, 1e5])
@pytest.mark.parametrize("t", [1e-4, 0.3, 1.0, 2.2, 9.0, 300.0])
def test_students_tails(t, freedom):
    assert statistics.student_two_sided_p(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-8, abs=1e-300)
    assert statistics.student_two_sided_p(-t, freedom) == statistics.student_two_sided_p(t, freedom)


def test_students_quantiles_of_the_printed_table():
    for freedom, value in {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 30: 2.042, 120: 1.980}.items():
        assert round(statistics.student_quantile(0.95, freedom), 3) == value
    assert round(statistics.student_quantile(0.99, 4), 3) == 4.604
    assert statistics.student_quantile(0.9, 3.3) == pytest.approx(stats.t.ppf(0.95, 3.3), rel=1e-9)


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2, 3), (0.5, 40), (300, 0.5), (500, 700), (1, 1)])
def test_the_incomplete_beta_function(a, b):
    for x in (0.0, 1e-6, 0.2, 0.4166, 0.5, 0.93, 1.0):
        assert statistics.incomplete_beta(a, b, x) == pytest.approx(stats.beta.cdf(x, a, b), rel=1e-9, abs=1e-14)


def test_a_summary():
    found, expected = statistics.summarize(A), stats.t.interval(0.95, 4, np.mean(A), stats.sem(A))
    assert (found.n, found.mean, found.sd) == (5, pytest.approx(np.mean(A)), pytest.approx(np.std(A, ddof=1)))
    assert (found.low, found.high) == pytest.approx(expected)


def test_one_value_has_no_spread():
    assert statistics.summarize([0.5]) == (1, 0.5, None, None, None, None)
    assert statistics.paired([0.5], [0.75])[:4] == ("none", 1, 0.25, None)
    assert statistics.welch([0.5], [0.25, 0.75])[0] == "none"


def test_the_paired_test():
    found, expected = statistics.paired(A, B), stats.ttest_rel(B, A)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    assert found.mean == pytest.approx(np.mean(B) - np.mean(A))
    exact = stats.permutation_test((np.subtract(B, A),), np.mean, permutation_type="samples", n_resamples=1000)
    assert found.p_signs == pytest.approx(exact.pvalue)


def test_many_pairs_are_sampled():
    draws = np.random.default_rng(1)
    gaps = draws.normal(0.5, 1, 40)
    exact = stats.permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=20_000, random_state=2)
    assert statistics.sign_flip_p(gaps) == pytest.approx(exact.pvalue, abs=0.01)
    assert statistics.sign_flip_p(np.full(40, 1.0)) == pytest.approx(1 / (statistics.RESAMPLES + 1))


def test_welchs_test():
    found, expected = statistics.welch(A, B[:3]), stats.ttest_ind(B[:3], A, equal_var=False)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    assert (found.n, found.p_signs) == (8, None)


def test_equal_differences():
    """A t-test would say p = 0 for two seeds that gained the same; that is no answer."""
    same = statistics.paired([0.5, 0.7], [0.5, 0.7])
    assert (same.p, same.p_signs, same.mean) == (1.0, 1.0, 0.0)
    gained = statistics.paired([0.1, 0.2, 0.3], [0.1 + 0.1, 0.2 + 0.1, 0.3 + 0.1])
    assert (gained.p, gained.p_signs) == (None, 0.25)
    assert statistics.welch([0.5, 0.5], [0.5, 0.5]).p == 1.0
    apart = statistics.welch([0.5, 0.5], [0.75, 0.75])
    assert (apart.p, apart.low, apart.high) == (None, 0.25, 0.25)
    assert statistics.summarize([0.1] * 3).sd == 0.0


def test_the_bootstrap():
    values = np.random.default_rng(3).normal(2, 1, 200)
    low, high = statistics.bootstrap(values)
    expected = stats.bootstrap((values,), np.mean, method="percentile", random_state=4).confidence_interval
    assert (low, high) == pytest.approx(tuple(expected), abs=0.02)
    assert statistics.bootstrap(values) == (low, high)
    assert statistics.bootstrap([1.0, 1.0]) == (1.0, 1.0)


def test_mcnemar():
    for one, two in ((3, 11), (0, 6), (5, 5), (40, 61), (0, 1)):
        first = np.array([True] * one + [False] * two + [True] * 20)
        second = np.array([False] * one + [True] * two + [True] * 20)
        assert statistics.mcnemar(first, second) == pytest.approx(stats.binomtest(one, one + two).pvalue)
    assert statistics.mcnemar(np.array([True]), np.array([True])) == 1.0


def test_holm():
    assert statistics.holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]
    assert statistics.holm([]) == []


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_nan_and_empty_values_are_rejected(values):
    with pytest.raises(ValueError, match="no NaN or Inf"):
        statistics.summarize(values)
    with pytest.raises(ValueError, match="pairs"):
        statistics.paired([1.0], [1.0, 2.0])
