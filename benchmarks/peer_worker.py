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
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minigrpo.config import Config
from minigrpo.model.transformer import Transformer
from minigrpo.runtime import accel
from minigrpo.runtime.base_model import base_dtype

from . import probe
from .bench_step import BenchStep
from .peer_jobs import RANK
from .workload import Workload, WorkloadFlags

HELD_OUT_STEP = 0  # its random numbers; the examples are others than in training
OOM_SCORE = Path("/proc/self/oom_score_adj")  # Linux only
Trained = Callable[[], Transformer]  # reads the trained model back into this library


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
    work: Workload,
    config: Config,
    steps: TimedSteps,
    number: int,
    ready: Callable[[], object],
    folder: Path,
) -> Trained:
    """Train the model in `folder` with this library."""
    model = Transformer.from_pretrained(folder, base_dtype(config.model)).to(work.device)
    bench = BenchStep(config, work, model=model)
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
    return lambda: bench.model


def train_theirs(
    work: Workload,
    config: Config,
    settings: dict[str, Any],
    steps: TimedSteps,
    number: int,
    ready: Callable[[], object],
    folder: Path,
) -> Trained:
    """Train the model in `folder` with TRL."""
    from .peer_trl import make_trainer

    trainer, last = make_trainer(
        work, config, settings, steps=number, folder=folder, begin=steps.begin, end=steps.end
    )
    steps.metrics = last.metrics
    ready()
    trainer.train()

    def trained() -> Transformer:
        model = trainer.model.merge_and_unload() if RANK in settings else trainer.model
        model.save_pretrained(folder / "trained")
        return Transformer.from_pretrained(folder / "trained").to(work.device)

    return trained


def held_out_rewards(
    work: Workload, config: Config, model: Transformer, number: int
) -> list[float]:
    """Mean reward of samples for each of the first held-out prompts, in float32: the same prompts
    and random numbers for all rows.
    """
    # adapters are in the trained model already
    plain = config.replace(
        use_amp=False, low_precision_weights=False, lora_rank=0, base_dtype="float32"
    )
    bench = BenchStep(plain, work, model=model)
    examples = [work.task.held_out(i) for i in range(number)]
    rolled = bench.source.roll_out(examples, HELD_OUT_STEP)
    means: list[float] = bench.source.scorer.score(examples, rolled.texts).total.mean(1).tolist()
    return means


def main() -> None:
    link = Link()
    with suppress(OSError):  # if memory runs out, the system ends this process before any other
        OOM_SCORE.write_text("1000")
    asked = json.loads(sys.stdin.readline())
    settings, number = asked["settings"], asked["steps"]
    if settings is not None:
        from . import peer_trl  # noqa: F401 - imported before memory is measured, as ours is
    device = accel.pick_device(asked["workload"]["device"])
    work = Workload.of(WorkloadFlags(**asked["workload"]), device)
    config = work.config.replace(**asked["flags"], max_steps=asked["schedule_steps"])
    number_held_out = asked["held_out"]
    before = held_out_rewards(work, config, work.model, number_held_out) if number_held_out else []
    timed, described = TimedSteps(link, device), work.describe()

    def ready() -> None:
        link.answer({"work": described})

    with TemporaryDirectory() as path:
        folder = Path(path)
        work.save_model(folder)
        # both sides read the file; of a large model, a copy more would not fit into memory
        work = replace(work, model=Transformer.empty(work.shape, "meta"))
        with probe.PeakMemory(device) as memory:
            if settings is None:
                trained = train_ours(work, config, timed, number, ready, folder)
            else:
                trained = train_theirs(work, config, settings, timed, number, ready, folder)
        sys.stdin.readline()
        after = held_out_rewards(work, config, trained(), number_held_out) if before else []
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
