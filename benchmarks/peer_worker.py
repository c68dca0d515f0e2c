"""One row of the peers benchmark, in a process of its own that works when it is told to.

Commands come on standard input, a line each: first the row as JSON, then `step` or `finish`. Every
command is answered with a line of JSON on standard output.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minigrpo.config import Config
from minigrpo.model.transformer import Transformer
from minigrpo.runtime import accel

from . import probe
from .bench_step import BenchStep
from .workload import Workload, WorkloadFlags

HELD_OUT = 64  # prompts on which the trained models are compared
HELD_OUT_STEP = 0  # its random numbers; the examples are others than in training


class Finished(Exception):
    """The command was `finish`."""


class Link:
    """Waits for commands and answers them."""

    def __init__(self) -> None:
        # libraries print to standard output too: keep it for the answers, and send theirs to stderr
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> None:
        """Return when a step is asked for. Raises Finished."""
        command = sys.stdin.readline().strip()
        if command != "step":
            raise Finished

    def answer(self, record: dict[str, Any]) -> None:
        self.answers.write(json.dumps(record) + "\n")
        self.answers.flush()


class TimedSteps:
    """Answers every step with its seconds, and with the metrics that the row adds."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self.link, self.device = link, device
        self.metrics: Callable[[], dict[str, float]] = dict

    def begin(self) -> None:
        self.link.wait()
        probe.synchronize(self.device)
        self.started = time.perf_counter()

    def end(self) -> None:
        probe.synchronize(self.device)
        seconds = time.perf_counter() - self.started
        self.link.answer({"seconds": seconds, **self.metrics()})


def train_ours(
    work: Workload, config: Config, steps: TimedSteps, number: int, ready: Callable[[], object]
) -> Transformer:
    """Train with this library, and return the model."""
    bench = BenchStep(config, work)
    found: dict[str, float] = {}
    steps.metrics = lambda: found
    ready()
    for step in range(number):
        steps.begin()
        timed = bench.step(step)
        assert bench.batch.rewards is not None
        found = {
            "completion_tokens": timed["completions"] * timed["completion_len"],
            "reward": float(bench.batch.rewards.total.mean()),
            "tokens/run": timed["tokens/run"],
        }
        steps.end()
    return bench.model


def train_theirs(
    work: Workload,
    config: Config,
    settings: dict[str, Any],
    steps: TimedSteps,
    number: int,
    ready: Callable[[], object],
    folder: Path,
) -> Transformer:
    """Train with TRL, and return the model, read back into this library."""
    from .peer_trl import make_trainer

    trainer, last = make_trainer(
        work, config, settings, steps=number, folder=folder, begin=steps.begin, end=steps.end
    )
    steps.metrics = last.metrics
    ready()
    trainer.train()
    trainer.model.save_pretrained(folder / "trained")
    return Transformer.from_pretrained(folder / "trained")


def held_out_rewards(work: Workload, config: Config, model: Transformer) -> list[float]:
    """Mean reward of samples per held-out prompt, in float32: the same prompts and random numbers
    for all rows.
    """
    plain = config.replace(use_amp=False, low_precision_weights=False)
    bench = BenchStep(plain, work)
    bench.model.load_state_dict(model.state_dict())
    examples = [work.task.held_out(i) for i in range(HELD_OUT)]
    rolled = bench.source.roll_out(examples, HELD_OUT_STEP)
    means: list[float] = bench.source.scorer.score(examples, rolled.texts).total.mean(1).tolist()
    return means


def main() -> None:
    link = Link()
    asked = json.loads(sys.stdin.readline())
    settings, number = asked["settings"], asked["steps"]
    if settings is not None:
        from . import peer_trl  # noqa: F401 - imported before memory is measured, as ours is
    device = accel.pick_device(asked["workload"]["device"])
    work = Workload.of(WorkloadFlags(**asked["workload"]), device)
    config = work.config.replace(**asked["flags"], max_steps=asked["schedule_steps"])
    before, timed = held_out_rewards(work, config, work.model), TimedSteps(link, device)

    def ready() -> None:
        link.answer({"work": work.describe()})

    with TemporaryDirectory() as folder:
        with probe.PeakMemory(device) as memory:
            if settings is None:
                trained = train_ours(work, config, timed, number, ready)
            else:
                path = Path(folder)
                trained = train_theirs(work, config, settings, timed, number, ready, path)
        sys.stdin.readline()
        after = held_out_rewards(work, config, trained.to(device))
    link.answer(
        {
            "peak_mib": memory.mib,
            "process_mib": memory.before + memory.mib,
            "memory_measures": memory.measures,
            "held_out_before": before,
            "held_out_after": after,
        }
    )


if __name__ == "__main__":
    with suppress(Finished):
        main()
