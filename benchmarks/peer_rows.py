"""The rows of the peers benchmark: processes that take turns, and what was measured of each."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from minigrpo.runtime.logging import Screen

from .intervals import gain, median_of
from .peer_jobs import Settings
from .report import Column, number

KILLED = "out of memory: the system ended the process"


@dataclass
class Row:
    """A way to train, its process, and what was measured."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)  # of this library
    settings: Settings | None = None  # None: this library
    status: str = "ok"
    steps: list[dict[str, float]] = field(default_factory=list)
    warm_up: int = 0  # steps that train but are not timed
    end: dict[str, Any] = field(default_factory=dict)  # what the process says after the last step
    module: str = f"{__package__}.peer_worker"
    process: subprocess.Popen[str] | None = None
    errors: IO[bytes] | None = None

    def start(self, asked: Mapping[str, Any]) -> None:
        self.errors = TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.send(json.dumps({**asked, "flags": self.flags, "settings": self.settings}))

    def send(self, command: str) -> None:
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: `receive` says why

    def receive(self) -> dict[str, Any]:
        """The process's answer; if it has died, the status says why: its last line on stderr."""
        assert self.process is not None and self.process.stdout is not None
        if line := self.process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        assert self.errors is not None
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        code = self.process.wait()
        killed = code == -signal.SIGKILL  # such a process writes no last line
        self.status = KILLED if killed else lines[-1] if lines else f"exit code {code}"
        return {}

    def ask(self, command: str) -> dict[str, Any]:
        if self.status != "ok":
            return {}
        self.send(command)
        return self.receive()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        if self.errors is not None:
            self.errors.close()

    def seconds(self) -> dict[int, float]:
        """Seconds of the timed steps, by number; empty if the row failed."""
        timed = range(self.warm_up, len(self.steps)) if self.status == "ok" else ()
        return {turn: self.steps[turn]["seconds"] for turn in timed}


def take_turns(
    rows: Sequence[Row], asked: Mapping[str, Any], screen: Screen, title: str, *, warm_up: int
) -> None:
    """Let every row do `asked["steps"]` training steps, one row after the other in each step.

    The first `warm_up` steps are not timed. A row that has failed before is left out.
    """
    rows, steps = [row for row in rows if row.status == "ok"], asked["steps"]
    screen.say(f"{title}: starting {len(rows)} {'process' if len(rows) == 1 else 'processes'}")
    try:
        for row in rows:
            row.warm_up = warm_up
            row.start(asked)
        for row in rows:
            row.receive()
        screen.start(steps * len(rows), 0)
        for turn in range(steps):
            for place, row in enumerate(rows):
                if step := row.ask("step"):
                    row.steps.append(step)
                shown = f"{step['seconds']:.2f} s" if step else row.status
                done = turn * len(rows) + place + 1
                screen.update(done, steps * len(rows), f"{title}: {row.name} {shown}")
        for row in rows:
            row.end = row.ask("finish")
    finally:
        for row in rows:
            row.stop()
        screen.stop()


def record(row: Row, first: Row) -> dict[str, Any]:
    """A row's figures as plain JSON; `multiple` is of `first`. What was not measured is null."""
    seconds = row.seconds()
    found: dict[str, Any] = {
        "name": row.name,
        "status": row.status,
        "flags": row.flags,
        "settings": row.settings,
        "samples": [step["seconds"] for step in row.steps],
        "rewards": [step["reward"] for step in row.steps],
    }
    if not seconds:
        return found
    time, multiple = median_of(list(seconds.values())), gain(seconds, first.seconds())
    found |= {
        "s_per_step": time.middle,
        "s_per_step_interval": time.ends,
        "multiple": multiple and multiple.middle,
        "multiple_interval": multiple and multiple.ends,
        "completion_tokens": mean(step["completion_tokens"] for step in row.steps),
        "tokens_run": mean(step["tokens/run"] for step in row.steps),
        "reward": mean(found["rewards"]),
        **{name: row.end[name] for name in ("peak_mib", "process_mib", "memory_measures")},
    }
    before, after = (np.array(row.end[f"held_out_{when}"]) for when in ("before", "after"))
    if not len(after):
        return found
    error = (after - before).std(ddof=1) / len(after) ** 0.5
    return found | {
        "held_out_prompts": len(after),
        "held_out_before": before.mean(),
        "held_out_after": after.mean(),
        "held_out_change_error": error,
        "change": f"{(after - before).mean():+.3f} ± {error:.3f}",
    }


def interval(values: Sequence[float] | None) -> str:
    return "" if not values else f"{values[0]:.2f}-{values[1]:.2f}"


COLUMNS: tuple[Column, ...] = (
    ("", "name", str),
    ("s/step", "s_per_step", number("{:.2f}")),
    ("95 % interval", "s_per_step_interval", interval),
    ("times minigrpo", "multiple", number("{:.1f}x")),
    ("95 % interval", "multiple_interval", interval),
    ("peak MiB", "peak_mib", number("{:,.0f}")),
    ("whole process", "process_mib", number("{:,.0f}")),
    ("tokens sampled", "completion_tokens", number("{:,.0f}")),
    ("tokens run", "tokens_run", number("{:,.0f}")),
    ("", "status", lambda text: "" if text == "ok" else str(text)),
)
REWARDS: tuple[Column, ...] = (
    ("", "name", str),
    ("mean reward in training", "reward", number("{:.3f}")),
    ("held-out before", "held_out_before", number("{:.3f}")),
    ("held-out after", "held_out_after", number("{:.3f}")),
    ("change and its standard error", "change", number("{}")),
)
