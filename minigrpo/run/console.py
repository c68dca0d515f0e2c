"""What people see of a run or a command: lines of text and tables."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from ..config import Config
from ..metrics import SAMPLED, headline
from ..runtime.statistics import Estimate
from ..task import Task

SECONDS_BETWEEN_LINES = 15.0  # of progress


class Console:
    """Where a run, or a command, prints: the main process alone, but every process may warn."""

    def __init__(self, *, quiet: bool = False, rank: int = 0) -> None:
        self.quiet, self.rank = quiet or rank > 0, rank
        self.last_line = 0.0  # when the last line of progress was printed
        self.since = list[float]()  # the reward or loss of each step since then
        self.evaluations: dict[float, Mapping[str, Estimate]] = {}  # by step, with intervals

    def say(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line, to stdout unless quiet. A closed terminal or pipe must not end a run."""
        if stream or not self.quiet:
            with suppress(OSError):
                print(text, file=stream, flush=True)

    def warn(self, text: str) -> None:
        where = f" (rank {self.rank})" if self.rank else ""
        self.say(f"warning{where}: {text}", sys.stderr)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows under the names of their columns."""
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        self.say(f"\n{title}")
        for row in (columns, *rows):
            self.say("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))
        self.say("")

    # --- the messages of a run ------------------------------------------------------------------

    def introduce(
        self, config: Config, task: Task, weights: Mapping[str, float], processes: int, device: str
    ) -> None:
        """Say what a step is, which layers are on, and what the reward is."""
        prompts, group = config.sampling.prompts_per_step, config.sampling.group_size
        self.say(
            f"{config.loss.name}: {prompts} prompts x {1 if config.supervised else group} "
            f"completions per step, on {processes} x {device}; "
            f"learning rate {config.optimizer.learning_rate:g}"
        )
        self.defaults(config)
        layers = {**config.speed.model_dump(), **config.memory.model_dump()}
        on = ["--" + name.replace("_", "-") for name, x in layers.items() if x is True]
        self.say(f"layers: --packing {config.speed.packing} {' '.join(on)}")
        paid = [f"{x:g} x {name}" for name, x in weights.items() if x]
        self.say(f"reward: {' + '.join(paid) or 'none'}")
        if task.about:
            self.say(f"task: {task.about}")

    def defaults(self, config: Config) -> None:
        """Say which values in force are those that the task or the model brings, and why."""
        flat = config.flat()
        for why, brought in config.brought().items():
            if same := [f"{name} {x}" for name, x in brought.items() if flat[name] == x]:
                self.say(f"defaults {why}: {', '.join(same)}")

    def update(self, step: int, last_step: int, metrics: Mapping[str, float]) -> None:
        """Say now and then where a run is: its mean reward or loss, and the time left."""
        now, name = time.monotonic(), "reward" if "reward" in metrics else "loss"
        self.since.append(metrics[name])
        if now - self.last_line >= SECONDS_BETWEEN_LINES or step == last_step:
            self.last_line, left = now, int((last_step - step) * metrics["step_time"])
            self.say(
                f"step {step}/{last_step}  {name} {fmean(self.since):.3f}  "
                f"{metrics['step_time']:.2f} s/step  left {left // 60}:{left % 60:02d}"
            )
            self.since.clear()

    def evaluation(self, step: int, found: Mapping[str, Estimate]) -> None:
        """Say the headline of an evaluation, sampled and greedy."""
        self.evaluations[step], name = found, headline(found)
        sampled = name + SAMPLED
        self.say(f"held out, step {step}: {sampled} {found[sampled]}, {name} {found[name]}")

    def measures(self, evaluations: Mapping[str, Mapping[str, float | Estimate]]) -> None:
        """Print the measures of evaluations, each in a column with its name."""
        names = dict.fromkeys(chain(*evaluations.values()))
        rows = []
        for name in (x for x in names if x not in ("step", "n")):
            values = [found.get(name, math.nan) for found in evaluations.values()]
            texts = [str(x if isinstance(x, Estimate) else Estimate(x)) for x in values]
            rows.append([name, *texts])
        title = f"held out, with 95 % intervals; NAME{SAMPLED}: at temperature 1, else greedy"
        self.table(title, ["", *evaluations], rows)

    def finish(self, run: Path, summary: Mapping[str, Any]) -> None:
        """Say how a run ended, and what to type next."""
        ended = f"{summary['status']} ({summary['exit_reason']}) at step {summary['step']}"
        self.say(f"{ended} after {summary['wall_seconds']:.0f} s: {run}")
        if summary["status"] == "stopped":
            self.say(
                f"continue: minigrpo train --config {run}/config.toml --out-dir {run} --resume auto"
                " (of a script: run it again with resume='auto')"
            )
        else:
            ends = summary["first_evaluation"], summary["last_evaluation"]
            known = self.evaluations.get
            self.measures({f"step {x['step']:.0f}": known(x["step"], x) for x in ends})
        commands = f"minigrpo report {run} | minigrpo doctor {run} | minigrpo sample {run}"
        self.say(f"next: {commands} [--prompt TEXT]")
