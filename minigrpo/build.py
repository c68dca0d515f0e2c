"""Build the parts of a run from its config, for the trainer, the tools and the benchmarks."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch

from .config import LOSS_NAMES, Config, ModelConfig
from .environments import Begun, World, load_name
from .learner import Learner
from .losses import LossSpec, loss_spec
from .model.encoding import encode_pairs, encode_prompts
from .model.frozen_model import FrozenModel, with_context
from .model.hf import SHAPES, WEIGHTS, hub_folder
from .model.lora import (
    ADAPTER_FILE,
    add_adapters,
    disable_adapters,
    load_peft,
    load_trained,
    merge_adapters,
)
from .model.packing import PACKINGS
from .model.tokenizer import Tokenizer, load_tokenizer
from .model.transformer import ModelShape, Transformer
from .rewards import RewardFunction, RewardScorer, load_rewards
from .runtime.checkpoint import checkpoints, load_checkpoint, newest
from .runtime.device import autocast, low_precision_copy, sharing_weights
from .runtime.guard import OOMBackoff
from .runtime.rng import stream
from .runtime.run_dir import RECORD
from .task import Task
from .tasks.base import Data, load_task, shipped_model
from .types import ConfigError

Say = Callable[[str], object]
PYTHON = "python:"  # begins a setting that stands for an object of the caller's
CHESS = "chess"  # the tokenizer of models that bring none
CHESS_FILES = (".pgn", ".pgn.gz", ".txt")  # --task auto: what only chess-env reads
# Published models pad their vocabulary to a round number: accept up to 1 / MOST_PADDING more tokens
# than the tokenizer has.
MOST_PADDING = 8
OWN = SELF, INITIAL = "self", "initial"  # the model that is trained, as a frozen one
CHECKED = 16  # examples of each split that are encoded before a run starts, and 4 x of the longest


def nothing(text: str) -> None:
    """A message that is not shown."""


def config_of_run(run: str | Path) -> Config:
    """The settings of a run's folder. Raises ConfigError."""
    return Config.from_toml(Path(run) / RECORD)


# --- what a caller gives as objects ---------------------------------------------------------------


@dataclass(frozen=True)
class Objects:
    """Python objects in place of names and files. None: the setting of this name counts."""

    model: Transformer | None = None
    data: Data | None = None  # rows
    eval_data: Data | None = None
    task: Any = None  # a class, or an object
    rewards: Sequence[RewardFunction] | None = None
    loss: Any = None  # a function of LossInputs, or a LossSpec
    environment: World | None = None

    @classmethod
    def of(cls, **given: Any) -> "Objects":
        """Iterables of rows become lists, and plain functions reward functions."""
        for name in ("data", "eval_data"):
            if given.get(name) is not None:
                given[name] = [dict(row) for row in given[name]]
        world = given.get("environment")
        if world is not None and not isinstance(world, World):
            given["environment"] = World.of(world)
        if functions := given.pop("rewards", None):
            functions = [functions] if callable(functions) else functions
            own = [x if isinstance(x, RewardFunction) else RewardFunction(x) for x in functions]
            given["rewards"] = own
        return cls(**given)

    def settings(self) -> dict[str, str]:
        """A text for each object, which a resumed run compares as the setting of this name."""
        found = {}
        for field in fields(self):
            if (value := getattr(self, field.name)) is None:
                continue
            if field.name == "rewards":
                text = ",".join(f"{function.weight:g} x {function.name}" for function in value)
            elif isinstance(value, list):
                text = hashlib.sha256(repr(value).encode(errors="replace")).hexdigest()[:16]
            else:
                text = getattr(value, "__name__", type(value).__name__)
            found[field.name] = PYTHON + text
        return found

    def get(self, config: Config, name: str) -> Any:
        """The object of this name, or else the setting. Raises ConfigError for one that is gone."""
        if (value := getattr(self, name)) is not None:
            return value
        setting = config.flat()[name]
        if setting.startswith(PYTHON):
            flag = name.replace("_", "-")
            said = "an object of the script that began this run: run the script again, or give"
            raise ConfigError(f"--{flag} {setting}: {said} --{flag} a name or a file")
        return setting

    def world(self, config: Config) -> World | None:
        """The caller's environment and tools, or those of --environment."""
        found = self.get(config, "environment")
        return World.of(found) if found and isinstance(found, str) else found or None

    def functions(self, config: Config) -> Sequence[RewardFunction]:
        """The caller's reward functions, or those of --rewards."""
        found = self.get(config, "rewards")
        return load_rewards(found) if isinstance(found, str) and found else found


