"""One row of the peers benchmark, in a process of its own that works when it is told to.

Commands come on standard input, a line each: first the row as JSON, then `step`, `evaluate` or
`finish`. Each is answered with a line of JSON on standard output.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minigrpo.config import Config
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.device import set_up_process

from .measure import PeakMemory, synchronize
from .work import Step, Work, WorkFlags


class Finished(Exception):
    """The command was `finish`."""


class Link:
    """Waits for commands, times the steps between, and answers."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        # Libraries print to standard output too. It is kept for answers, and theirs goes to stderr.
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.metrics = dict[str, float]()  # figures of the last step
        self.dtype = torch.float32  # of the trained weights
        self.trained: Callable[[], Transformer]  # returns the model as it is now
        self.evaluate: Callable[[], float]

    def begin(self) -> None:
        """Return when a step is asked for. Raises Finished."""
        while (command := sys.stdin.readline().strip()) == "evaluate":
            self.answer({"held_out": self.evaluate()})
        if command != "step":
            raise Finished
        self.started = time.perf_counter()

    def end(self) -> None:
        synchronize(self.device)
        seconds = time.perf_counter() - self.started
        self.answer({"seconds": seconds, **self.metrics})

    def answer(self, record: dict[str, Any]) -> None:
        self.answers.write(json.dumps(record) + "\n")
        self.answers.flush()


def train_ours(work: Work, config: Config, link: Link, folder: Path) -> None:
    """Train the model in `folder` with this library until the link is finished."""
    stored = config.model.base_dtype if config.model.lora_rank else "float32"
    model = Transformer.from_pretrained(folder, stored).to(work.device)
    own = Step(config, work, model=model)
    link.trained = lambda: deepcopy(own.model)  # an evaluation merges its adapters
    for number in count():
        link.begin()
        timed = own.step(number)
        assert own.batch.rewards is not None
        for name in ("completion_tokens", "tokens/run", "rollout"):
            link.metrics[name] = timed[name]
        link.metrics["reward"] = float(own.batch.rewards.total.mean())
        link.end()


def train_theirs(
    work: Work, config: Config, link: Link, folder: Path, settings: dict[str, Any], steps: int
) -> None:
    """Train the model in `folder` with TRL until the link is finished."""
    from .peer_trl import StepByStep, make_trainer

    callback = StepByStep(link.begin, link.end)
    trainer = make_trainer(work, config, settings, steps + 1, folder, callback, link.metrics)

    def trained() -> Transformer:
        model = trainer.model
        if config.model.lora_rank:
            model = deepcopy(model).merge_and_unload()
        model.save_pretrained(folder / "trained")
        return Transformer.from_pretrained(folder / "trained").to(work.device)

    link.trained = trained
    try:
        trainer.train()
    finally:
        link.dtype = next(p.dtype for p in trainer.model.parameters() if p.requires_grad)


def held_out_reward(work: Work, config: Config, model: Transformer, number: int) -> float:
    """Mean reward of a group of samples for each of the first held-out prompts, in float32."""
    plain = config.replace(use_amp=False, lora_rank=0, base_dtype="float32")
    examples = [work.task.held_out(i) for i in range(number)]
    batch = Step(plain, work, model=model).batches.roll_out(examples, 0)
    assert batch.rewards is not None
    return float(batch.rewards.total.mean())


def main() -> None:
    link = Link()
    with suppress(OSError):  # if memory runs out, the system ends this process before any other
        Path("/proc/self/oom_score_adj").write_text("1000")  # Linux only
    asked = json.loads(sys.stdin.readline())
    settings = asked["settings"]  # TRL's, or None for this library
    if settings is not None:
        from . import peer_trl  # noqa: F401 - imported before memory is measured, as ours is
    work = Work.of(WorkFlags(**asked["work"]))
    link.device = work.device
    set_up_process(work.config.speed, work.device)
    # the learning rate decays over the default number of steps
    config = work.config.replace(**asked["flags"], max_steps=Config().run.max_steps)
    link.answer({"work": work.describe()})
    with TemporaryDirectory() as path, suppress(Finished):
        folder = Path(path)
        work.model.export(folder)
        # Both sides read the file. Another copy of a large model would not fit into memory.
        work = replace(work, model=Transformer(work.model.shape, seed=None))
        with PeakMemory(work.device) as memory:

            def evaluate() -> float:
                with memory.paused():
                    return held_out_reward(work, config, link.trained(), asked["held_out"])

            link.evaluate = evaluate
            if settings is None:
                train_ours(work, config, link, folder)
            else:
                train_theirs(work, config, link, folder, settings, asked["steps"])
    link.answer({"peak_mib": memory.mib, "dtype": str(link.dtype).removeprefix("torch.")})


if __name__ == "__main__":
    main()
