"""A run's folder: make or reopen it, lock it, load what --resume names, save checkpoints.

docs/running.md lists its files. A checkpoint is written before any other file, so a folder that has
others but no whole checkpoint is damaged, and is refused.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import tomli_w
import torch

from ..checkpoint import (
    CHECKPOINTS,
    State,
    checkpoints,
    load_checkpoint,
    newest,
    save_checkpoint,
    write_atomically,
    write_text,
)
from ..config import Config
from ..errors import ConfigError, RunFailed
from ..model.hf import ADAPTER_FILE, WEIGHTS
from ..model.lora import adapters, peft_files
from ..model.source import RECORD
from ..model.transformer import Transformer
from ..runtime.distributed import DistContext
from ..settings import places
from ..userfiles import files_read, sha256_of
from .console import Console
from .logging import LOGS, LogLine, RunLog, to_json

SUMMARY = "summary.json"
LOCK = ".lock"
# a folder with any of these holds a run or a model, which a new run would replace
WRITTEN = (RECORD, *LOGS, SUMMARY, WEIGHTS, ADAPTER_FILE)


def choose_folder(config: Config, dist: DistContext) -> Path:
    """The folder of a run in all processes, absolute, as users' code may leave the current one."""
    loss = config.loss.name.rpartition(":")[2]
    # to the microsecond, because an array of jobs starts in one second
    name = config.run.out_dir or f"runs/{datetime.now():%Y%m%d-%H%M%S-%f}-{loss}"
    return dist.on_main(Path(name).absolute)