NO_OBJECTS = Objects()

# --- tokenizer and task ---------------------------------------------------------------------------


def resolve(config: Config, objects: Objects = NO_OBJECTS) -> Config:
    """The config with what names stand for now, so that a resumed run gets the same files.

    --model ORG/NAME gets the commit on the Hub; --tokenizer auto becomes the model's own tokenizer
    and chat template; --task auto becomes a task. Objects get a text that stands for them.
    """
    config = resolve_task(config.replace(**objects.settings()), objects)
    for name in ("reference", "teacher"):
        if (model := getattr(config.loss, name)) not in ("", *OWN):
            config = config.replace(**{name: pinned(model)})
    if objects.model is not None:
        own = CHESS if config.model.tokenizer == "auto" else config.model.tokenizer
        return config.replace(tokenizer=own)
    name, tokenizer, template = pinned(config.model.name), config.model.tokenizer, ""
    if tokenizer == "auto":
        tokenizer, template = own_tokenizer(name)
    template = config.model.chat_template or template
    return config.replace(model=name, tokenizer=tokenizer, chat_template=template)


def pinned(model: str) -> str:
    """The name of a model, of one on the Hub with its commit."""
    folder = hub_folder(model, weights=False)
    return model if folder == Path(model) else f"{model.partition('@')[0]}@{folder.name}"


def resolve_task(config: Config, objects: Objects = NO_OBJECTS) -> Config:
    """What --task auto is: `prompts` for rows, else `chess-env`.

    With reward functions of the caller's, nothing that is built in is paid.
    """
    task = config.task
    if task.name != "auto":
        return config
    functions, world = objects.functions(config), objects.world(config)
    if world or (task.data and not task.data.endswith(CHESS_FILES)):
        args = {"judge": "none"} if functions or (world and world.parts) else {}
        return config.replace(task="prompts", task_args={**args, **task.task_args})
    weights = {function.name: function.weight for function in functions}
    return config.replace(task="chess-env", reward_weights=task.reward_weights or weights)


def own_tokenizer(model: str) -> tuple[str, str]:
    """The tokenizer of a model, and the chat template of the run that it comes from, or ""."""
    if (Path(model) / RECORD).is_file():
        of_run = config_of_run(model).model
        return of_run.tokenizer, of_run.chat_template
    has_own = (hub_folder(model, weights=False) / "tokenizer.json").is_file()
    return (model if has_own else CHESS), ""


