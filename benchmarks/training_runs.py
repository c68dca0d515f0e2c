"""Training runs as processes of their own, several side by side, that can be interrupted.

A run is what `minigrpo train` does, in a folder of its own. A finished run is not repeated, and one
that was interrupted continues from its last checkpoint.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minigrpo.config import Config
from minigrpo.runtime.flags import ConfigError, flag
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.settings import toml_lines
from minigrpo.runtime.tokenizers import with_own_tokenizer
from minigrpo.runtime.toml_files import PACKAGE

SECONDS_BETWEEN_LOOKS = 0.5
BAD_INPUT = 2  # exit code of a run whose flags are wrong; all others would fail too


@dataclass
class Run:
    """A training run of one job, precision and seed."""

    job: str
    precision: str
    seed: int
    config: Config
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    failed: str = ""  # the last line that a failed run wrote

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def steps_done(self) -> int:
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def is_finished(self) -> bool:
        """Raises ConfigError if the folder holds a run with other settings."""
        saved = self.folder / "config.toml"
        if not saved.exists():
            return False
        # a run records which tokenizer `auto` was
        configs = Config.from_toml(saved), self.config
        then, now = (with_own_tokenizer(config).flat() for config in configs)
        if differ := [f"{flag(x)} was {then[x]}, is {now[x]}" for x in now if now[x] != then[x]]:
            raise ConfigError(
                f"--out-dir: {self.folder} holds a run with other settings "
                f"({'; '.join(differ)}); choose another folder"
            )
        summary = self.folder / "summary.json"
        return summary.exists() and json.loads(summary.read_text())["status"] == "finished"

    def start(self, threads: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "job.toml"
        file.write_text("\n".join(toml_lines(self.config, leave_out=("out_dir", "resume"))) + "\n")
        words = ["--config", file, "--out-dir", self.folder, "--resume", "auto"]
        paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(self.folder / "output.txt", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minigrpo", "train", *map(str, words)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": str(threads),
                    "PYTHONPATH": os.pathsep.join(paths),
                },
                # Ctrl-C reaches only this process, which then asks each run to stop, once
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Whether the process has ended. Raises ConfigError if the run refused its flags."""
        assert self.process is not None
        code = self.process.poll()
        if code:
            lines = (self.folder / "output.txt").read_text(errors="replace").strip().splitlines()
            self.failed = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
            if code == BAD_INPUT:
                raise ConfigError(f"{self.name}: {self.failed}")
        elif code == 0 and not self.is_finished():
            self.failed = "stopped before its last step; the same command continues it"
        return code is not None

    def values(self, file: str, measure: str) -> tuple[list[int], list[float]]:
        """Steps and values of a measure; a value that is null is NaN."""
        records = [json.loads(line) for line in (self.folder / file).read_text().splitlines()]
        values = [math.nan if (x := record[measure]) is None else float(x) for record in records]
        return [record["step"] for record in records], values


def train(runs: Sequence[Run], jobs: int, threads: int, screen: Screen) -> None:
    """Run what is not finished, `jobs` at a time. Raises ConfigError if a run refuses its flags.

    If this process is asked to stop, so are the runs. They save, and the same command continues.
    """
    waiting = [run for run in runs if not run.is_finished()]
    total = sum(run.config.run.max_steps for run in runs)
    running: list[Run] = []
    for run in runs:
        if run not in waiting:
            screen.say(f"{run.name}: finished before")
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    screen.start(total, sum(run.steps_done for run in runs))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start(threads)
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for run in [run for run in running if run.has_ended()]:
                running.remove(run)
                screen.say(f"{run.name}: {run.failed or 'finished'}")
            beside = ", ".join(f"{run.name} {run.steps_done}" for run in running)
            screen.update(sum(run.steps_done for run in runs), total, beside)
    except KeyboardInterrupt:
        screen.warn("stopping; the same command continues from the last checkpoints")
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        for run in running:
            assert run.process is not None
            run.process.terminate()
        for run in running:
            assert run.process is not None
            run.process.wait()
        screen.stop()
        signal.signal(signal.SIGTERM, before)
