"""`minigrpo.train`: a run from Python, with objects where the command line has names of files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from .config import read_toml, settle
from .errors import ConfigError
from .evaluate import complete_prompt
from .model.shape import Size
from .model.transformer import Transformer
from .run.logging import EVALUATIONS, METRICS, read_numbers
from .runtime.distributed import DistContext
from .runtime.signals import REASONS
from .settings import FROM_PYTHON
from .text.encoding import messages_of
from .trainer import Callback, Trainer
from .turns.environments import EnvironmentSet

FilesOrRows = str | Path | Iterable[Mapping[str, Any]]
joined_processes = cache(DistContext.from_env)  # once: a script may train several times


def train(
    *,
    model: Any = None,
    data: FilesOrRows | None = None,
    eval_data: FilesOrRows | None = None,
    task: Any = None,
    rewards: Any = None,
    loss: Any = None,
    environment: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    callbacks: Sequence[Callback] = (),
    config: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> "TrainedRun":
    """Train a model, as `minigrpo train` does; a flag is an argument: `max_steps=200`.

    Args:
        model: a name as for --model, or a `Transformer`, which is trained in place.
        data, eval_data: files, or rows: anything that yields mappings (docs/tasks.md).
        task: a name as for --task, a class or an object (`minigrpo.Task`).
        rewards: functions of (example, text), decorated with `minigrpo.reward` or plain, or a file.
            If there is no `task`, they alone are the reward.
        loss: a name as for --loss, or a function of `losses.LossInputs` (docs/tasks.md).
        environment: a class that answers turns, a dict of them, or a name as for --environment.
        tools: functions that the model may call in its turns.
        callbacks: called after each step with (step, metrics), in the main process.
        config: a TOML file or a preset; `settings` override it.
        quiet: print warnings only.

    Raises ConfigError for bad input, before the run starts, RunFailed if it cannot go on, and
    KeyboardInterrupt after Ctrl-C, when the run is saved. A script that `torchrun` starts trains
    with several processes.
    """
    if not all(map(callable, callbacks)):
        raise ConfigError("callbacks are functions of (step, metrics)")
    # 1. Names and paths are settings, like those of the file, which they override.
    given = {"model": model, "data": data, "eval_data": eval_data, "task": task}
    given |= {"rewards": rewards, "loss": loss, "environment": environment}
    asked = {**given, **settings}
    names = {name: str(x) for name, x in asked.items() if isinstance(x, str | Path)}
    of_file = read_toml(config) if config else {}
    size = Size.of(model) if isinstance(model, Transformer) else None
    checked, why = settle({**of_file, **settings, **names}, size)
    # 2. All else are objects.
    objects = {name: x for name, x in given.items() if name not in names}
    if tools:
        named = checked.task.environment
        if objects.get("environment") is None and named and not named.startswith(FROM_PYTHON):
            objects["environment"] = EnvironmentSet.load(named, tools)
        else:
            objects["environment"] = EnvironmentSet.of(environment, tools)
    dist = joined_processes()
    trainer = Trainer(checked, dist=dist, quiet=quiet, callbacks=callbacks, **objects)
    if why:
        trainer.console.say(why)
    if size and checked.model.lora_rank:
        trainer.console.warn("commands cannot load adapters of an object: save it, give its folder")
    summary = trainer.fit()
    if summary["exit_reason"] in REASONS[1:]:  # the rest of the script must not go on
        raise KeyboardInterrupt(f"{summary['exit_reason']}: saved in {trainer.run_dir.path}")
    return TrainedRun(trainer, summary)


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended."""

    trainer: Trainer = field(repr=False)
    summary: Mapping[str, Any]  # the contents of summary.json

    @property
    def folder(self) -> Path:
        return self.trainer.run_dir.path

    @property
    def model(self) -> Transformer:
        return self.trainer.model

    @cached_property
    def metrics(self) -> dict[str, list[float]]:
        """Each metric of the steps as a list: `run.metrics["reward"]`, by `run.metrics["step"]`."""
        return self._columns(METRICS)

    @cached_property
    def evaluations(self) -> dict[str, list[float]]:
        """Each measure of the evaluations as a list, by `run.evaluations["step"]`."""
        return self._columns(EVALUATIONS)

    def _columns(self, name: str) -> dict[str, list[float]]:
        records = read_numbers(self.folder / name)
        keys = dict.fromkeys(key for record in records for key in record)
        return {key: [record.get(key, float("nan")) for record in records] for key in keys}

    def sample(self, prompt: str | Sequence[Mapping[str, Any]], n: int = 1) -> Sequence[str]:
        """n completions, the same at each call. A text is a user's message if its prompts are."""
        sampler = self.trainer.sampler
        task = self.trainer.job.task
        raw = not messages_of(sampler.tokenizer, task.held_out(0))
        return complete_prompt(sampler, prompt, n, raw, task)