def make_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of --tokenizer, with --chat-template and --system. Raises ConfigError."""
    model = resolve(config).model
    return load_tokenizer(model.tokenizer, model.chat_template or None, config.task.system)


def make_task(config: Config, objects: Objects = NO_OBJECTS) -> Task:
    """The task of --task, --data and --eval-data. Raises ConfigError."""
    config, world = resolve_task(config, objects), objects.world(config)
    task = load_task(
        objects.get(config, "task"),
        seed=config.run.seed,
        data=objects.get(config, "data"),
        eval_data=objects.get(config, "eval_data"),
        chat=bool(config.task.system),
        environment=bool(world),
        args=config.task.task_args,
    )
    if not world and (task.environment or task.tools):
        world = World.of(task.environment, task.tools)
    return cast(Task, Begun(task, world, config.run.seed)) if world else task


def check_examples(config: Config, task: Task, tokenizer: Tokenizer, context: int) -> None:
    """Raise ConfigError for examples that do not fit the model; a run would end at their step."""
    held_out = range(min(CHECKED, task.num_held_out or CHECKED))
    examples = [task.train(i) for i in range(CHECKED)]
    examples += [*(task.held_out(i) for i in held_out), *task.longest(4 * CHECKED)]
    encode_prompts(tokenizer, examples, context - config.sampling.max_new_tokens)
    if field := config.loss.teacher_context:
        for example in examples:
            with_context(tokenizer, example, field)
    if config.supervised:
        encode_pairs(tokenizer, examples, context)
        if not any(example.answer for example in examples):
            raise ConfigError("--loss nll learns true answers, and these examples have none")


# --- models ---------------------------------------------------------------------------------------


def make_model(
    config: Config,
    tokenizer: Tokenizer,
    device: torch.device | str = "cpu",
    say: Say = nothing,
    objects: Objects = NO_OBJECTS,
) -> Transformer:
    """The model that --model names, with --lora-rank, on a device. Raises ConfigError."""
    settings, seed = config.model, config.run.seed
    given = objects.get(config, "model")
    if isinstance(given, Transformer):
        model = given
    elif given == "scratch":
        model = Transformer(ModelShape(tokenizer.n_vocab), seed)
    else:
        stored = settings.base_dtype if settings.lora_rank else "float32"  # as trained ones are
        model = load_model(
            settings.name, task=config.task.name, say=say, matrices=stored, seed=seed
        )
    fit_vocab(model, f"--model {settings.name}", tokenizer)
    add_lora(model, settings, int(stream(config.run.seed, "adapters").integers(2**32)))
    return model.to(device)


def load_model(
    name: str,
    *,
    task: str = "chess-env",
    say: Say = nothing,
    matrices: str = "float32",
    seed: int = 0,
) -> Transformer:
    """A model by what --model names: shipped, a run, a folder or file, or ORG/NAME on the Hub.

    Adapters of a run are merged into its weights.

    Args:
        task: whose model `shipped` means.
        matrices: a value of --base-dtype, see `Weights.store`.
        seed: of the random weights of a folder that has none.

    Raises ConfigError.
    """
    if name == "shipped":
        return Transformer.from_pretrained(shipped_model(task), matrices)
    run = Path(name)
    if not (run / RECORD).is_file():
        folder = hub_folder(name)
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            say(f"--model {name}: random weights, of the shape in its config.json")
        return Transformer.from_pretrained(folder, matrices, seed=seed)
    saved = run / "checkpoints"
    state = load_checkpoint(newest(saved, say)) if checkpoints(saved) else None
    config = config_of_run(run)
    if config.model.lora_rank:
        model = make_model(config, make_tokenizer(config), say=say)
        if state:
            load_trained(model, state["model"])
        else:
            load_peft(model, run / ADAPTER_FILE)
        model = merge_adapters(model)
    elif state:
        model = Transformer(SHAPES.validate_python(state["run"]["shape"]), seed=None)
        model.load_state_dict(state["model"], assign=True)
    else:
        model = Transformer.from_pretrained(run / WEIGHTS)
    model.store(matrices)
    return model


def add_lora(model: Transformer, settings: ModelConfig, seed: int = 0) -> None:
    """Freeze a model and add the adapters of --lora-rank, in place; without it, do nothing."""
    if rank := settings.lora_rank:
        targets = [name.strip() for name in settings.lora_targets.split(",") if name.strip()]
        alpha = settings.lora_alpha or 2.0 * rank
        add_adapters(model, rank=rank, alpha=alpha, targets=targets, seed=seed)


def fit_vocab(model: Transformer, name: str, tokenizer: Tokenizer) -> None:
    """Drop vocabulary padding, because a token that cannot be decoded must never be sampled.

    Raises ConfigError if the tokenizer does not fit the model.
    """
    size, known = model.shape.vocab_size, tokenizer.n_vocab
    if known < size <= known + known // MOST_PADDING:
        model.trim_vocab(known)
    elif size != known:
        raise ConfigError(f"{name} has {size} tokens, --tokenizer {tokenizer.name} has {known}")


def make_reference(config: Config, learner: Learner, tokenizer: Tokenizer) -> FrozenModel | None:
    """The reference of --kl-coef: that of --reference, or the learner's model as it is now."""
    if not config.loss.kl_coef or config.supervised:
        return None
    return make_frozen(config, learner, tokenizer, "--reference", config.loss.reference or INITIAL)


