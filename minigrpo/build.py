"""Builds the objects of a run, each from those before it: see `Trainer`. Raises ConfigError."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from .config import Config
from .given import Given
from .guard import OOMBackoff
from .identity import record_checksum
from .model import lora
from .model.frozen_model import FrozenModel
from .model.inference import InferenceCopy
from .model.source import ModelSource, fit_vocab
from .model.transformer import Transformer
from .rewards.functions import RewardFunction
from .rewards.scorer import RewardScorer
from .run.console import Console
from .runtime.device import autocast, product_dtype
from .sampling.sampler import Sampler
from .settings import INITIAL, LOSS_NAMES, SELF
from .task import Task
from .tasks.loading import load_task
from .text.tokenizer import Tokenizer, load_tokenizer
from .turns.dialogues import Dialogues
from .turns.environments import EnvironmentSet, TurnTask
from .types import ConfigError, Warn

MODELS = "model", "reference", "teacher"  # the settings that name models


def resolve(config: Config, given: Given | None = None, models: Sequence[str] = MODELS) -> Config:
    """The config with names whose meaning does not change, so that a resume gets the same files.

    ORG/NAME gets the commit on the Hub, --tokenizer auto becomes the model's own tokenizer and chat
    template, and --task auto becomes a task. Objects get a text that stands for them. `models` are
    the settings whose models are needed.
    """
    given = given or Given()
    settings = config.flat() | given.as_settings()
    if settings["task"] == "auto":
        settings |= _task_of(config, given)
    for name in models:
        if settings[name] not in ("", SELF, INITIAL):
            settings[name] = ModelSource.of(settings[name], settings["task"]).pinned
    if settings["tokenizer"] == "auto":
        source = ModelSource.of(settings["model"], settings["task"])
        for name, value in source.tokenizer_settings.items():
            if name == "tokenizer" or not settings[name]:
                settings[name] = value
    return config.replace(**settings)


def _task_of(config: Config, given: Given) -> dict[str, Any]:
    """The task of --task auto: `prompts` for rows, else `chess-env`.

    If the caller gives rewards, they alone are paid.
    """
    settings = config.task
    environments = given.environments(config)
    if environments or given.data or given.eval_data or settings.data or settings.eval_data:
        of_turns = environments.reward_weights if environments else {}
        is_paid = given.rewards or settings.rewards or of_turns
        judge = {"judge": "none"} if is_paid else {}
        return {"task": "prompts", "task_args": {**judge, **settings.task_args}}
    functions = given.reward_functions(config)
    weights = settings.reward_weights or {function.name: function.weight for function in functions}
    return {"task": "chess-env", "reward_weights": weights}


def make_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer named by --tokenizer, with --chat-template, --chat-args and --system."""
    model = config.model
    return load_tokenizer(model.tokenizer, model.chat_template, config.task.system, model.chat_args)


@dataclass(frozen=True)
class Job:
    """What a model is asked, and what its answers are worth. Users' files may define all of it."""

    config: Config  # from `resolve`
    tokenizer: Tokenizer
    task: Task
    environments: EnvironmentSet | None  # of the caller or of --environment, or else the task's
    functions: Sequence[RewardFunction]

    @classmethod
    def of(cls, config: Config, given: Given) -> "Job":
        """Read the tokenizer, and run users' files, before weights are loaded."""
        tokenizer = make_tokenizer(config)
        environments = given.environments(config)
        task = load_task(
            given.asked("task", config),
            seed=config.run.seed,
            data=given.asked("data", config),
            eval_data=given.asked("eval_data", config),
            chat=bool(config.task.system),
            environment=environments,
            args=config.task.task_args,
        )
        if environments is None and (task.environment or task.tools):
            environments = EnvironmentSet.of(task.environment, task.tools)
        if environments is not None:
            task = TurnTask(task, environments, config.run.seed)
        return cls(config, tokenizer, task, environments, given.reward_functions(config))


