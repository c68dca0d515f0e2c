"""Rewards that are still being computed: wait for the calls, check them, put the table together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..types import RewardTable
from .pool import Job, WorkerPool
from .reward_calls import PARTLY_NAN, BadRewardError, RewardSource, partly_nan
from .reward_weights import narrow, total_so_far


@dataclass
class PendingRewards:
    """Rewards still being computed by the calls of a batch; `result` waits for them."""

    sources: Sequence[RewardSource]
    weights: Mapping[str, float]
    pool: WorkerPool
    warn: Callable[[RewardSource, Exception], object]  # of a call that failed
    index: np.ndarray  # [P, G] int, index of each completion's distinct text
    calls: list[tuple[RewardSource, slice, Job]] = field(default_factory=list)
    table: RewardTable | None = None  # set by the first `result`

    def result(self) -> RewardTable:
        """Wait for all calls, and return the table.

        Completions whose call failed get the floor of the reward part, and are counted in
        `RewardTable.failures`. An error in the task's `score_batch` is raised.
        """
        if self.table is None:
            self.table = self._wait()
        return self.table

    def _wait(self) -> RewardTable:
        parts, failures = dict[str, np.ndarray](), dict[str, int]()
        for source in self.sources:
            calls = [(part, job) for asked, part, job in self.calls if asked is source]
            size = calls[-1][0].stop
            scores, failed = np.empty((len(source.names), size)), np.zeros(size, dtype=bool)
            for part, job in calls:
                scores[:, part], failed[part] = self._answer(source, part, job)
            # each completion of a pair has the pair's score
            index = self.index if source.of_distinct else np.arange(size).reshape(self.index.shape)
            for name, row in zip(source.names, scores, strict=True):
                values, missed = row[index], failed[index]
                if (mixed := partly_nan(values)).any():
                    self._refuse(source, BadRewardError(PARTLY_NAN))
                    values, missed = np.where(mixed, source.floor, values), missed | mixed
                parts[name] = narrow(values)
                if not source.trusted:
                    failures[name] = int(missed.sum())
        return RewardTable(total_so_far(parts, self.weights, self.index.shape), parts, failures)

    def _answer(self, source: RewardSource, part: slice, job: Job) -> tuple[np.ndarray, bool]:
        """The scores of a call, `[len(source.names), n]`, and whether it has failed."""
        size = part.stop - part.start
        try:
            answer = self.pool.wait(job, source.time_limit(size))
            return source.check(answer, size), False
        except Exception as error:
            self._refuse(source, error)
            return np.full((len(source.names), size), source.floor, dtype=np.float64), True

    def _refuse(self, source: RewardSource, error: Exception) -> None:
        """Warn of a failure, or raise it if the source is trusted."""
        if not source.trusted:
            self.warn(source, error)
        elif isinstance(error, BadRewardError):
            raise BadRewardError(f"reward {', '.join(source.names)}: {error}") from None
        else:
            raise error
