"""Two settings compared: which runs pair up, their measures, and the examples won and lost."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..runtime.answers import ANSWERS
from ..runtime.resume import changed
from .paired import Difference, difference, over_seeds
from .settings_of_runs import HOWS, Run, Setting

LEAST_SEEDS = 3  # from which the seeds decide, not the examples
# settings that say what the reward is
REWARD = ("task", "rewards", "reward_weights", "confidence", "student")


@dataclass(frozen=True)
class Pair:
    """Two runs whose first n held-out examples are the same."""

    first: Run
    second: Run
    n: int

    def values(self, how: str, measure: str) -> tuple[np.ndarray, np.ndarray]:
        both = (run.values(how, measure, self.n) for run in (self.first, self.second))
        return next(both), next(both)


@dataclass(frozen=True)
class Row:
    """A measure of two settings."""

    measure: str
    how: str  # greedy or sampled
    found: Difference  # over the examples of all pairs
    seeds: Sequence[Difference]  # each pair alone

    @property
    def by_seed(self) -> list[float]:
        """The difference of each pair."""
        return [one.change for one in self.seeds]

    @property
    def means(self) -> tuple[float, float]:
        """Of the first and of the second; where the seeds decide, each seed counts alike."""
        every = self.seeds if self.seeds_decide else [self.found]
        first, second = np.mean([(one.first, one.second) for one in every], axis=0).tolist()
        return first, second

    @property
    def seeds_decide(self) -> bool:
        return len(self.seeds) >= LEAST_SEEDS

    @property
    def change(self) -> float:
        """Second minus first."""
        first, second = self.means
        return second - first

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95 % interval, over the seeds or over the examples; NaN if there is none.

        Seeds that agree by chance, as counts of few examples do, show no more than the examples.
        """
        if not self.seeds_decide:
            return self.found.low, self.found.high
        low, high = over_seeds(self.by_seed)
        return min(low, self.found.low), max(high, self.found.high)

    @property
    def p(self) -> float:
        """NaN where the interval decides."""
        return math.nan if self.seeds_decide else self.found.p

    @property
    def is_shown(self) -> bool:
        """Whether the seeds, or the examples, show a difference."""
        low, high = self.interval
        return (low > 0 or high < 0) if self.seeds_decide else self.found.is_shown


@dataclass(frozen=True)
class Comparison:
    """Two settings: their measures, and the examples that one of them alone gets right."""

    first: Setting
    second: Setting
    pairs: Sequence[Pair]
    rows: Sequence[Row] = ()
    won: Sequence[tuple[Pair, int]] = ()  # a pair and the place of an example
    lost: Sequence[tuple[Pair, int]] = ()
    why_not: Sequence[str] = ()  # what could not be paired or compared

    @property
    def num_examples(self) -> int:
        """The number of examples; those that all seeds share count once."""
        if have_same_examples(self.pairs):
            return self.pairs[0].n
        return sum(pair.n for pair in self.pairs)


def compared(first: Setting, second: Setting) -> Comparison:
    """Pair the runs of two settings, and test each measure that both have."""
    pairs, why_not = paired(first, second)
    rows: list[Row] = []
    one, other = first.runs[0], second.runs[0]
    other_files = [name for name in changed(one.files, other.files) if "--data" not in name]
    other_reward = any(one.settings[name] != other.settings[name] for name in REWARD)
    other_reward = other_reward or bool(other_files)
    if other_reward and pairs:
        why_not.append("the reward is not compared, because the runs are paid differently")
    for how in HOWS if pairs else ():
        runs = [run for pair in pairs for run in (pair.first, pair.second)]
        for measure in runs[0].measures(how):
            if measure == "reward" and other_reward:
                continue
            if all(measure in run.measures(how) for run in runs):
                rows += rows_of(pairs, how, measure)
    order = list(dict.fromkeys(row.measure for row in rows))
    rows.sort(key=lambda row: order.index(row.measure))
    won, lost = won_and_lost(pairs)
    return Comparison(first, second, pairs, rows, won, lost, why_not)


