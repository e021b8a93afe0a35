"""Statistics of paired differences, against SciPy, simulated walks and studies whose truth is known."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import beta, norm, t, ttest_ind, ttest_rel

from samewise.runner import paired

STUDIES = 1000
FIRST = paired.PLANNED
BOTH = FIRST + paired.PLANNED * (1 - FIRST)
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


@pytest.mark.parametrize("values", [[0.1, 0.3], [1.0, 2.0, 3.0], [0.91, 0.94, 0.95, 0.96, 0.99]])
def test_a_single_look_at_symmetric_differences_gives_students_paired_interval(values: list[float]) -> None:
    zeros = [0.0] * len(values)
    now, reference = paired.estimate(values, zeros), ttest_rel(values, zeros)
    # Within a five-hundredth of its width: chances are known on a grid
    interval = reference.confidence_interval()
    assert (now.low, now.high) == pytest.approx(tuple(interval), abs=(interval.high - interval.low) / 500)
    assert (now.mean, now.p) == pytest.approx((np.mean(values), reference.pvalue), rel=5e-3)
    assert now.deviation == pytest.approx(np.std(values, ddof=1))


@pytest.mark.parametrize("looks", [((3, 0.3), (5, 0.6), (8, 1.0)), ((5, 0.8), (13, 0.96)), tuple((n, n / 10) for n in range(2, 11))])
def test_each_look_spends_its_share_of_the_level(looks: paired.Looks) -> None:
    """Simulated walks, beside the computed ones."""
    counts = [n for n, _ in looks]
    steps = np.random.default_rng(0).normal(size=(200_000, counts[-1]))
    sums = steps.cumsum(1)[:, np.array(counts) - 1] / np.sqrt(counts)
    crossed = np.maximum.accumulate(np.abs(sums) > np.array(paired.boundaries(looks)), axis=1).mean(0)
    assert crossed == pytest.approx([0.05 * share for _, share in looks], abs=0.002)


def test_the_interval_leaves_out_zero_exactly_beyond_the_last_boundary() -> None:
    looks, pattern = ((3, 0.3), (6, 0.8)), np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    statistic = t.isf(norm.sf(paired.boundaries(looks)[-1]), 5)
    for factor, sign in ((1.001, 1), (0.999, 0)):
        shifted = pattern + factor * statistic * np.std(pattern, ddof=1) / math.sqrt(6)
        assert paired.estimate(shifted, np.zeros(6), looks).sign == sign
        assert paired.estimate(-shifted, np.zeros(6), looks).sign == -sign


def test_limits_respect_the_metrics_bounds_and_equal_values_are_no_proof() -> None:
    now = paired.estimate([0.999, 1.0, 0.9], [0.4, 0.99, 0.9], bounds=(0.0, 1.0))
    free = paired.estimate([0.999, 1.0, 0.9], [0.4, 0.99, 0.9])
    assert now.high <= 1.0 < free.high + 0.4
    assert now.high < free.high
    same = paired.estimate([0.5] * 3, [0.5] * 3)
    assert (same.low, same.high, same.sign, same.p) == (0.0, 0.0, 0, 1.0)
    # Three equal differences of a coarse metric
    assert paired.estimate([0.6] * 3, [0.5] * 3, ((3, 0.8),)).high > 0.15
    assert paired.estimate([0.6], [0.5]).low == -math.inf


def test_holms_levels_hold_together_and_more_pairs_settle_what_they_promise() -> None:
    assert paired.holm_levels([0.001, 0.03, 0.02, 0.5]) == pytest.approx([0.05 / 4, 0.05 / 3, 0.05 / 3, 0.05 / 3])
    assert paired.holm_levels([0.04, 0.01]) == pytest.approx([0.05, 0.025])
    first = paired.estimate([0.1, 0.5, -0.2, 0.4], [0.0] * 4, ((4, FIRST),))
    more = paired.pairs_needed(first, ((4, FIRST),))
    assert more is not None
    rng, looks = np.random.default_rng(0), ((4, FIRST), (4 + more, BOTH))
    limit = paired.boundaries(looks)[-1]
    drawn = rng.normal(first.mean, first.deviation, (4000, 4 + more))
    statistics = drawn.mean(1) / drawn.std(1, ddof=1) * math.sqrt(4 + more)
    assert 0.78 < (norm.isf(t.sf(statistics, 3 + more)) > limit).mean() < 0.9


def _accuracies(gain: float, level: float, noise: float, *, samples: int = 0) -> Draw:
    """Accuracies whose logits share a normal effect of the seed; with `samples`, of so many samples."""

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        shared = level + rng.normal(0, noise, n)
        shares = [expit(shared + shift + rng.normal(0, noise, n)) for shift in (gain, 0.0)]
        a, b = (rng.binomial(samples, x) / samples for x in shares) if samples else shares
        return np.asarray(a), np.asarray(b)

    return draw


def _errors(gain: float) -> Draw:
    """Accuracies whose errors have a gamma distribution, with a skewness of 1.4."""
    return lambda rng, n: (1 - 0.05 * math.exp(-gain) * rng.gamma(2, 0.5, n), 1 - 0.05 * rng.gamma(2, 0.5, n))


def _shares(gain: float, mean: float, size: float, correlation: float) -> Draw:
    """Accuracies with a beta distribution of so large a sample, correlated by a Gaussian copula."""

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        common, (first, second) = rng.normal(size=n), rng.normal(size=(2, n))
        return tuple(
            beta.ppf(norm.cdf(math.sqrt(correlation) * common + math.sqrt(1 - correlation) * x), m * size, (1 - m) * size)
            for x, m in ((first, mean + gain), (second, mean))
        )

    return draw


APART = ((0.75, 400, 0.5), (0.95, 200, 0.3), (0.6, 50, 0.8), (0.9, 100, 0.0))
DRAWS = {
    "null": [_accuracies(0, 2.2, 0.25), _accuracies(0, 4, 0.4), _accuracies(0, 3, 0.2, samples=360), _errors(0)],
    "gain": [_accuracies(0.3, 2.2, 0.25), _accuracies(0.8, 2.2, 0.25), _accuracies(0.5, 3, 0.2, samples=360), _errors(0.8)],
    # By other distributions than those with which the shares of the level and of the skewness were chosen
    "null apart": [_shares(0, *x) for x in APART],
    "gain apart": [_shares(0.02, *x) for x in APART],
}
PLANS = [((3, FIRST),), ((5, FIRST),), ((5, FIRST), (13, BOTH)), *(tuple((n, FIRST * n / last) for n in range(3, last + 1)) for last in (8, 12))]
"""A single look; a second one that nobody had planned; a look after each pair."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS)
def test_stated_intervals_hold_the_truth_of_bounded_skewed_metrics_whenever_a_study_stops(kind: str) -> None:
    rng, held, better = np.random.default_rng(0), 0, 0
    truths = [float(np.subtract(*draw(rng, 1_000_000)).mean()) if "gain" in kind else 0.0 for draw in DRAWS[kind]]
    for study in range(STUDIES):
        which, plan = study % 4, PLANS[study // 4 % len(PLANS)]
        limits = paired.boundaries(plan)
        a, b = DRAWS[kind][which](rng, plan[-1][0])
        for look, (n, _) in enumerate(plan):
            spread = (a - b)[:n].std(ddof=1) or 1e-9
            deviate = norm.isf(t.sf(abs((a - b)[:n].mean()) / spread * math.sqrt(n), n - 1))
            if deviate > limits[look]:
                break
        # The look at which it stops is the last of its plan
        looks = plan[: look + 1] if len(plan) == 2 else (*plan[:look], (n, FIRST))
        now = paired.estimate(a[:n], b[:n], looks, bounds=(0.0, 1.0))
        held += now.low <= truths[which] <= now.high
        better += now.sign > 0 and deviate > limits[look]
    assert 0.93 <= held / STUDIES <= 0.97
    assert better / STUDIES <= 0.05 or "gain" in kind


@pytest.mark.slow
def test_a_hundred_tries_at_a_level_shared_among_them_claim_something_in_few_campaigns() -> None:
    """What a ledger of tries needs: the level of try i is 1 / (i (i + 1)) of the whole."""
    rng, claims = np.random.default_rng(0), 0
    for _ in range(300):
        a, b = DRAWS["null"][0](rng, 500)
        gains = (a - b).reshape(100, 5)
        statistics = gains.mean(1) / gains.std(1, ddof=1) * math.sqrt(5)
        levels = paired.LEVEL / (np.arange(1, 101) * np.arange(2, 102))
        claims += bool((2 * t.sf(statistics, 4) < levels).any())
    assert claims / 300 <= 0.05


MOMENTUM = (
    [0.9268, 0.9465, 0.9577, 0.9437, 0.9634, 0.9239, 0.8817, 0.9550, 0.9296, 0.9521, 0.9380, 0.9437],
    [0.9099, 0.9211, 0.9268, 0.8789, 0.9042, 0.9155, 0.8761, 0.9211, 0.9239, 0.9324, 0.9211, 0.8930],
)
"""Accuracy of the digits' ResNet with momentum 0.9 and 0, by seed: docs/comparing.md has the command."""


def test_pairs_settle_momentum_on_the_digits_with_fewer_seeds_than_an_unpaired_test() -> None:
    drawn = np.random.default_rng(0).multivariate_normal(np.mean(MOMENTUM, axis=1), np.cov(MOMENTUM), (20_000, 20))
    needed = {}
    for name, test in (("paired", ttest_rel), ("unpaired", ttest_ind)):
        power = {n: (test(drawn[:, :n, 0], drawn[:, :n, 1], axis=1).pvalue < 0.05).mean() for n in range(3, 21)}
        needed[name] = min(n for n in power if power[n] > 0.8)
    assert needed["paired"] < needed["unpaired"]
    looks = [tuple((n, FIRST * n / 12) for n in range(3, last + 1)) for last in range(3, 13)]
    signs = [paired.estimate(*(x[: plan[-1][0]] for x in MOMENTUM), plan, bounds=(0.0, 1.0)).sign for plan in looks]
    assert signs.index(1) + 3 <= 9
