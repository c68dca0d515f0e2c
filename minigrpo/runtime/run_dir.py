"""A run's folder: make or reopen it, lock it, load what --resume names, save checkpoints.

    config.toml  metrics.jsonl  eval.jsonl  held_out.jsonl  samples.jsonl  summary.json
    model.safetensors (with --lora-rank: adapter_model.safetensors, adapter_config.json)
    checkpoints/step_NNNNNN/  trained_on.npy  tensorboard/  bad_batches/  profile/  track_id

A folder holds one run for good: `--resume auto` goes on in it, and whoever goes back to an earlier
step takes another folder. So starting a run removes and renames nothing, except for log lines of
steps that it makes again.
"""

import fcntl
import hashlib
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from ..config import Config, places
from ..model.lora import adapters, peft_files
from ..model.transformer import Transformer
from ..types import ConfigError, RolloutBatch
from .checkpoint import (
    CheckpointError,
    State,
    checkpoints,
    load_checkpoint,
    newest,
    path_of,
    save_checkpoint,
    step_of,
    write_atomically,
)
from .console import Console
from .distributed import DistContext
from .guard import RunFailed
from .logging import LOGS, TRACK_ID, NoLog, RunLog, check_tracker, read_jsonl, to_json

RECORD, SUMMARY, TRAINED_ON = "config.toml", "summary.json", "trained_on.npy"
WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
# a folder with any of these holds a run or a model, which a new run would replace
WRITTEN = (RECORD, *LOGS, SUMMARY, WEIGHTS, ADAPTERS, TRAINED_ON, TRACK_ID)
# the groups of settings that may differ when a run goes on, except for the seed
MAY_DIFFER = ("speed", "memory", "run")


