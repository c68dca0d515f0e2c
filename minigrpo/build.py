"""Builds the objects of a run, each from those before it: see `Trainer`. Raises ConfigError."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from .config import Config
from .evaluate import held_out_examples
from .given import Given
from .guard import OOMBackoff
from .identity import digest, record_checksum
from .memory import MOST_KEPT, fit_to_memory, mean_prompt, sizes_of
from .model import lora
from .model.frozen_model import FrozenModel, InferenceCopy, with_context
from .model.shape import ModelShape
from .model.source import ModelSource, fit_vocab
from .model.transformer import Transformer
from .rewards.functions import RewardFunction
from .rewards.scorer import RewardScorer
from .run.console import Console
from .runtime.device import autocast, product_dtype
from .runtime.parallel import Parallel
from .sampling.sampler import Sampler
from .settings import INITIAL, LOSS_NAMES, SELF, SHIPPED
from .shards import is_sharded
from .task import Task
from .tasks.loading import TASKS, load_task
from .text.encoding import encode_answer, messages_of, prompt_text, prompt_within, template_args
from .text.tokenizer import Tokenizer, load_tokenizer
from .turns.dialogues import Dialogues
from .turns.environments import EnvironmentSet, TurnTask
from .types import ConfigError, Example, Warn
from .userfiles import files_read

MODELS = "model", "reference", "teacher"  # the settings that name models
CHECKED = 16  # examples of each split that a run makes before it starts


def resolve(config: Config, given: Given | None = None, *, training: bool = True) -> Config:
    """The config with names whose meaning does not change, so that a resume gets the same files.

    ORG/NAME gets the commit on the Hub, --tokenizer auto becomes the model's own tokenizer and chat
    template, and --task auto becomes a task. Objects get a text that stands for them. Without
    `training`, only --model is needed.
    """
    given = given or Given()
    settings = config.flat() | given.as_settings()
    if settings["task"] == "auto":
        settings |= _task_of(config, given)
        trains_on_chess = training and settings["task"] == "chess-env" and given.model is None
        if trains_on_chess and ModelSource.of(settings["model"]).size is not None:
            raise ConfigError("nothing to train on: give --data with --rewards, or a --task")
    if settings["model"] == SHIPPED and settings["task"] in {*TASKS} - {"chess-env"}:
        raise ConfigError(f"--task {settings['task']} ships no model: give a --model")
    for name in MODELS if training else MODELS[:1]:
        if settings[name] not in ("", SELF, INITIAL):
            settings[name] = ModelSource.of(settings[name]).pinned
    if settings["tokenizer"] == "auto":
        source = ModelSource.of(settings["model"])
        for name, value in source.tokenizer_settings.items():
            if name == "tokenizer" or not settings[name]:
                settings[name] = value
    return config.replace(**settings)


def _task_of(config: Config, given: Given) -> dict[str, Any]:
    """The task of --task auto, as docs/tasks.md says: `prompts` for rows, else `chess-env`."""
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
    return load_tokenizer(
        model.tokenizer,
        model.chat_template,
        config.task.system,
        model.chat_args,
    )


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
        if task.environment or task.tools:
            if environments is None:
                environments = EnvironmentSet.of(task.environment, task.tools)
            elif not environments.reads_rows:
                raise ConfigError("--task has an environment or tools: add these tools there")
        if environments is not None:
            task = TurnTask(task, environments, config.run.seed)
        return cls(config, tokenizer, task, environments, given.reward_functions(config))


def fit_to_device(
    job: Job,
    shape: ModelShape,
    parallel: Parallel,
    console: Console,
) -> tuple[Config, int]:
    """What `fit_to_memory` makes of the job's config and the free memory on CUDA."""
    device = parallel.device
    if device.type != "cuda":
        return job.config, MOST_KEPT
    prompt = mean_prompt(job.tokenizer, job.task)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = torch.cuda.mem_get_info(device)[0] + reusable
    processes = parallel.dist.world_size
    fitted, num_kept = fit_to_memory(job.config, shape, prompt, available, processes)
    console.say(f"batch sizes for {available / 2**30:.1f} GiB: {sizes_of(fitted)}")
    return fitted, num_kept


