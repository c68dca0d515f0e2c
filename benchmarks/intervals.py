"""How sure a measured time is: the median with its interval, and when two rows differ.

An interval has a confidence of at least 95 % and assumes nothing about the noise: the true median
lies between the k-th smallest and the k-th largest of n values, except with probability
2 * P(Binomial(n, 1/2) < k). Six values are the fewest for 95 %: the interval is then their range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

RISK = 0.05  # that an interval misses the true median
FEWEST = 6  # values for an interval
NEGLIGIBLE = 0.01  # a gain of less than this counts as none, however sure it is
WIDE = 0.06  # an interval wider than this, relative to its lower end, asks for more values
RULE = (
    "A gain is the median over the turns of (seconds of the row above) / (seconds of this row), "
    "both on the same prompts, with its 95 % interval. If the interval contains 1, or the gain is "
    "below 1 %, it is called no difference. Fewer than 6 turns give no interval."
)


@dataclass(frozen=True)
class Median:
    """A median and its interval; the ends are None if there are too few values."""

    middle: float
    low: float | None
    high: float | None

    @property
    def is_wide(self) -> bool:
        """Whether there is an interval that more values should narrow."""
        return self.low is not None and self.high is not None and self.high > self.low * (1 + WIDE)

    @property
    def ends(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    def verdict(self) -> str:
        """A gain in words: a factor, slower, or no difference."""
        if self.ends is None:
            return f"{self.middle:.2f}x; too few turns for an interval"
        low, high = self.ends
        if low <= 1 <= high or abs(self.middle - 1) < NEGLIGIBLE:
            return f"no difference ({low:.2f}-{high:.2f}x)"
        return f"{'slower: ' if high < 1 else ''}{self.middle:.2f}x ({low:.2f}-{high:.2f})"


def median_of(values: Sequence[float]) -> Median:
    """The median of `values`, which must not be empty, with its interval."""
    ordered, n = sorted(values), len(values)
    if n < FEWEST:
        return Median(median(ordered), None, None)
    k = 1
    while 2 * sum(comb(n, i) for i in range(k + 1)) <= RISK * 2**n:
        k += 1
    return Median(median(ordered), ordered[k - 1], ordered[n - k])


def gain(before: Mapping[int, float], now: Mapping[int, float]) -> Median | None:
    """How many times as fast `now` is as `before`, both seconds by turn; None without a turn that
    both have.

    The turns are paired, because all rows sample the same prompts in a turn, one after another: so
    neither the prompts nor a machine that slows down for a while count as a difference.
    """
    ratios = [before[turn] / now[turn] for turn in now if turn in before]
    return median_of(ratios) if ratios else None