class RunDir:
    """The folder of a run. The main process reads and writes; only `dump` is for all of them."""

    def __init__(self, config: Config, dist: DistContext, console: Console) -> None:
        """This only remembers the current folder, which users' code may change."""
        check_tracker(config.run.track)
        self.config, self.dist, self.console = config, dist, console
        self.start = self.path = Path.cwd()  # `path` is the folder's, absolute, once it is open
        self.facts: dict[str, Any] = {}
        self.versions: dict[str, Any] = {}
        self.questions: tuple[np.ndarray, np.ndarray] | None = None
        self.saved_step = -1  # of the newest checkpoint
        self._source: Path | None = None  # the checkpoint that the run goes on from
        self._base: Path | None = None  # the folder of the run that this one branches from
        self._lock = ExitStack()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    # --- open -----------------------------------------------------------------------------------

    def open(
        self,
        load: Callable[[State], object],
        facts: Mapping[str, Any],
        questions: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> int:
        """Make or reopen the folder, lock it, load a checkpoint; return the number of steps done.

        Args:
            load: gets the state to go on from, if there is one.
            facts: plain values that must be the same when the run goes on, such as the tokenizer's
                fingerprint and the model's shape. Checkpoints hold them beside the state.
            questions: see `Task.questions`.

        Raises ConfigError, after unlocking the folder.
        """
        self.facts, self.questions = dict(facts), questions
        self.versions = versions(self.dist.world_size) | self._files()
        self.path = self.dist.on_main(self._make)
        try:
            self._source = self.dist.on_main(self._find)
            return self._load(load_checkpoint(self._source), load) if self._source else 0
        except BaseException:
            self.close()
            raise

    def _files(self) -> dict[str, str]:
        """The sha256 of the files of the task and of --rewards, the same in all processes."""
        task = self.config.task
        names = ",".join((task.name, task.rewards, task.data, task.eval_data)).split(",")
        files = [self.start / name.strip() for name in names]
        found = {str(file): _sha256(file) for file in files if file.is_file()}
        number = torch.tensor(int(hashlib.sha256(repr(found).encode()).hexdigest()[:15], 16))
        if found and self.dist.max(number) != -self.dist.max(-number):
            raise ConfigError(f"{', '.join(found)}: have other contents on another machine")
        return found

    def _make(self) -> Path:
        """The folder of --out-dir, locked. Raises ConfigError if it holds a run already."""
        run = self.config.run
        name = run.out_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{self.config.loss.name}")
        path = self.start / name
        there = [path / name for name in WRITTEN if (path / name).exists()]
        there += checkpoints(path / "checkpoints")
        if there and run.resume != "auto":
            raise ConfigError(
                f"--out-dir {path}: holds a run ({there[0].name}); --resume auto continues it, "
                "another folder starts afresh"
            )
        path.mkdir(parents=True, exist_ok=True)
        file = self._lock.enter_context(open(path / ".lock", "a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"--out-dir {path}: another run is writing to it") from None
        except OSError:  # a file system without locks
            pass
        return path

    def _find(self) -> Path | None:
        """The checkpoint to go on from; None to start afresh."""
        resume, folder = self.config.run.resume, self.checkpoints
        if not resume:
            return None
        if resume != "auto":
            folder = self.start / resume
            if step_of(folder) >= 0:
                return folder
            folder = folder / "checkpoints"
        elif not checkpoints(folder):
            self._check_nothing_is_lost()
            self.console.say(f"--resume auto: no checkpoint in {self.path}, starting afresh")
            return None
        return newest(folder, self.console.warn)

    def _check_nothing_is_lost(self) -> None:
        """Raise ConfigError unless a folder without checkpoints may be started afresh.

        It may be empty, or of the same run, which was killed before it had saved anything.
        """
        there = [name for name in WRITTEN if (self.path / name).exists()]
        if not there:
            return
        steps, first_save = 0, self.config.run.save_every
        if RECORD in there:
            saved = Config.from_toml(self.path / RECORD)
            self._compare(saved.flat())
            first_save = min(first_save, saved.run.save_every)
        if "metrics.jsonl" in there:
            lines = read_jsonl(self.path / "metrics.jsonl")
            steps = max((line.get("step", 0) for line in lines), default=0)
        if RECORD not in there or {WEIGHTS, ADAPTERS} & {*there} or steps > first_save:
            raise CheckpointError(
                f"--resume auto: {self.path} has {', '.join(there)}, but no checkpoint; bring the "
                "checkpoints back, or take another folder"
            )

    def _load(self, state: State, load: Callable[[State], object]) -> int:
        """Compare a checkpoint with this run, then load it. Raises ConfigError."""
        assert self._source is not None
        changed = [name for name, x in self.facts.items() if state.get(name) != x]
        if changed:
            raise ConfigError(f"--resume: not as it was at {self._source}: {', '.join(changed)}")
        differ = self._compare(state["config"])
        differ += [name for name, x in self.versions.items() if state["versions"].get(name) != x]
        if differ and self.dist.is_main:
            said = "results may not be those of one run, bit for bit"
            self.console.warn(f"not as it was at {self._source}: {'; '.join(differ)}: {said}")
        try:
            load(state)
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{self._source}: does not fit this model: {reason}") from None
        step = int(state["step"])
        if self._source == path_of(self.checkpoints, step):
            self.saved_step = step
        else:
            self._base = self._source.parent.parent
        self.console.say(f"resumed from step {step} of {self._source}")
        if step > self.config.run.max_steps and self.dist.is_main:
            last = self.config.run.max_steps
            self.console.warn(f"step {step} is past --max-steps {last}: nothing is trained")
        return step

    def _compare(self, saved: Mapping[str, Any]) -> list[str]:
        """Settings that differ and may change bits. Raises ConfigError if others differ."""
        refused, bits = [], []
        for name, (group, _) in places().items():
            then, now = saved.get(name), self.config.flat()[name]
            said = f"--{name.replace('_', '-')} was {then!r}, is {now!r}"
            if then != now and (group not in MAY_DIFFER or name == "seed"):
                refused.append(said)
            elif then != now and (group != "run" or name == "max_steps"):
                bits.append(said)
        if refused:
            raise ConfigError(f"--resume: the run has other settings: {'; '.join(refused)}")
        return bits

    def open_log(self, step: int) -> RunLog | NoLog:
        """Write config.toml and open the logs, in the main process, which continue after `step`.

        A branch begins with a copy of its checkpoint. It comes first, and then config.toml: after a
        kill in between, `--resume auto` goes on in this folder.
        """
        logs: list[RunLog] = []

        def start() -> None:
            if self._base and self._source:
                save_checkpoint(self.checkpoints, step, load_checkpoint(self._source))
                self.saved_step = step
            record = self._record().encode()
            write_atomically(self.path / RECORD, lambda aside: aside.write_bytes(record))
            logs.append(RunLog(self.path, self.config, step, self.console.warn, self._base))
            (self.path / SUMMARY).unlink(missing_ok=True)  # it says how an earlier part ended
            self._write_trained_on()

        self.dist.on_main(start)
        return logs[0] if logs else NoLog()

    def _record(self) -> str:
        """config.toml: every setting, and the software and files of the run. --config reads it."""
        settings = self.config.replace(out_dir="", resume="", stop_after=0)
        found = {name: x for name, x in self.facts.items() if isinstance(x, str)} | self.versions
        return tomli_w.dumps({**settings.model_dump(exclude_none=True), "versions": found})

    def _write_trained_on(self) -> None:
        """Keep what this run and the run of --model are trained on, for honest evaluations."""
        before = trained_on(self.start / self.config.model.name)
        own, held_out = self.questions or (before[:0], before[:0])
        if overlap := len(np.intersect1d(before, held_out)):
            self.console.warn(
                f"--model {self.config.model.name} was trained on {overlap} of the questions that "
                "this run holds out, so its evaluations are too good"
            )
        if len(both := np.union1d(before, own)):
            write_atomically(self.path / TRAINED_ON, lambda aside: _save_array(aside, both))

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    # --- checkpoints and other files ------------------------------------------------------------

    def save(self, step: int, state: State, *, required: bool = True) -> None:
        """Write a checkpoint, unless this step has one. All processes call it.

        With a full disk, a save that is not `required` warns, and training goes on. Raises
        RunFailed if it is required, or if a value to save is not finite.
        """
        try:
            self.dist.on_main(lambda: self._save(step, state))
        except OSError as error:
            said = f"step {step}: NOT SAVED ({error}); older checkpoints are kept"
            if required:
                raise RunFailed(said) from error
            if self.dist.is_main:
                self.console.warn(f"{said}, and training continues")

    def save_before_ending(self, step: int, state: State) -> None:
        """Save what is done before an error ends the run. It raises nothing.

        It asks nothing of the other processes, which may be gone.
        """
        if not self.dist.is_main or not step:
            return
        try:
            self._save(step, state)
            self.console.warn(f"the run ends; its {step} steps are saved in {self.path}")
        except Exception as error:
            self.console.warn(f"the run ends, and step {step} is NOT SAVED ({error})")

    def _save(self, step: int, state: State) -> None:
        if self.saved_step == step:
            return
        own = {"step": step, "config": self.config.flat(), "versions": self.versions}
        keep_last = self.config.run.keep_last
        save_checkpoint(self.checkpoints, step, state | self.facts | own, keep_last=keep_last)
        self.saved_step = step

    def save_weights(self, model: Transformer) -> None:
        """Write `model.safetensors`, or adapters as PEFT does. Raises RunFailed."""
        files: dict[str, Callable[[Path], object]] = {WEIGHTS: model.save_pretrained}
        if adapters(model):
            files = peft_files(model, base=self.config.model.name)

        def write() -> None:
            for name, write_file in files.items():
                try:
                    write_atomically(self.path / name, write_file)
                except Exception as error:  # safetensors has errors of its own
                    raise RunFailed(f"{self.path / name}: NOT WRITTEN ({error})") from error

        self.dist.on_main(write)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`; if that is not possible, warn."""
        file = self.path / SUMMARY
        try:
            if self.dist.is_main:
                write_atomically(file, lambda aside: aside.write_text(to_json(summary, indent=1)))
        except OSError as error:
            self.console.warn(f"{file}: NOT WRITTEN ({error})")

    def dump(self, batch: RolloutBatch, step: int) -> Path | None:
        """Save a process's share of a batch whose step was skipped; None if that is not possible.

        `torch.load(..., weights_only=True)` reads it.
        """
        path = self.path / "bad_batches" / f"step_{step + 1:06d}_rank_{self.dist.rank}.pt"
        record = {
            "prompts": [example.prompt for example in batch.examples],
            "texts": [list(group) for group in batch.texts],
            **vars(batch.completions),
            "rewards": None if batch.rewards is None else torch.from_numpy(batch.rewards.total),
            "advantages": batch.advantages,
            "ref_logp": batch.ref_logp,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda aside: torch.save(record, aside))
        except (OSError, RuntimeError):  # a full disk must not end a run that the guard keeps going
            return None
        return path


def versions(processes: int) -> dict[str, Any]:
    """What the bits of a run depend on besides its settings and files."""
    try:
        package = version("minigrpo")
    except PackageNotFoundError:  # a checkout that is not installed
        package = "not installed"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "minigrpo": package,
        "threads": torch.get_num_threads(),
        "processes": processes,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }


def trained_on(run: Path) -> np.ndarray:
    """Sorted 64-bit hashes of the questions that a run's model has seen; empty if not known."""
    file = run / TRAINED_ON
    return np.load(file) if file.is_file() else np.zeros(0, dtype=np.uint64)


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _save_array(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:  # given a path, NumPy would add .npy to its name
        np.save(file, array)
