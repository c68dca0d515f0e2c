"""A run's folder: create or reopen it, lock it, and write checkpoints, config and summary.

config.toml  metrics.jsonl  eval.jsonl  held_out.jsonl  samples.jsonl  summary.json  tensorboard/
job_summary.txt  track_id
model.safetensors  checkpoints/step_NNNNNN/{state.pt, manifest.json}  bad_batches/
With --lora-rank, adapter_model.safetensors and adapter_config.json instead of model.safetensors.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import Config
from ..learner import Learner
from ..model.lora import PEFT_WEIGHTS, adapters, peft_files
from ..model.transformer import Transformer
from ..model.weight_files import WEIGHTS
from ..types import RolloutBatch
from . import resume as resuming
from .bad_batches import keep_bad_batch
from .base_model import base_digest, check_base, loadable_base
from .checkpoint import (
    ABANDONED,
    UNREADABLE,
    CheckpointError,
    State,
    checkpoints,
    find_checkpoint,
    remove_abandoned,
    save_checkpoint,
    set_aside,
    step_of,
)
from .distributed import DistContext
from .environment import versions
from .failures import RunFailed, reason_of
from .files import write_whole
from .flags import ConfigError, flag
from .folder import lock, make_folder, said_gone, working_folder
from .logging import Screen
from .origins import check_same_tokenizer, commits_of_models, recorded, recorded_files, write_record
from .resume import changes, check_same_run, made_by
from .run_log import Listener, NoLog, RunLog
from .summary import take_earlier_seconds, write_summary
from .trackers import start_trackers


class RunDir:
    """The folder of a run. Only the main process reads and writes, except for `dump`."""

    def __init__(self, config: Config, dist: DistContext, screen: Screen) -> None:
        """This only reads the files of the task; `open` makes the folder."""
        self.config, self.dist, self.screen = config, dist, screen
        self.path, self.shown = Path(), Path()  # absolute, and as --out-dir names it
        self.start = working_folder()
        self.files = resuming.same_files(config, dist)  # and of rewards' models, as they are loaded
        self.base = ""  # identifies the weights at --init-from, where they are needed again
        self.tokenizer: Mapping[str, str] = {}  # its fingerprint
        self.judge = ""  # the software that decides scores, if the task names it
        self.saved_step = -1  # of the newest checkpoint
        self.earlier_seconds = 0.0  # that the parts before a resume took; NaN: not known
        self.later: list[Path] = []  # checkpoints of later steps than the one resumed from
        self.listeners: list[Listener] = []  # of the logs, in the main process
        self._lock = contextlib.ExitStack()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def open(self, learner: Learner, tokenizer: Mapping[str, str], judge: str = "") -> int:
        """Create or reopen the folder, load what --resume names, return the number of steps done.

        `tokenizer` is its fingerprint, and `judge` the task's `judged_by`; checkpoints hold both.
        Raises ConfigError or CheckpointError, after unlocking the folder.
        """
        self.tokenizer, self.judge = tokenizer, judge
        # known once the models have been fetched, and the files of --task and --rewards imported
        self.files |= commits_of_models(self.config) | resuming.imported_files(self.config)
        self.shown = self.dist.on_main(self._make_and_lock)
        self.path = self.start / self.shown
        self.base = base_digest(self.config, learner.model)
        try:
            return self._resume(learner)
        except ValueError:
            self.close()
            raise

    def open_log(self, step: int) -> RunLog | NoLog:
        """Write config.toml and open the logs, in the main process, which continue after `step`.

        Raises ConfigError, in all processes, if a file cannot be written; the folder is unlocked.
        """
        logs: list[RunLog] = []

        def start() -> None:
            warn, listeners = self.screen.warn, self.listeners
            # First: a tracker that does not start leaves the logs as they are. Trackers take steps
            # in order, so that one of steps that are abandoned cannot go on.
            abandons = self.later and self.config.run.resume != "auto"
            listeners += start_trackers(self.config, self.path, 0 if abandons else step, warn)

            def begin() -> None:
                self._write_config()
                # before the logs are cut: --resume auto must not go on from steps that they lack
                self._set_later_aside()
                self.earlier_seconds = take_earlier_seconds(self.path, step)

            log = RunLog(
                self.path, warn, start_step=step, listeners=listeners, before_cutting=begin
            )
            logs.append(log)

        try:
            self.dist.on_main(start)
        except ValueError:
            for listener in self.listeners:
                listener.close()
            self.close()
            raise
        return logs[0] if logs else NoLog()

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    def _make_and_lock(self) -> Path:
        shown = make_folder(self.config, self.start)
        self._lock = lock(self.start / shown)
        return shown

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self, step: int, learner: Learner, *, required: bool = True) -> None:
        """Write a checkpoint, unless this step has one.

        If the disk is full and the save is not `required`, warn and continue; older checkpoints
        are kept. Raises RunFailed if it is, if a value to save is not finite, or, once the step is
        saved, if the folder was removed or renamed.
        """

        def save() -> None:
            if gone := said_gone(self.path):
                self.saved_step = -1
            self._save(step, learner)
            if gone:
                self._write_config()
                raise RunFailed(f"{gone}; step {step} is saved there anew, and the run ends")

        try:
            self.dist.on_main(save)
        except RunFailed:
            raise
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            said = f"step {step}: NOT SAVED ({reason_of(error)})"
            if required:
                raise RunFailed(f"{said}; older checkpoints are kept") from error
            self.screen.warn(f"{said}; training continues")

    def save_before_ending(self, step: int, learner: Learner, why: str) -> None:
        """Save what is done before an error or a second signal ends the run.

        It asks nothing of the other processes, which may be gone. It raises nothing but the
        KeyboardInterrupt of a third signal. `why` is how the message begins.
        """
        if not self.dist.is_main or step == max(self.saved_step, 0):
            return
        try:
            self._save(step, learner)
            self.screen.warn(f"{why}; its {step} steps are in {self.path}")
        except Exception as error:
            self.screen.warn(f"{why}, and step {step} is NOT SAVED ({reason_of(error)})")

    def save_weights(self, model: Transformer) -> None:
        """Write `model.safetensors`, or adapters as PEFT does. Raises RunFailed in one line."""
        files: dict[str, Callable[[Path], object]] = {WEIGHTS: model.save_pretrained}
        if adapters(model):
            files = peft_files(model, base=loadable_base(self.config.model.init_from))

        def write() -> None:
            for name, write_file in files.items():
                file = self.path / name
                try:
                    write_whole(file, write_file)
                except Exception as error:  # safetensors has errors of its own
                    raise RunFailed(f"{file}: cannot be written ({reason_of(error)})") from error

        self.dist.on_main(write)

    def _save(self, step: int, learner: Learner) -> None:
        if self.saved_step == step:
            return
        state = {**learner.state_dict(), "step": step, "config": self.config.flat()}
        state["shape"] = asdict(learner.model.shape)  # enough to rebuild the model
        state["made_by"] = made_by(self.dist.world_size, learner.device)
        state |= {"files": self.files, "base": self.base, "tokenizer": dict(self.tokenizer)}
        state["judge"] = self.judge
        keep_last, warn = self.config.run.keep_last, self.screen.warn
        save_checkpoint(self.checkpoints, step, state, keep_last=keep_last, warn=warn)
        self.saved_step = step
        remove_abandoned(self.checkpoints)

    def _set_later_aside(self) -> None:
        """Rename checkpoints of later steps: --resume N abandons them, and --resume auto could not
        read them. The latter are kept, because a disk that is not mounted looks like damage.
        """
        try:
            set_aside(self.later, UNREADABLE if self.config.run.resume == "auto" else ABANDONED)
        except OSError as error:
            raise ConfigError(
                f"{self.checkpoints}: cannot be written ({reason_of(error)})"
            ) from None

    def _resume(self, learner: Learner) -> int:
        """The main process reads the checkpoint, if any, and sends it to the others."""
        found: State = {}
        resume = self.config.run.resume
        weights = [name for name in (WEIGHTS, PEFT_WEIGHTS) if (self.path / name).exists()]

        def find() -> bool:
            found.update(find_checkpoint(self.checkpoints, resume, self.screen.warn) or {})
            if found:
                for name in ("step", "config", "model", "optimizer"):
                    if found.get(name) is None:
                        raise CheckpointError(f"{self.shown}: a checkpoint has no {name}")
                check_same_run(self.config, found["config"], self.path)
                resuming.check_same_shape(asdict(learner.model.shape), found.get("shape") or {})
                check_base(self.config, self.base, found.get("base", ""))
                name, then = self.config.model.tokenizer, found.get("tokenizer", {})
                check_same_tokenizer(name, self.tokenizer, then)
                there = checkpoints(self.checkpoints)
                self.later = [path for path in there if (step_of(path) or 0) > found["step"]]
            elif resume and weights:
                raise CheckpointError(
                    f"--resume {resume}: {self.shown} holds a model, {weights[0]}, but no "
                    "checkpoint; take another folder"
                )
            elif resume:
                resuming.check_nothing_trained(self.path, self.config)
            return bool(found)

        if not self.dist.on_main(find):
            if resume:
                self.screen.say(f"--resume auto: no checkpoint in {self.path}, starting afresh")
            return 0
        state = self.dist.broadcast(found)
        try:
            learner.load_state_dict(state)
        # the state of another version raises whatever its reader stumbles on
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{self.path}: does not fit this model: {reason}") from None
        self.saved_step = step = int(state["step"])
        self._say_resumed(step, state, made_by(self.dist.world_size, learner.device))
        return step

    def _say_resumed(self, step: int, state: State, now: dict[str, Any]) -> None:
        if not self.dist.is_main:
            return
        if said := changes(self.config, state["config"], now, state.get("made_by", {})):
            self.screen.warn(
                f"{'; '.join(said)}: the batches are the same, but results may not be equal bit "
                "for bit"
            )
        for other in (
            resuming.other_contents(self.files, state.get("files", {})),
            resuming.other_judge(self.judge, state.get("judge", "")),
            resuming.abandoned(step, self.later, self.config.run.resume),
        ):
            if other:
                self.screen.warn(other)
        if damage := resuming.damage_of_record(self.path):
            self.screen.warn(f"{damage}; it is written anew, with the settings of this command")
        self.screen.say(f"resumed from step {step} of {self.shown}")
        for name in ("max_steps", "stop_after"):
            last = getattr(self.config.run, name)
            if last and step > last:
                self.screen.warn(f"step {step} is past {flag(name)} {last}: nothing is trained")

    # --- other files ----------------------------------------------------------------------------

    def dump(self, batch: RolloutBatch, step: int) -> Path | None:
        """Save a batch whose step was skipped (`torch.load(..., weights_only=True)` reads it)."""
        return keep_bad_batch(self.path, batch, step, self.dist.rank)

    def _write_config(self) -> None:
        """Write `config.toml`, which --config can read, with the run's software versions."""
        found = versions(self.dist.world_size) | recorded(self.tokenizer)
        found |= recorded_files(self.files)
        write_record(self.path, self.config, found)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`; if that is not possible, warn, and leave none.

        Raises RunFailed if the folder has gone, and the run does not fail for another reason.
        """
        if summary["status"] != "failed" and (gone := said_gone(self.path)):
            raise RunFailed(f"{gone}; so are the weights")
        write_summary(self.path, summary, self.dist.world_size, self.screen.warn)