@dataclass(frozen=True)
class FrozenModels:
    """Makes the models of a run that are not trained: reference, teacher, those of rewards."""

    job: Job
    policy: Transformer
    parallel: Parallel
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
        return self._named(f"{flag} {name}", name, is_for_reward=False)

    def of_reward(self, name: str) -> FrozenModel:
        """The model that a reward asks for by name, with its own tokenizer and chat template.

        INITIAL is loaded anew: the policy has changed, or a resume has loaded its checkpoint.
        """
        if name == SELF and self.parallel.is_sharded:  # processes ask at different times
            raise ConfigError("--fsdp: a reward cannot ask the model that is trained")
        named = self.initial if name == INITIAL else name
        return self._named(name, named, is_for_reward=True)

    def _named(self, label: str, name: str, is_for_reward: bool) -> FrozenModel:
        config = self.job.config
        model = self.policy
        tokenizer = self.job.tokenizer
        keeps_shards = self.parallel.is_sharded and not is_for_reward
        # with --lora-rank, a copy of the policy copies the adapters and shares all other weights
        shares_weights = name == SELF or (name == INITIAL and config.model.lora_rank > 0)
        if name == INITIAL:
            model = model.sharing_weights() if shares_weights else copy.deepcopy(model)
            lora.freeze_adapters(model)
        elif name != SELF:
            source = ModelSource.of(name)
            own = source.load_tokenizer()
            if is_for_reward:
                tokenizer = own
            elif own.engine.get_vocab() != tokenizer.engine.get_vocab():
                raise ConfigError(f"{label}: its tokenizer is not that of --model")
            model = source.load(config.model.base_dtype, config.run.seed, self.console.say)
            fit_vocab(model, source.name, tokenizer)
            if not keeps_shards:
                model = model.to(self.parallel.device)
            record_checksum(self.checksums, label, dict(model.named_parameters()))
        dtype = product_dtype(config.speed)
        if not shares_weights:
            model.requires_grad_(False)
            if not keeps_shards:
                model = InferenceCopy(model, dtype).model
            elif not is_sharded(model):  # a copy of the trained model has shards
                self.parallel.prepare(model)
        size = config.memory.micro_batch_size
        return FrozenModel(
            model,
            tokenizer,
            packing=config.speed.packing,
            name=label,
            run_in_parts=OOMBackoff(label, "--micro-batch-size", size, self.console.warn).run,
            autocast=partial(autocast, config.speed, self.policy.device),
            offload=config.memory.offload_reference and not shares_weights,
            dtype=dtype,
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


def make_sampler(
    job: Job,
    model: Transformer,
    console: Console,
    num_kept: int = MOST_KEPT,
) -> Sampler:
    """The model, ready to sample from, for the examples of the task."""
    dialogues = None  # each completion is a single turn
    if job.environments is not None:
        dialogues = Dialogues(job.config, job.environments, job.tokenizer, console.warn)
    return Sampler(
        job.config,
        model,
        job.tokenizer,
        warn=console.warn,
        show=console.evaluating,
        speculate=job.task.speculate,
        dialogues=dialogues,
        num_kept=num_kept,
    )


def check_examples(job: Job, context: int, console: Console) -> None:
    """Raise ConfigError for examples that do not fit the model, with `context` positions."""
    config = job.config
    task = job.task
    tokenizer = job.tokenizer
    if config.task.eval_data and not config.task.data:
        raise ConfigError("--eval-data needs --data, the files to train on")

    # 1. Whether they fit. Known examples without a prompt get it from their environment.
    known = task.known()
    made = [*map(task.train, range(CHECKED)), *held_out_examples(task, CHECKED)]
    asked = [example for example in known if example.prompt or example.messages]
    for example in [*asked, *made]:
        _check_fit(job, context, example)

    # 2. What is plausible, but has no effect or another one.
    if config.model.base_dtype != config.model.matrix_dtype:
        console.warn("--base-dtype stores frozen weights: without --lora-rank, --model has none")
    examples = [*known, *made]
    plain = [example for example in examples if not messages_of(tokenizer, example)]
    if plain and tokenizer.chat:
        console.say("prompts: plain texts; messages, or --system, would use the chat template")
    for example in plain:  # in messages it is an error
        spelled = [token for token in tokenizer.special if token in example.prompt]
        if spelled:
            advice = "Give messages: the chat template writes its tokens"
            console.warn(f"{example.label}: {spelled[0]} in the prompt stays text. {advice}")
            break
    given = config.model.chat_args.keys() | {name for x in examples for name in template_args(x)}
    if tokenizer.chat and (unread := given - tokenizer.chat.variables):
        names = ", ".join(sorted(unread))
        arguments = "--chat-args, chat_template_kwargs"
        console.warn(f"{tokenizer.chat.name} never reads {names} of {arguments}")


def _check_fit(job: Job, context: int, example: Example) -> None:
    config = job.config
    tokenizer = job.tokenizer
    room = context - config.sampling.max_new_tokens
    if field := config.loss.teacher_context:
        prompt_within(tokenizer, with_context(tokenizer, example, field), room)
    if config.supervised:
        if not example.answer:
            raise ConfigError(f"{example.label} has no answer, which --loss nll learns")
        if any(token in example.answer for token in tokenizer.special):
            raise ConfigError(f"{example.label}: a special token in the answer would be spelled")
        has_open_thought = prompt_text(tokenizer, example).rstrip().endswith("<think>")
        if has_open_thought and "</think>" not in example.answer:
            raise ConfigError(f"{example.label}: the answer lacks the </think> of the prompt")
        room = min(room, context - len(encode_answer(tokenizer, example)))
    prompt_within(tokenizer, example, room)


def digests(job: Job, scorer: RewardScorer, checksums: Mapping[str, str]) -> dict[str, str]:
    """What all processes of a run must have alike; of users' code the files, not their results."""
    task = job.task
    examples = [*map(task.train, range(CHECKED)), *task.known()]
    return {
        "rows": digest([task.about, *examples]),
        "rewards": digest([scorer.names, scorer.weights]),
        "tokenizer": job.tokenizer.fingerprint,
        **checksums,
        **files_read(),
    }