@dataclass(eq=False)
class RunDir:
    """The folder of a run, read and written by the main process: `open`, `open_log`, then save."""

    path: Path  # from `choose_folder`
    config: Config
    dist: DistContext
    console: Console
    facts: Mapping[str, object]  # plain values that a resume must find unchanged
    checksums: dict[str, str]  # see `record_checksum`; a reward adds those of its models later

    def __post_init__(self) -> None:
        self.checkpoints = self.path / CHECKPOINTS
        # the settings without those of a single start
        self.record = self.config.replace(out_dir="", resume="", stop_after=0)
        self.machine = {  # what may change the bits of a run
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "processes": self.dist.world_size,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        }
        names = f"{self.config.task.data},{self.config.task.eval_data}".split(",")
        files = filter(os.path.isfile, map(str.strip, names))
        data = {file: sha256_of(file) for file in files}  # as they are named, in another folder too
        self.contents = data | files_read()
        self.identity = {**self.record.flat(), **self.machine, **self.facts}
        self.saved_step = -1  # step of the newest checkpoint in this folder
        self.continued = self.path  # the folder of the run whose logs go on here
        self._lock: TextIO | None = None

    def open(self, load: Callable[[State], object]) -> None:
        """Lock the folder, and give `load` the state to go on from, if there is one."""
        checkpoint = self.dist.on_main(self._lock_and_choose)
        if checkpoint:
            state = load_checkpoint(checkpoint)
            self._compare(state["run"])
            load(state)
            self.continued = checkpoint.parent.parent
            if self.continued == self.path:
                self.saved_step = state["step"]
            self.console.say(f"resumed from step {state['step']} of {checkpoint}")

    def _lock_and_choose(self) -> Path | None:
        """Lock the folder; return the checkpoint to go on from, or None to start afresh."""
        resume = self.config.run.resume
        written = [name for name in WRITTEN if (self.path / name).exists()]
        holds_a_run = bool(written or checkpoints(self.checkpoints))
        if holds_a_run and resume != "auto":
            advice = "take another folder, or --resume auto to go on"
            raise ConfigError(f"--out-dir {self.path}: holds a run; {advice}")
        if not holds_a_run and resume == "auto" and any(self.path.glob("checkpoint-*")):
            raise ConfigError(f"{self.path}: has another library's checkpoints: give --model one")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / LOCK, "a", encoding="utf-8")
        try:
            # of this process alone: what users' code forks may live on when it has been killed
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out-dir {self.path}: another run is writing to it") from None
        except OSError:
            pass  # a file system without locks
        if resume not in ("", "auto"):
            return newest(Path(resume).absolute(), self.console.warn)
        return newest(self.path, self.console.warn) if holds_a_run else None

    def check(self) -> None:
        """Raise RunFailed if the folder was removed, renamed or replaced since it was locked."""
        if self._lock is None:
            return
        try:
            lock_there = os.stat(self.path / LOCK)
            is_ours = os.path.samestat(lock_there, os.fstat(self._lock.fileno()))
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            raise RunFailed(f"{self.path}: was removed, renamed or replaced while the run went on")

    def _compare(self, then: Mapping[str, Any]) -> None:
        """Raise ConfigError for another run's identity; warn of what may change results."""
        free = ("speed", "memory", "run")  # the groups that may differ, except for the seed
        may_differ = {name for name, (group, _) in places().items() if group in free} - {"seed"}
        for name, now in self.identity.items():
            if then.get(name) == now:
                continue
            change = f"--resume: {name} was {then.get(name)!r}, is {now!r}"
            if name not in may_differ | self.machine.keys():
                raise ConfigError(change)
            self.console.warn(f"{change}: results may differ")
        for name, before in then["contents"].items():
            now = self.contents.get(name) or sha256_of(name)  # users' code may import it later
            if now and now != before:
                self.console.warn(f"--resume: {name} has changed since: it is used as it is now")
        for name, before in then["checksums"].items():
            if self.checksums.setdefault(name, before) != before:
                raise ConfigError(f"--resume: the {name} have changed since")

    def open_log(self, state: State) -> RunLog:
        """Save a new run or branch, and open its logs."""
        log = RunLog(self.console.warn, self.check)

        def begin() -> None:
            self.save(state, required=True)  # before any other file
            versions = {**self.machine, **self.contents, **self.checksums}
            tables = self.record.model_dump(exclude_none=True) | {"versions": versions}
            write_text(self.path / RECORD, tomli_w.dumps(tables))
            log.open(self.path, state["step"], self.continued)
            (self.path / SUMMARY).unlink(missing_ok=True)  # it says how an earlier part ended

        self.dist.on_main(begin)
        return log

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def save(self, state: State, *, required: bool = False) -> None:
        """Write a checkpoint, unless its step has one."""
        if self.dist.is_main and self.saved_step != state["step"]:
            with self._writing(f"step {state['step']}", required=required):
                # users' code may have imported more since the run began
                contents = files_read() | self.contents
                run = {**self.identity, "contents": contents, "checksums": self.checksums}
                keep_last = self.config.run.keep_last
                save_checkpoint(self.checkpoints, {**state, "run": run}, keep_last=keep_last)
                self.saved_step = state["step"]

    def save_end(self, model: Transformer, state: State, base: str) -> None:
        """Write weights, which matter most if there is little room. Adapters are for `base`."""
        weights = {WEIGHTS: partial(model.save_pretrained, state=state["model"])}
        files = peft_files(model, base=base) if adapters(model) else weights
        for name, write in files.items():
            with self._writing(name, required=True):
                write_atomically(self.path / name, write)
        self.save(state, required=True)

    def write_summary(self, summary: LogLine) -> None:
        if self.dist.is_main:
            with self._writing(SUMMARY):
                write_text(self.path / SUMMARY, to_json(summary, indent=1))

    @contextmanager
    def _writing(self, what: str, *, required: bool = False) -> Iterator[None]:
        """If it fails, for instance on a full disk, warn and go on; raise RunFailed if required."""
        self.check()
        try:
            yield
        except Exception as error:  # safetensors has errors of its own
            message = f"{what}: NOT SAVED in {self.path} ({error})"
            if required:
                raise RunFailed(message) from error
            self.console.warn(message)