def make_frozen(
    config: Config, learner: Learner, tokenizer: Tokenizer, flag: str, name: str
) -> FrozenModel | None:
    """The reference or the teacher: a model by its name, or by one of OWN. None without a name.

    INITIAL is a frozen copy of what is not trained yet. Of a model with adapters it shares all
    weights, and the adapters are off. Raises ConfigError for a model with another tokenizer.
    """
    if not name:
        return None
    if name not in OWN:
        found = load_frozen(config, learner.device, learner.warn, name)
        if found.tokenizer.fingerprint != tokenizer.fingerprint:
            raise ConfigError(f"{flag} {name}: its tokenizer is not that of --model")
        found.tokenizer = tokenizer  # the same, with the chat template of the prompts
        return found
    shares_weights = name == SELF or config.model.lora_rank > 0
    if name == SELF:
        model = learner.model
    elif shares_weights:
        model = sharing_weights(learner.model)
        disable_adapters(model)
    else:
        copied = copy.deepcopy(learner.model).requires_grad_(False)
        model = low_precision_copy(config.speed, copied)
    return FrozenModel(
        model,
        tokenizer,
        packing=PACKINGS[config.speed.packing],
        name=f"{flag} {name}",
        backoff=learner.backoff,
        autocast=learner.autocast,
        offload=config.memory.offload_reference and not shares_weights,
    )


def load_frozen(config: Config, device: torch.device, warn: Say, name: str) -> FrozenModel:
    """A model that a reward asks, or --reference, with its own tokenizer. Raises ConfigError."""
    own, template = own_tokenizer(name)
    tokenizer = load_tokenizer(own, template or None)
    stored = config.model.base_dtype
    model = load_model(name, task=config.task.name, say=warn, matrices=stored)
    fit_vocab(model, name, tokenizer)
    model = low_precision_copy(config.speed, model.to(device).requires_grad_(False))
    return FrozenModel(
        model,
        tokenizer,
        packing=PACKINGS[config.speed.packing],
        name=name,
        backoff=OOMBackoff(name, "--micro-batch-size", config.memory.micro_batch_size, warn),
        autocast=partial(autocast, config.speed, device),
        offload=config.memory.offload_reference,
    )


# --- loss and rewards -----------------------------------------------------------------------------


def make_loss(config: Config, objects: Objects = NO_OBJECTS) -> LossSpec:
    """The loss of --loss: a row of the table, or a function or LossSpec of the user's.

    A file is run: trust it. Raises ConfigError.
    """
    given = objects.get(config, "loss")
    if not isinstance(given, str) or given in LOSS_NAMES:
        return loss_spec(given)
    file, _, name = given.rpartition(":")
    return loss_spec(load_name(f"--loss {given}", file, name))


def make_scorer(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    device: torch.device,
    warn: Say = nothing,
    objects: Objects = NO_OBJECTS,
) -> RewardScorer:
    """The scorer of the task's reward functions and those of --rewards.

    Raises ConfigError, also where all weights are 0, so that nothing would be learnt.
    """
    scorer = RewardScorer(
        task,
        weights=config.task.reward_weights,
        functions=objects.functions(config),
        workers=config.speed.num_reward_workers if config.speed.parallel_rewards else 0,
        warn=warn,
        tokenizer=tokenizer,
        token_model=cache(partial(load_frozen, config, device, warn)),
    )
    loss = config.loss  # a KL and a teacher teach alone, and a loss of the user's may
    learns = any(scorer.weights.values()) or loss.overlong == "punish" or loss.kl_coef
    if not (learns or loss.teacher or config.supervised or loss.name not in LOSS_NAMES):
        raise ConfigError("no reward: give --rewards functions, or a --reward-weights above 0")
    return scorer
