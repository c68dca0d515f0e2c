"""A run's folder: create or reopen it, lock it, and write checkpoints, config and summary.

config.toml  metrics.jsonl  eval.jsonl  samples.jsonl  summary.json  tensorboard/
model.safetensors  checkpoints/step_NNNNNN/{state.pt, manifest.json}  bad_batches/
"""

import fcntl
import json
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from ..config import Config
from ..learner import Learner
from ..types import RolloutBatch
from .checkpoint import (
    CheckpointError,
    State,
    discard_after,
    find_checkpoint,
    path_of,
    save_checkpoint,
)
from .distributed import DistContext
from .environment import versions
from .flags import ConfigError, flag
from .logging import Screen
from .renamed import modern
from .settings import places, toml_lines

# Groups whose settings may differ when a run is resumed. They do not change training beyond
# rounding, except for --max-steps, which sets the learning-rate schedule, and bnpo's micro-batches.
MAY_DIFFER = {"speed", "memory", "run"}
MUST_AGREE = {"seed"}  # although its group may differ


class RunDir:
    """The folder of a run. Only the main process reads and writes, except for `dump`."""

    def __init__(self, config: Config, dist: DistContext, screen: Screen) -> None:
        """This touches no file; `open` does."""
        self.config, self.dist, self.screen = config, dist, screen
        self.path = Path()
        self.saved_step = -1  # of the newest checkpoint
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def open(self, learner: Learner) -> int:
        """Create or reopen the folder, load what --resume names, return the number of steps done.

        Raises ConfigError or CheckpointError, after unlocking the folder.
        """
        self.path = self.dist.on_main(self._make_and_lock)
        try:
            return self._resume(learner)
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock:
            self._lock.close()

    def _make_and_lock(self) -> Path:
        path = make_folder(self.config)
        self._lock = lock(path)
        return path

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self, step: int, learner: Learner, *, required: bool = True) -> None:
        """Write a checkpoint, unless this step has one.

        If the disk is full and the save is not `required`, warn and continue; older checkpoints
        are kept.
        """
        try:
            self.dist.on_main(lambda: self._save(step, learner))
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            if required:
                raise
            reason = str(error).splitlines()[0][:200]
            self.screen.warn(f"step {step}: NOT SAVED ({reason}); training continues")

    def _save(self, step: int, learner: Learner) -> None:
        if self.saved_step == step:
            return
        state = {**learner.state_dict(), "step": step, "config": self.config.flat()}
        state["shape"] = asdict(learner.model.shape)  # enough to rebuild the model
        state["made_by"] = self._made_by()
        save_checkpoint(self.checkpoints, step, state, keep_last=self.config.run.keep_last)
        self.saved_step = step

    def _resume(self, learner: Learner) -> int:
        """The main process reads the checkpoint, if any, and sends it to the others."""
        found: State = {}
        resume = self.config.run.resume

        def find() -> bool:
            found.update(find_checkpoint(self.checkpoints, resume, self.screen.warn) or {})
            if found:
                check_same_run(self.config, found["config"], self.path)
                discard_after(self.checkpoints, found["step"])
            return bool(found)

        if not self.dist.on_main(find):
            if resume:
                self.screen.say(f"--resume auto: no checkpoint in {self.path}, starting afresh")
            return 0
        state = self.dist.broadcast(found)
        try:
            learner.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{self.path}: does not fit this model: {reason}") from None
        self.saved_step = step = int(state["step"])
        now = self._made_by()
        for name, number in state.get("made_by", now).items():
            if number != now[name]:
                self.screen.warn(
                    f"the checkpoint was written by {number} {name}, this run has {now[name]}: "
                    "the batches are the same, but results are not equal bit for bit"
                )
        self.screen.say(f"resumed from step {step} of {self.path}")
        return step

    def _made_by(self) -> dict[str, int]:
        return {"processes": self.dist.world_size, "threads": torch.get_num_threads()}

    def name_of_checkpoint(self, step: int) -> Path:
        return path_of(self.checkpoints, step)

    # --- other files ----------------------------------------------------------------------------

    def dump(self, batch: RolloutBatch, step: int) -> Path | None:
        """Save a batch whose step was skipped (`torch.load(..., weights_only=True)` reads it)."""
        name = f"step_{step + 1:06d}_rank_{self.dist.rank}.pt"
        path = self.path / "bad_batches" / name
        prompts = [example.prompt for example in batch.examples]
        record = {
            "prompts": prompts,
            "texts": [list(group) for group in batch.texts],
            **vars(batch.completions),
            "rewards": None if batch.rewards is None else torch.from_numpy(batch.rewards.total),
            "advantages": batch.advantages,
            "ref_logp": batch.ref_logp,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(record, path)
        except (OSError, RuntimeError):  # a full disk must not end a run that the guard keeps going
            return None
        return path

    def write_config(self) -> None:
        """Write `config.toml`, which --config can read, with the run's software versions."""
        lines = toml_lines(self.config, leave_out=("out_dir", "resume"))
        found = versions(self.dist.world_size)
        lines += ["", "[versions]", *(f"{name} = {json.dumps(x)}" for name, x in found.items())]
        text = "\n".join(lines) + "\n"
        tomllib.loads(text)  # fail now rather than leave a file that cannot be read
        (self.path / "config.toml").write_text(text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        (self.path / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def make_folder(config: Config) -> Path:
    """Create the folder of --out-dir, or reopen it to resume.

    Raises ConfigError if it is not writable, or holds a run and --resume is not given.
    """
    out_dir = config.run.out_dir
    folder = Path(out_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.loss.name}")
    while not out_dir and folder.exists():  # two runs were started in the same second
        folder = folder.with_name(folder.name + "+")
    if (folder / "config.toml").exists() and not config.run.resume:
        raise ConfigError(
            f"--out-dir {folder}: holds a run; --resume auto continues it, "
            "another folder starts afresh"
        )
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out-dir {folder}: cannot be written ({error.strerror})") from None
    return folder


def lock(folder: Path) -> IO[str]:
    """Keep other processes out of a folder for as long as the returned file is open.

    Raises ConfigError if another run holds the lock. The lock ends with the process in any case.
    """
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"--out-dir {folder}: another run is writing to it; "
            "wait until it ends, or choose another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    return file


def check_same_run(config: Config, saved: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if a setting that affects results differs from the checkpoint's config."""
    then, now = modern(saved), config.flat()
    differ = [
        f"{flag(name)} was {then[name]!r}, is {now[name]!r}"
        for name, (group, _) in places(Config).items()
        if (group not in MAY_DIFFER or name in MUST_AGREE)
        and name in then
        and then[name] != now[name]
    ]
    if differ:
        raise ConfigError(f"--resume: {folder} was made with another config: {'; '.join(differ)}")
