"""Numbers that are not finite, memory that runs out, signals, and examples made ahead."""

import errno
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn

from minigrpo.guard import (
    BAD_STEPS_TO_STOP,
    SCALE_FLOOR,
    Diverged,
    NonFiniteGuard,
    OOMBackoff,
    is_out_of_memory,
    largest_weight,
)
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.signals import SAME_REQUEST, StopRequest
from minigrpo.task import Task
from minigrpo.tasks.base import MOST_STEPS, ExamplePrefetcher
from minigrpo.types import Example

from .tiny import refused


def ignore(text: str) -> None: ...


def test_bad_steps_in_a_row_stop_the_run() -> None:
    guard = NonFiniteGuard()
    guard.skip()
    guard.in_a_row = 0  # a good step
    for _ in range(BAD_STEPS_TO_STOP - 1):
        guard.skip()
    guard.check()
    guard.skip()
    with pytest.raises(Diverged):
        guard.check()
    assert guard.skipped == 1 + BAD_STEPS_TO_STOP


@pytest.mark.parametrize(
    ("before", "after", "loss", "excused"),
    [
        (8.0, 4.0, 1.0, True),
        (8.0, 8.0, 1.0, False),  # the gradient was finite
        (8.0, 4.0, torch.nan, False),  # the loss itself is bad
        (SCALE_FLOOR, SCALE_FLOOR / 2, 1.0, False),
    ],
)
def test_overflow_is_no_bad_step(before: float, after: float, loss: float, excused: bool) -> None:
    scaler, guard = MagicMock(), NonFiniteGuard()
    scaler.get_scale.side_effect = [before, after, after]
    assert guard.update_scale(scaler, torch.tensor(loss)) == excused
    metrics = guard.metrics(scaler)
    assert (metrics["scaler/scale"], metrics["scaler/skipped_steps"]) == (after, excused)


def test_the_largest_weight_tells_whether_all_are_finite() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False).fill_(torch.inf)  # frozen: not looked at
    for x in (1e30, -torch.inf, torch.nan):  # the square of the first overflows
        model.weight.data[0, 0] = x
        assert largest_weight(model).isfinite() == (x == 1e30)


TOO_MUCH = 1 << 50  # more than an address space holds


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: torch.empty(TOO_MUCH), True),  # a plain RuntimeError on a CPU
        (lambda: np.empty(TOO_MUCH), True),
        (MagicMock(side_effect=torch.OutOfMemoryError), True),
        (lambda: torch.save(torch.zeros(1000), "/dev/full"), False),  # a plain RuntimeError too
        (MagicMock(side_effect=OSError(errno.ENOSPC, "No space left on device")), False),
        (lambda: torch.zeros(2) @ torch.zeros(3), False),
    ],
)
def test_only_out_of_memory_is_tried_again(work: Callable[[], object], expected: bool) -> None:
    sizes = []

    def never_fits(size: int) -> None:
        sizes.append(size)
        work()

    with pytest.raises((RuntimeError, MemoryError, OSError)) as caught:
        OOMBackoff("update", "--micro-batch-size", 0, print).run(never_fits, 4)
    assert is_out_of_memory(caught.value) == expected
    assert sizes == ([4, 2, 1] if expected else [4])
    with pytest.raises((RuntimeError, MemoryError, OSError)):
        OOMBackoff("update", "--micro-batch-size", 0, print).run(never_fits, 4, retry=False)
    assert sizes[-1] == 4


def test_the_first_signal_asks_to_stop_and_a_later_one_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(ignore) as request:
        assert request.agreed(DistContext()) == ""
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # by the launcher and the terminal: one request
        assert request.agreed(DistContext()) == "SIGTERM"
        request.asked_at -= 2 * SAME_REQUEST
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


class Counting(Task):
    """Fails for one number."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def train(self, number: int) -> Example:
        if number == self.bad:
            raise SystemExit("a task may even do that")
        return Example(str(number))


def prefetcher(task: Task, **options: Any) -> ExamplePrefetcher:
    return ExamplePrefetcher(task, 4, DistContext(**options).share(4))


def test_each_process_has_its_share_of_each_step_in_any_order() -> None:
    for rank in range(2):
        made = prefetcher(Counting(), rank=rank, world_size=2)
        for step in (3, 4, 11, 5, 3, 30):
            numbers = [int(x.prompt) for x in made.take(step)]
            assert numbers == [4 * step + 2 * rank, 4 * step + 2 * rank + 1]
    regular = range(4 * MOST_STEPS)
    found = [made.replacements(step, attempt, [0, 1]) for step in (0, 1) for attempt in (0, 1)]
    numbers = [int(x.prompt) for examples in found for x in examples]
    assert len(set(numbers)) == 8 and not set(numbers) & set(regular)
    shares = [prefetcher(Counting(), rank=rank, world_size=3).take(1) for rank in range(3)]
    assert [int(x.prompt) for share in shares for x in share] == [4, 5, 6, 7]
    refused(prefetcher, Counting(), rank=4, world_size=5)  # it would have nothing to do


def test_an_error_of_the_task_is_raised_in_the_step_that_needs_it() -> None:
    made = prefetcher(Counting(bad=9))
    assert len(made.take(0)) == len(made.take(1)) == 4
    with pytest.raises(SystemExit):
        made.take(2)
    assert len(made.take(3)) == 4
