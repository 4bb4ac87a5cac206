"""How sure a number is: mean and spread of repeated measurements, and whether two sets of them differ.

Everything works on a handful of values, such as the accuracies of five seeds, and needs no statistics library: Student's
distribution comes from the incomplete beta function.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
FLIPS = 16  # values up to which every choice of signs is tried
DRAWS = 10_000  # of a bootstrap, and of signs where there are too many to try all
EVEN = 1e-12  # spread, relative to the values, that is nothing but rounding


class Spread(NamedTuple):
    """n values in short. One value has a mean and nothing else."""

    n: int
    mean: float
    sd: float | None  # of the values, with n - 1
    error: float | None  # of the mean
    low: float | None  # the interval of the mean
    high: float | None


class Difference(NamedTuple):
    """A second set of values minus a first one; what cannot be told is None."""

    test: str  # "paired t", "Welch t" or "none"
    n: int  # pairs, or the values of both
    mean: float
    low: float | None
    high: float | None
    p: float | None  # two-sided; None also where the differences do not vary at all
    p_signs: float | None  # the same without assuming anything about the distribution: by flipping the signs of pairs


def summarize(values: Sequence[float], confidence: float = CONFIDENCE) -> Spread:
    """Mean, standard deviation, standard error and Student's interval."""
    numbers = finite(values)
    n, mean = len(numbers), float(numbers.mean())
    if n < 2:
        return Spread(n, mean, None, None, None, None)
    sd = deviation(numbers)
    error = sd / math.sqrt(n)
    reach = student_quantile(confidence, n - 1) * error
    return Spread(n, mean, sd, error, mean - reach, mean + reach)


def paired(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Difference:
    """The paired t-test: values at the same place belong together, as two trainings with the same seed do."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values are not pairs")
    gaps = finite(second) - finite(first)
    scale = max(float(np.abs(finite([*first, *second])).max()), math.ulp(0.0))
    spread = summarize(gaps.tolist(), confidence)
    if spread.error is None:
        return Difference("none", 1, spread.mean, None, None, None, None)
    p = test(spread.mean, spread.error, spread.n - 1, scale)
    return Difference("paired t", spread.n, spread.mean, spread.low, spread.high, p, sign_flips(gaps))


def welch(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Difference:
    """Welch's t-test: two sets that have nothing to do with each other and may vary differently."""
    a, b = summarize(first, confidence), summarize(second, confidence)
    mean = b.mean - a.mean
    if a.error is None or b.error is None:
        return Difference("none", a.n + b.n, mean, None, None, None, None)
    error = math.hypot(a.error, b.error)
    scale = max(float(np.abs(finite([*first, *second])).max()), math.ulp(0.0))
    if error <= EVEN * scale:
        return Difference("Welch t", a.n + b.n, mean, mean, mean, test(mean, error, 1, scale), None)
    shares = (a.error / error) ** 4 / (a.n - 1) + (b.error / error) ** 4 / (b.n - 1)
    freedom = 1 / shares
    reach = student_quantile(confidence, freedom) * error
    return Difference("Welch t", a.n + b.n, mean, mean - reach, mean + reach, test(mean, error, freedom, scale), None)


def test(mean: float, error: float, freedom: float, scale: float) -> float | None:
    """The p-value of a mean with this error. Without any spread: 1 for no difference at all, and no answer for one."""
    if error > EVEN * scale:
        return student_tails(mean / error, freedom)
    return 1.0 if abs(mean) <= EVEN * scale else None


test.__test__ = False  # type: ignore[attr-defined]  # not one of pytest's


def sign_flips(gaps: np.ndarray) -> float:
    """How often the mean of n differences is at least as far from zero when each may as well have had the other sign."""
    n = len(gaps)
    if n <= FLIPS:
        signs = 1 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (DRAWS, n))
    reached = np.abs(signs @ gaps)
    limit = abs(float(gaps.sum())) * (1 - 1e-9)  # sums in another order differ in the last bit
    hits = int((reached >= limit).sum())
    return hits / len(signs) if n <= FLIPS else (hits + 1) / (len(signs) + 1)


def bootstrap(values: Sequence[float] | np.ndarray, confidence: float = CONFIDENCE, seed: int = 0) -> tuple[float, float]:
    """The interval of the mean by drawing the values again with repetition; the same answer for the same values."""
    numbers = finite(values)
    draws = np.random.default_rng(seed)
    # A few draws at a time: a thousand of fifty thousand images would not fit in memory.
    count = max(1, min(DRAWS, 4_000_000 // len(numbers)))
    means = np.empty(DRAWS)
    for start in range(0, DRAWS, count):
        part = means[start : start + count]
        part[:] = numbers[draws.integers(len(numbers), size=(len(part), len(numbers)))].mean(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """The exact two-sided p-value for two models that were right [N] and right [N] on the same images."""
    if first.shape != second.shape:
        raise ValueError(f"{first.shape} and {second.shape} are not about the same images")
    one, two = int((first & ~second).sum()), int((second & ~first).sum())
    total, fewer = one + two, min(one, two)
    if not total:
        return 1.0
    # The lower half of a fair binomial, as an incomplete beta function.
    return min(1.0, 2 * beta_share(total - fewer, fewer + 1, 0.5))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values of several comparisons, raised so that the chance of even one false alarm stays what each one says."""
    known = sorted((p, place) for place, p in enumerate(values) if p is not None)
    found: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, place) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        found[place] = highest
    return found


def student_tails(t: float, freedom: float) -> float:
    """The probability that Student's t lies at least as far from zero, on either side."""
    if math.isinf(t):
        return 0.0
    square = t * t / (freedom + t * t)
    if square <= 1.5 / (freedom / 2 + 2.5):  # near 1, where the other form would lose every digit of a small t
        return 1 - beta_share(0.5, freedom / 2, square)
    return beta_share(freedom / 2, 0.5, freedom / (freedom + t * t))


def student_quantile(confidence: float, freedom: float) -> float:
    """The t that encloses this share of the distribution between -t and t."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    low, high = 0.0, 1.0
    while student_tails(high, freedom) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if student_tails(middle, freedom) > 1 - confidence else (low, middle)
    return (low + high) / 2


def beta_share(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22) and Lentz's method."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_share(b, a, 1 - x)  # where the fraction converges fast
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


def deviation(numbers: np.ndarray) -> float:
    """The standard deviation with n - 1; exactly zero where all values are the same, whatever rounding makes of their mean."""
    return 0.0 if (numbers == numbers[0]).all() else float(numbers.std(ddof=1))


def finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError("statistics need at least one number, and all of them finite")
    return numbers