def paired(first: Setting, second: Setting) -> tuple[list[Pair], list[str]]:
    """The pairs of runs with the same held-out examples, and why others have no partner."""
    pairs: list[Pair] = []
    why_not: list[str] = []
    free = list(second.runs)
    for run in first.runs:
        partners = sorted(free, key=lambda other: other.seed != run.seed)
        for other in partners:
            n = min(len(run.answers), len(other.answers))
            if n and run.examples[:n] == other.examples[:n]:
                pairs.append(Pair(run, other, n))
                free.remove(other)
                break
        else:
            why_not.append(why_alone(run, partners))
    if pairs:
        why_not += [f"{other.name}: has no partner in {first.name}" for other in free]
    return pairs, why_not


def why_alone(run: Run, others: Sequence[Run]) -> str:
    for one in (run, *others):
        if not one.answers:
            return (
                f"{one.name}: has no {ANSWERS} (not evaluated yet, or made by an older version), "
                "so its answers cannot be paired"
            )
    if not others:
        return f"{run.name}: has no partner"
    number = len(set(run.examples) & set(others[0].examples))
    return (
        f"{run.name} and {others[0].name}: were not evaluated on the same held-out examples "
        f"({number} of {len(run.examples)} are in both), so there is no paired test"
    )


def have_same_examples(pairs: Sequence[Pair]) -> bool:
    """Whether all seeds were evaluated on the same examples, as those of a file are."""
    return len({tuple(pair.first.examples[: pair.n]) for pair in pairs}) == 1


def rows_of(pairs: Sequence[Pair], how: str, measure: str) -> Iterator[Row]:
    """The difference of a measure, unless it concerns none of the examples of a pair."""
    values = [pair.values(how, measure) for pair in pairs]
    join = np.stack if have_same_examples(pairs) else np.concatenate
    first, second = (join(ends) for ends in zip(*values, strict=True))
    try:
        each = [difference(*both) for both in values]
        found = difference(first, second)
    except ValueError:
        return
    yield Row(measure, how, found, each)


def won_and_lost(pairs: Sequence[Pair]) -> tuple[list[tuple[Pair, int]], list[tuple[Pair, int]]]:
    """The examples that only the second, and only the first answers rightly; greedy answers."""
    won: list[tuple[Pair, int]] = []
    lost: list[tuple[Pair, int]] = []
    for pair in pairs:
        x, y = pair.values("greedy", pair.first.data.success)
        won += [(pair, int(i)) for i in np.flatnonzero((x == 0) & (y == 1))]
        lost += [(pair, int(i)) for i in np.flatnonzero((x == 1) & (y == 0))]
    return won, lost


# --- what is written ------------------------------------------------------------------------------


def to_record(found: Comparison) -> dict[str, Any]:
    """A comparison as JSON."""
    return {
        "first": [str(run.folder) for run in found.first.runs],
        "second": [str(run.folder) for run in found.second.runs],
        "pairs": [[str(pair.first.folder), str(pair.second.folder)] for pair in found.pairs],
        "measures": [
            {
                **asdict(row),
                "by_seed": row.by_seed,
                "interval": row.interval,
                "is_shown": row.is_shown,
            }
            for row in found.rows
        ],
        "won": [example_of(pair, i) for pair, i in found.won],
        "lost": [example_of(pair, i) for pair, i in found.lost],
        "not_compared": list(found.why_not),
    }


def example_of(pair: Pair, i: int) -> Mapping[str, Any]:
    first, second = pair.first.answers[i], pair.second.answers[i]
    same = {name: first.get(name) for name in ("example", "kind", "prompt", "truth")}
    completions = {"first": first.get("completion"), "second": second.get("completion")}
    return {"seed": pair.first.seed, **same, **completions}
