"""Score a model's completions of held-out examples, greedy and sampled, in total and by kind.

minigrpo evaluate RUN_OR_MODEL [--data test.jsonl]

It measures what the evaluations of a run measure, on more examples. A file of --data is held out
whole. Intervals are 95 %, over examples; positions of one game are only nearly independent.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from pydantic import Field

from ..build import (
    RECORD,
    Say,
    config_of_run,
    fit_vocab,
    load_model,
    make_scorer,
    make_task,
    make_tokenizer,
)
from ..config import Config, Group, Texts, Weights, places
from ..evaluate import measure
from ..runtime import device as layers
from ..runtime.console import Console
from ..runtime.logging import to_json
from ..runtime.run_dir import trained_on
from ..sampling.generate import Sampler
from ..task import Task
from ..tasks.base import load_task


class ModelArguments(Group):
    """The model, and settings that override those of its run."""

    run: Annotated[str, tyro.conf.Positional]
    """A run's folder, a model's folder or file, ORG/NAME on the Hub, or shipped."""
    tokenizer: str | None = None
    """As for minigrpo train, as are the settings below."""
    chat_template: str | None = None
    system: str | None = None
    task: str | None = None
    task_args: Texts = Field({})
    data: str | None = None
    """Files of questions; all of them are held out."""
    max_new_tokens: int | None = None
    seed: int | None = None
    device: str = "auto"

    def config(self) -> Config:
        """The run's settings, or the defaults, with those given here. Raises ConfigError."""
        is_run = (Path(self.run) / RECORD).is_file()
        settings = config_of_run(self.run).flat() if is_run else {}
        given = {name: x for name, x in self.model_dump().items() if x not in (None, {})}
        if self.data is not None:
            given["eval_data"] = ""
        own = {name: x for name, x in given.items() if name in places()}
        return Config.of(**{**settings, **own, "model": self.run})

    def load_task(self, config: Config) -> Task:
        """The task, with --data held out whole. Raises ConfigError."""
        if not self.data:
            return make_task(config)
        own = config.task
        chat, seed = bool(own.system), config.run.seed
        return load_task(own.name, seed=seed, eval_data=own.data, chat=chat, args=own.task_args)


def load_sampler(config: Config, warn: Say, *, speculate: bool) -> Sampler:
    """The model of a config, ready to sample from. Raises ConfigError."""
    device = layers.pick_device(config.speed.device)
    layers.set_up_process(config.speed, device)
    tokenizer, name = make_tokenizer(config), config.model.name
    model = load_model(name, task=config.task.name, say=warn)
    fit_vocab(model, name, tokenizer)
    autocast = partial(layers.autocast, config.speed, device)
    return Sampler(config, model.to(device), tokenizer, autocast, warn, speculate=speculate)


def warn_of_known_questions(run: str, task: Task, warn: Say) -> None:
    """Say how many held-out questions the run, or the one that it began from, was trained on."""
    held_out = () if task.questions is None else task.questions[1]
    if known := int(np.isin(held_out, trained_on(Path(run))).sum()):
        warn(
            f"{known} of {len(held_out)} held-out questions are among those that it was trained on"
        )


class Arguments(ModelArguments):
    n: Annotated[int, Field(ge=1)] = 2000
    """Held-out examples, or as many as there are."""
    eval_samples: int | None = None
    """Completions sampled per example; above 1 it also has pass@k."""
    rewards: str | None = None
    """A Python file with more reward functions, as for minigrpo train."""
    reward_weights: Weights = Field({})
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Write the figures here, as JSON."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    console, config = Console(), arguments.config()
    task = arguments.load_task(config)
    warn_of_known_questions(arguments.run, task, console.warn)
    sampler = load_sampler(config, console.warn, speculate=task.speculate)
    scorer = make_scorer(config, task, sampler.tokenizer, sampler.model.device, console.warn)
    run = config.run
    record, *_ = measure(
        sampler, task, scorer, size=arguments.n, seed=run.seed, samples=run.eval_samples
    )
    console.say(f"{arguments.run}: {record['n'].value:.0f} held-out examples, seed {run.seed}")
    console.measures({"": record})
    if arguments.json_file:
        measures = {name: asdict(x) for name, x in record.items()}
        made = {"model": arguments.run, "seed": run.seed, "samples": run.eval_samples}
        arguments.json_file.write_text(to_json({**made, "measures": measures}, indent=1))
        console.say(f"wrote {arguments.json_file}")
