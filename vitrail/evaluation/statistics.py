"""Summary statistics of repeated measurements, such as the accuracies of five seeds, and tests of differences between two sets.

No statistics library is needed: Student's t distribution is computed from the incomplete beta function.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95  # of all intervals
MAX_EXACT_FLIPS = 16  # up to this many pairs all choices of signs are enumerated
RESAMPLES = 10_000  # of a bootstrap, and of signs for more pairs
ROUNDING = 1e-12  # standard errors below this, relative to the values, are rounding errors


class Summary(NamedTuple):
    """Statistics of n values; None where a single value has none."""

    n: int
    mean: float
    sd: float | None  # standard deviation with n - 1
    error: float | None  # standard error of the mean
    low: float | None  # confidence interval of the mean
    high: float | None


class Difference(NamedTuple):
    """Difference of two sets of values, second minus first; None where a value is undefined."""

    test: str  # "paired t", "Welch t" or "none"
    n: int  # number of pairs, or of values in both sets
    mean: float
    low: float | None
    high: float | None
    p: float | None  # two-sided; None also if all differences are equal and not 0
    p_signs: float | None  # of the sign-flip permutation test, without an assumption about the distribution


def summarize(values: Sequence[float]) -> Summary:
    """Mean, standard deviation, standard error and Student's t confidence interval."""
    numbers = to_finite_array(values)
    n, mean = len(numbers), float(numbers.mean())
    if n < 2:
        return Summary(n, mean, None, None, None, None)
    sd = standard_deviation(numbers)
    error = sd / math.sqrt(n)
    margin = student_quantile(CONFIDENCE, n - 1) * error
    return Summary(n, mean, sd, error, mean - margin, mean + margin)


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The paired t-test of values at the same index, such as two runs with the same seed."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values are not pairs")
    differences = to_finite_array(second) - to_finite_array(first)
    scale = max(float(np.abs(to_finite_array([*first, *second])).max()), math.ulp(0.0))
    summary = summarize(differences.tolist())
    if summary.error is None:
        return Difference("none", 1, summary.mean, None, None, None, None)
    p = p_value(summary.mean, summary.error, summary.n - 1, scale)
    return Difference("paired t", summary.n, summary.mean, summary.low, summary.high, p, sign_flip_p(differences))


def welch(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Welch's t-test of two independent sets with possibly different variances."""
    a, b = summarize(first), summarize(second)
    mean = b.mean - a.mean
    if a.error is None or b.error is None:
        return Difference("none", a.n + b.n, mean, None, None, None, None)
    error = math.hypot(a.error, b.error)
    scale = max(float(np.abs(to_finite_array([*first, *second])).max()), math.ulp(0.0))
    if error <= ROUNDING * scale:
        return Difference("Welch t", a.n + b.n, mean, mean, mean, p_value(mean, error, 1, scale), None)
    shares = (a.error / error) ** 4 / (a.n - 1) + (b.error / error) ** 4 / (b.n - 1)
    degrees = 1 / shares
    margin = student_quantile(CONFIDENCE, degrees) * error
    return Difference("Welch t", a.n + b.n, mean, mean - margin, mean + margin, p_value(mean, error, degrees, scale), None)


def p_value(mean: float, error: float, degrees: float, scale: float) -> float | None:
    """The two-sided p-value of a mean; with a standard error of 0: 1 if the mean is 0, else None."""
    if error > ROUNDING * scale:
        return student_two_sided_p(mean / error, degrees)
    return 1.0 if abs(mean) <= ROUNDING * scale else None


def sign_flip_p(differences: np.ndarray) -> float:
    """The p-value of the sign-flip permutation test of n differences, against a mean of 0."""
    n = len(differences)
    if n <= MAX_EXACT_FLIPS:
        signs = 1 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (RESAMPLES, n))
    reached = np.abs(signs @ differences)
    limit = abs(float(differences.sum())) * (1 - 1e-9)  # sums in another order differ by rounding
    hits = int((reached >= limit).sum())
    return hits / len(signs) if n <= MAX_EXACT_FLIPS else (hits + 1) / (len(signs) + 1)


def bootstrap(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The bootstrap confidence interval of the mean; deterministic."""
    numbers = to_finite_array(values)
    draws = np.random.default_rng(0)
    # In chunks: all resamples of fifty thousand values would not fit in memory.
    count = max(1, min(RESAMPLES, 4_000_000 // len(numbers)))
    means = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, count):
        part = means[start : start + count]
        part[:] = numbers[draws.integers(len(numbers), size=(len(part), len(numbers)))].mean(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's confidence interval of a share of n independent images, which holds for few images and for shares near 0 or 1."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    margin = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(center - margin, 0.0), min(center + margin, 1.0)


def standard_error(share: float, n: int) -> float:
    """The standard deviation of a share of n independent images."""
    return math.sqrt(max(share * (1 - share), 0.0) / n)


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """The exact two-sided p-value of McNemar's test; correct predictions bool [N] of two models on the same images."""
    if first.shape != second.shape:
        raise ValueError(f"{first.shape} and {second.shape} do not belong to the same images")
    one, two = int((first & ~second).sum()), int((second & ~first).sum())
    total, fewer = one + two, min(one, two)
    if not total:
        return 1.0
    # The lower tail of a binomial distribution with p = 0.5, as an incomplete beta function.
    return min(1.0, 2 * incomplete_beta(total - fewer, fewer + 1, 0.5))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values of several comparisons, corrected by the Holm-Bonferroni method; None values stay None."""
    ordered = sorted((p, index) for index, p in enumerate(values) if p is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, index) in enumerate(ordered):
        highest = max(highest, min(1.0, p * (len(ordered) - rank)))
        corrected[index] = highest
    return corrected


def student_two_sided_p(t: float, degrees: float) -> float:
    """The probability that |T| >= |t| for Student's t distribution."""
    if math.isinf(t):
        return 0.0
    square = t * t / (degrees + t * t)
    if square <= 1.5 / (degrees / 2 + 2.5):  # near 1, where the other form would cancel for small t
        return 1 - incomplete_beta(0.5, degrees / 2, square)
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def student_quantile(confidence: float, degrees: float) -> float:
    """The t for which the interval [-t, t] has this probability."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence is between 0 and 1, not {confidence}")
    low, high = 0.0, 1.0
    while student_two_sided_p(high, degrees) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if student_two_sided_p(middle, degrees) > 1 - confidence else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22) and Lentz's method."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)  # where the fraction converges fast
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        factor = 1.0
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            factor = c * d
            fraction *= factor
        if abs(factor - 1) < 1e-15:
            break
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) * fraction / a


def standard_deviation(numbers: np.ndarray) -> float:
    """The standard deviation with n - 1; exactly 0 if all values are equal, without a rounding error of their mean."""
    return 0.0 if (numbers == numbers[0]).all() else float(numbers.std(ddof=1))


def to_finite_array(values: Sequence[float] | np.ndarray) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError("statistics need at least one value, and no NaN or Inf")
    return numbers
