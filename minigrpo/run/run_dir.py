"""A run's folder: make or reopen it, lock it, load what --resume names, save checkpoints.

    config.toml  metrics.jsonl  eval.jsonl  held_out.jsonl  samples.jsonl  summary.json
    model.safetensors (with --lora-rank: adapter_model.safetensors, adapter_config.json)
    checkpoints/step_NNNNNN/  trained_on.npy  tensorboard/  profile/  track_id

A folder holds one run for good: `--resume auto` goes on in it, and whoever goes back to an earlier
step takes another folder. So starting a run removes and renames nothing, except for log lines of
steps that it makes again. A checkpoint is the first file of all, so that a folder with any other
but no whole checkpoint has lost what was saved.
"""

import fcntl
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from ..config import Config, places
from ..model.lora import ADAPTER_FILE, adapters, peft_files
from ..model.transformer import Transformer
from ..runtime.distributed import DistContext
from ..runtime.guard import RunFailed
from ..types import ConfigError, Warn
from .checkpoint import (
    CHECKPOINTS,
    State,
    checkpoints,
    load_checkpoint,
    newest,
    save_checkpoint,
    sha256,
    write_atomically,
    write_text,
)
from .console import Console
from .logging import LOGS, RunLog, start_tracker, to_json

RECORD, SUMMARY, TRAINED_ON = "config.toml", "summary.json", "trained_on.npy"
WEIGHTS = "model.safetensors"
# a folder with any of these holds a run or a model, which a new run would replace
WRITTEN = (RECORD, *LOGS, SUMMARY, WEIGHTS, ADAPTER_FILE, TRAINED_ON)
# the groups of settings that may differ when a run goes on, except for the seed
MAY_DIFFER = ("speed", "memory", "run")
Questions = tuple[np.ndarray, np.ndarray] | None  # see `Task.questions`