@dataclass(frozen=True)
class FrozenModels:
    """Makes the models of a run that are not trained: reference, teacher, those of rewards."""

    job: Job
    policy: Transformer
    console: Console
    checksums: dict[str, str]  # gets one for each model that a resume loads again
    initial: str  # the name of the model that the run began with

    def of_flag(self, flag: str, name: str | None) -> FrozenModel | None:
        """The model of --reference or --teacher, which reads the policy's tokens, if there is one.

        SELF is the policy, as it is when it is asked; INITIAL is a copy of it as it is now: call
        this before a checkpoint is loaded.
        """
        if not name:
            return None
        return self._named(f"{flag} {name}", name, has_own_tokenizer=False)

    def of_reward(self, name: str) -> FrozenModel:
        """The model that a reward asks for by name, with its own tokenizer and chat template.

        INITIAL is loaded anew: the policy has changed, or a resume has loaded its checkpoint.
        """
        named = self.initial if name == INITIAL else name
        return self._named(name, named, has_own_tokenizer=True)

    def _named(self, label: str, name: str, has_own_tokenizer: bool) -> FrozenModel:
        config = self.job.config
        model = self.policy
        tokenizer = self.job.tokenizer
        # with --lora-rank, a copy of the policy copies the adapters and shares all other weights
        shares_weights = name == SELF or (name == INITIAL and config.model.lora_rank > 0)
        if name == INITIAL:
            model = model.sharing_weights() if shares_weights else copy.deepcopy(model)
            lora.freeze_adapters(model)
        elif name != SELF:
            source = ModelSource.of(name, config.task.name)
            own = source.load_tokenizer()
            if has_own_tokenizer:
                tokenizer = own
            elif own.engine.get_vocab() != tokenizer.engine.get_vocab():
                raise ConfigError(f"{label}: its tokenizer is not that of --model")
            model = source.load(config.model.base_dtype, config.run.seed, self.console.say)
            fit_vocab(model, source.name, tokenizer)
            model = model.to(self.policy.device)
            record_checksum(self.checksums, label, dict(model.named_parameters()))
        if not shares_weights:
            frozen = model.requires_grad_(False)
            model = InferenceCopy(frozen, product_dtype(config.speed)).model
        size = config.memory.micro_batch_size
        return FrozenModel(
            model,
            tokenizer,
            packing=config.speed.packing,
            name=label,
            run_in_parts=OOMBackoff(label, "--micro-batch-size", size, self.console.warn).run,
            autocast=partial(autocast, config.speed, self.policy.device),
            offload=config.memory.offload_reference and not shares_weights,
        )


def make_scorer(job: Job, frozen_models: FrozenModels, warn: Warn) -> RewardScorer:
    """The scorer of the task and of --rewards. Raises ConfigError if they pay for nothing."""
    speed = job.config.speed
    loss = job.config.loss
    scorer = RewardScorer(
        job.task,
        weights=job.config.task.reward_weights,
        functions=job.functions,
        environments=job.environments.reward_weights if job.environments else {},
        workers=speed.num_reward_workers if speed.parallel_rewards else 1,
        warn=warn,
        tokenizer=job.tokenizer,
        token_model=cache(frozen_models.of_reward),
    )
    is_paid = any(scorer.weights.values())
    teaches_alone = loss.kl_coef or loss.teacher or loss.name not in LOSS_NAMES
    if not (is_paid or teaches_alone or job.config.supervised):
        raise ConfigError("no reward: give --rewards functions, or a --reward-weights above 0")
    return scorer


def make_sampler(job: Job, model: Transformer, warn: Warn) -> Sampler:
    """The model, ready to sample from, for the examples of the task."""
    dialogues = None  # each completion is a single turn
    if job.environments is not None:
        dialogues = Dialogues(job.config, job.environments, job.tokenizer, warn)
    return Sampler(
        job.config,
        model,
        job.tokenizer,
        warn=warn,
        speculate=job.task.speculate,
        dialogues=dialogues,
    )