class RunDir:
    """The folder of a run, which the main process alone reads and writes."""

    def __init__(self, config: Config, dist: DistContext, console: Console) -> None:
        self.config, self.dist, self.console = config, dist, console
        self.settings = config.replace(out_dir="", resume="", stop_after=0)
        loss = config.loss.name.rpartition(":")[2]
        name = config.run.out_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{loss}")
        self.path = dist.on_main(Path(name).absolute)  # users' code may change the current folder
        self.checkpoints = self.path / CHECKPOINTS
        self.saved_step = -1  # of the newest checkpoint in this folder
        self.base = self.path  # the folder of the run that this one continues
        self._lock = ExitStack()

    # --- open -----------------------------------------------------------------------------------

    def open(
        self, load: Callable[[State], object], facts: Mapping[str, Any], questions: Questions
    ) -> None:
        """Find and lock the folder, and load the checkpoint to go on from, if there is one.

        Args:
            load: gets the state in that checkpoint.
            facts: plain values that must be the same when the run goes on, such as the tokenizer's
                fingerprint and the model's shape.

        Raises ConfigError, after unlocking the folder.
        """
        self.questions = questions
        self.versions = versions(self.config, self.dist.world_size)
        self.run = {**self.settings.flat(), **self.versions, **facts}
        try:
            if source := self.dist.on_main(self._find):
                state = load_checkpoint(source)
                self._compare(state["run"])
                load(state)
                self.base = source.parent.parent
                if self.base == self.path:
                    self.saved_step = state["step"]
                self.console.say(f"resumed from step {state['step']} of {source}")
        except BaseException:
            self.close()
            raise

    def _find(self) -> Path | None:
        """Lock the folder; return the checkpoint to go on from, or None to start afresh."""
        path, resume = self.path, self.config.run.resume
        there = checkpoints(self.checkpoints)
        there += [path / name for name in WRITTEN if (path / name).exists()]
        if there and resume != "auto":
            raise ConfigError(
                f"--out-dir {path}: holds a run; take another folder, or --resume auto to go on"
            )
        path.mkdir(parents=True, exist_ok=True)
        file = self._lock.enter_context(open(path / ".lock", "a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out-dir {path}: another run is writing to it") from None
        except OSError:  # a file system without locks
            pass
        if resume in ("", "auto"):
            return newest(path, self.console.warn) if there else None
        return newest(Path(resume).absolute(), self.console.warn)

    def _compare(self, then: Mapping[str, Any]) -> None:
        """Raise ConfigError for another run's checkpoint; warn of what may change bits."""
        free = {name for name, (group, _) in places().items() if group in MAY_DIFFER} - {"seed"}
        for name, x in self.run.items():
            if then.get(name) == x:
                continue
            said = f"--resume: {name} was {then.get(name)!r}, is {x!r}"
            if name not in free | self.versions.keys():
                raise ConfigError(said)
            if self.dist.is_main:
                self.console.warn(f"{said}: bits may differ")

    def open_log(self, state: State) -> RunLog:
        """Start the tracker, save a new run or branch, write config.toml, and open the logs.

        If the tracker does not start, nothing is written, and the folder is unlocked.
        """
        log = RunLog(self.console.warn)

        def start() -> None:
            trackers = start_tracker(self.config, self.path)
            self.save(state, required=True)
            # every setting, which --config reads, and the software and files of the run
            settings = self.settings.model_dump(exclude_none=True)
            write_text(self.path / RECORD, tomli_w.dumps({**settings, "versions": self.versions}))
            log.open(self.path, state["step"], self.base, trackers)
            (self.path / SUMMARY).unlink(missing_ok=True)  # it says how an earlier part ended
            # what this run and the run of --model are trained on, for honest evaluations
            name = self.config.model.name
            warn_of_known_questions(name, self.questions, self.console.warn)
            before = trained_on(Path(name))
            own, _ = self.questions or (before, before)
            if len(both := np.union1d(before, own)):
                write_atomically(self.path / TRAINED_ON, lambda aside: np.save(aside, both))

        try:
            self.dist.on_main(start)
        except BaseException:
            self.close()
            raise
        return log

    def close(self) -> None:
        self._lock.close()

    # --- checkpoints and other files ------------------------------------------------------------

    def save(self, state: State, *, required: bool = False) -> None:
        """Write a checkpoint, unless its step has one."""
        if self.dist.is_main and self.saved_step != state["step"]:
            with self._writing(f"step {state['step']}", required=required):
                whole = state | {"run": self.run}
                save_checkpoint(self.checkpoints, whole, keep_last=self.config.run.keep_last)
                self.saved_step = state["step"]

    def save_end(self, model: Transformer, state: State) -> None:
        """Write `model.safetensors`, or adapters as PEFT does, and a checkpoint. Raises RunFailed.

        First the weights: with little room they matter most.
        """
        files: dict[str, Callable[[Path], object]] = {WEIGHTS: model.save_pretrained}
        if adapters(model):
            files = peft_files(model, base=self.config.model.name)
        for name, write in files.items():
            with self._writing(name, required=True):
                write_atomically(self.path / name, write)
        self.save(state, required=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        if self.dist.is_main:
            with self._writing(SUMMARY):
                write_text(self.path / SUMMARY, to_json(summary, indent=1))

    @contextmanager
    def _writing(self, what: str, *, required: bool = False) -> Iterator[None]:
        """If it fails, for instance on a full disk, warn and go on; raise RunFailed if required."""
        try:
            yield
        except Exception as error:  # safetensors has errors of its own
            said = f"{what}: NOT SAVED in {self.path} ({error})"
            if required:
                raise RunFailed(said) from error
            self.console.warn(said)


def versions(config: Config, processes: int) -> dict[str, Any]:
    """What the bits of a run depend on besides its settings: software, machine, users' files."""
    task, others = config.task, [config.loss.name, config.model.chat_template]
    texts = [task.name, task.rewards, task.data, task.eval_data, task.environment, *others]
    names = re.sub(r"\.py:\w+", ".py", ",".join(texts)).split(",")
    files = [file for name in names if (file := Path(name.strip()).absolute()).is_file()]
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        **{str(file): sha256(file) for file in files},
    }


def trained_on(run: Path) -> np.ndarray:
    """Sorted 64-bit hashes of the questions that a run's model has seen; empty if not known."""
    file = run / TRAINED_ON
    return np.load(file) if file.is_file() else np.zeros(0, dtype=np.uint64)


def warn_of_known_questions(model: str, questions: Questions, warn: Warn) -> None:
    """Say how many held-out questions a run, or the one that it began from, was trained on."""
    _, held_out = questions or ((), ())
    if known := int(np.isin(held_out, trained_on(Path(model))).sum()):
        warn(f"{model} has seen {known} of {len(held_out)} held-out questions: scores are too good")
