"""Build the parts of a run from its config, for the trainer, the tools and the benchmarks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from .config import LOSS_NAMES, Config
from .environments import Begun, World, load_name
from .evaluate import held_out
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
from .run.checkpoint import checkpoints, load_checkpoint, newest
from .run.console import Console
from .run.run_dir import RECORD
from .run.samples import digest
from .runtime.device import autocast, low_precision_copy, sharing_weights
from .runtime.guard import OOMBackoff
from .runtime.rng import stream
from .sampling.generate import Sampler
from .task import Task
from .tasks.base import load_task, shipped_model
from .types import ConfigError

PYTHON = "python:"  # begins a setting that stands for an object of the caller's
CHESS = "chess"  # the tokenizer of models that bring none
CHESS_FILES = (".pgn", ".pgn.gz", ".txt")  # --task auto: what only chess-env reads
# Published models pad their vocabulary to a round number: accept up to 1 / MOST_PADDING more tokens
# than the tokenizer has.
MOST_PADDING = 8
MODELS = "model", "reference", "teacher"  # the settings that name models
SELF, INITIAL = "self", "initial"  # the model that is trained, as a frozen one
CHECKED = 16  # examples of each split that are encoded before a run starts, and 4 x of the longest


def config_of_run(run: str | Path) -> Config:
    """The settings of a run's folder. Raises ConfigError."""
    return Config.from_toml(Path(run) / RECORD)


# --- what a caller gives as objects ---------------------------------------------------------------


def as_objects(**given: Any) -> dict[str, Any]:
    """Python objects in place of names and files, by the name of the setting; None is left out.

    Args:
        given: `model`, a Transformer; `data` and `eval_data`, rows; `task`, a class or an object;
            `rewards`, functions; `loss`, a function of LossInputs or a LossSpec; `environment`, see
            `World.of`.
    """
    found = {name: x for name, x in given.items() if x is not None}
    for name in {"data", "eval_data"} & found.keys():
        found[name] = [dict(row) for row in found[name]]  # anything that yields mappings
    world = found.get("environment")
    if world is not None and not isinstance(world, World):
        found["environment"] = World.of(world)
    if functions := found.pop("rewards", None):
        several = [functions] if callable(functions) else functions
        found["rewards"] = [
            x if isinstance(x, RewardFunction) else RewardFunction(x) for x in several
        ]
    return found


def settings_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """A text for each object, which a resumed run compares as the setting of this name."""
    found = {}
    for name, value in objects.items():
        if isinstance(value, Transformer):  # it may have been trained since
            value = [f"{x.cpu().double().norm():.10g}" for x in value.parameters()]
        if name == "rewards":
            text = ",".join(f"{function.weight:g} x {function.name}" for function in value)
        elif isinstance(value, list):
            text = digest(value)
        else:
            text = getattr(value, "__name__", type(value).__name__)
        found[name] = PYTHON + text
    return found


# --- what names stand for -------------------------------------------------------------------------


def resolve(
    config: Config, objects: Mapping[str, Any] | None = None, models: Sequence[str] = MODELS
) -> Config:
    """The config with what names stand for now, so that a resumed run gets the same files.

    ORG/NAME gets the commit on the Hub; --tokenizer auto becomes the model's own tokenizer and chat
    template; --task auto becomes a task. Objects get a text that stands for them.

    Args:
        models: the settings whose models are needed.
    """
    config = config.replace(**settings_of(objects or {}))
    if config.task.name == "auto":
        config = config.replace(**task_of(Parts(config, objects=objects)))
    flat = config.flat()
    config = config.replace(**{name: pinned(flat[name]) for name in models})
    if config.model.tokenizer != "auto":
        return config
    tokenizer, template = own_tokenizer(config.model.name)
    return config.replace(tokenizer=tokenizer, chat_template=config.model.chat_template or template)


def task_of(parts: "Parts") -> dict[str, Any]:
    """The settings that --task auto stands for: `prompts` for rows, else `chess-env`.

    With reward functions of the caller's, nothing that is built in is paid.
    """
    task, functions, world = parts.config.task, parts.functions, parts.world
    files = task.data or task.eval_data
    if world or (files and not files.endswith(CHESS_FILES)):
        args = {"judge": "none"} if functions or (world and world.parts) else {}
        return {"task": "prompts", "task_args": {**args, **task.task_args}}
    weights = {function.name: function.weight for function in functions}
    return {"task": "chess-env", "reward_weights": task.reward_weights or weights}


def pinned(model: str) -> str:
    """The name of a model, of one on the Hub with its commit."""
    folder = hub_folder(model, weights=False)
    return model if folder == Path(model) else f"{model.partition('@')[0]}@{folder.name}"


def own_tokenizer(model: str) -> tuple[str, str]:
    """The tokenizer of a model, and the chat template of the run that it comes from, or ""."""
    if (Path(model) / RECORD).is_file():
        of_run = config_of_run(model).model
        return of_run.tokenizer, of_run.chat_template
    has_own = (hub_folder(model, weights=False) / "tokenizer.json").is_file()
    return (model if has_own else CHESS), ""


# --- the parts ------------------------------------------------------------------------------------


class Parts:
    """The parts of a run, each made when it is first asked for; bad input raises ConfigError."""

    def __init__(
        self,
        config: Config,
        device: torch.device | str = "cpu",
        console: Console | None = None,
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        """`config`: from `resolve`; `objects`: from `as_objects`."""
        self.config, self.device, self.objects = config, torch.device(device), objects or {}
        self.console = console or Console(quiet=True)
        self.autocast: Callable[[], Any] = partial(autocast, config.speed, self.device)

    def get(self, name: str) -> Any:
        """The object of this name, or else the setting. Raises ConfigError for one that is gone."""
        if name in self.objects:
            return self.objects[name]
        setting = self.config.flat()[name]
        if setting.startswith(PYTHON):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} {setting}: run the script that gave it, or give --{flag} a name or file"
            )
        return setting

    @cached_property
    def world(self) -> World | None:
        """The environments and tools, of the caller's or of --environment."""
        found = self.get("environment")
        return World.of(found) if found and isinstance(found, str) else found or None

    @cached_property
    def functions(self) -> Sequence[RewardFunction]:
        """The caller's reward functions, or those of --rewards."""
        found = self.get("rewards")
        return load_rewards(found) if isinstance(found, str) and found else found

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """That of --tokenizer, with --chat-template and --system."""
        model = self.config.model
        return load_tokenizer(model.tokenizer, model.chat_template or None, self.config.task.system)

    @cached_property
    def task(self) -> Task:
        """The task of --task, --data and --eval-data."""
        settings, seed, world = self.config.task, self.config.run.seed, self.world
        task = load_task(
            self.get("task"),
            seed=seed,
            data=self.get("data"),
            eval_data=self.get("eval_data"),
            chat=bool(settings.system),
            environment=world,
            args=settings.task_args,
        )
        if not world and (task.environment or task.tools):
            world = World.of(task.environment, task.tools)
        return cast(Task, Begun(task, world, seed)) if world else task

    def check_examples(self) -> None:
        """Raise ConfigError for examples that do not fit the model, before a run gets to them."""
        config, task, tokenizer = self.config, self.task, self.tokenizer
        if config.task.eval_data and not config.task.data:
            raise ConfigError("--eval-data needs --data, the files to train on")
        context = self.model.shape.context
        examples = [task.train(i) for i in range(CHECKED)]
        examples += [*held_out(task, CHECKED), *task.longest(4 * CHECKED)]
        field = config.loss.teacher_context
        read = [with_context(tokenizer, example, field) for example in examples] if field else []
        encode_prompts(tokenizer, examples + read, context - config.sampling.max_new_tokens)
        if config.supervised:
            encode_pairs(tokenizer, examples, context)
            if not any(example.answer for example in examples):
                raise ConfigError("--loss nll learns true answers, and these examples have none")

    @cached_property
    def loss(self) -> LossSpec:
        """The loss of --loss: a row of the table, or a function or LossSpec of the user's.

        A file is run: trust it.
        """
        given = self.get("loss")
        if isinstance(given, str) and given not in LOSS_NAMES:
            given = load_name("--loss", given)
        return loss_spec(given)

    @cached_property
    def scorer(self) -> RewardScorer:
        """The scorer of the task's reward functions and those of --rewards.

        Where all weights are 0, so that nothing would be learnt, it is an error.
        """
        speed, loss = self.config.speed, self.config.loss
        scorer = RewardScorer(
            self.task,
            weights=self.config.task.reward_weights,
            functions=self.functions,
            workers=speed.num_reward_workers if speed.parallel_rewards else 0,
            warn=self.console.warn,
            tokenizer=self.tokenizer,
            token_model=cache(self.frozen),
        )
        # a KL and a teacher teach alone, and a loss of the user's may
        learns = any(scorer.weights.values()) or loss.overlong == "punish" or loss.kl_coef
        if not (learns or loss.teacher or self.config.supervised or loss.name not in LOSS_NAMES):
            raise ConfigError("no reward: give --rewards functions, or a --reward-weights above 0")
        return scorer

    @cached_property
    def sampler(self) -> Sampler:
        """The model, ready to sample from."""
        warn = self.console.warn
        return Sampler(self.config, self.model, self.tokenizer, self.autocast, warn, self.task)

    # --- models -----------------------------------------------------------------------------------

    @cached_property
    def model(self) -> Transformer:
        """The model that --model names, with --lora-rank, on the device."""
        settings, seed, model = self.config.model, self.config.run.seed, self.get("model")
        if model == "scratch":
            model = Transformer(ModelShape(self.tokenizer.n_vocab), seed)
        elif isinstance(model, str):  # without adapters all weights are trained, in float32
            model = self.load(model, settings.base_dtype if settings.lora_rank else "float32")
        fit_vocab(model, f"--model {settings.name}", self.tokenizer)
        rank, alpha, targets = settings.lora_rank, settings.lora_alpha, settings.lora_targets
        add_adapters(model, rank, alpha, targets, int(stream(seed, "adapters").integers(2**32)))
        return model.to(self.device)

    def load(self, name: str, matrices: str = "float32") -> Transformer:
        """A model by what --model names: shipped, a run, a folder or file, or ORG/NAME on the Hub.

        Adapters of a run are merged into its weights.

        Args:
            matrices: a value of --base-dtype, see `Weights.store`.
        """
        if name == "shipped":
            return Transformer.from_pretrained(shipped_model(self.config.task.name), matrices)
        run, say = Path(name), self.console.say
        if not (run / RECORD).is_file():
            folder = hub_folder(name)
            if folder.is_dir() and not any(folder.glob("*.safetensors")):
                say(f"--model {name}: random weights, of the shape in its config.json")
            return Transformer.from_pretrained(folder, matrices, seed=self.config.run.seed)
        saved, config = run / "checkpoints", config_of_run(run)
        state = load_checkpoint(newest(run, say)) if checkpoints(saved) else None
        if state:
            say(f"{name}: the weights of step {state['step']}")
        if config.model.lora_rank:
            model = Parts(config, console=self.console).model
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

    @cached_property
    def reference(self) -> FrozenModel | None:
        """The reference of --kl-coef: that of --reference, or the model as it is now."""
        if not self.config.loss.kl_coef or self.config.supervised:
            return None
        return self.frozen(self.config.loss.reference or INITIAL, "--reference")

    @cached_property
    def teacher(self) -> FrozenModel | None:
        """The model of --teacher."""
        name = self.config.loss.teacher
        return self.frozen(name, "--teacher") if name else None

    def frozen(self, name: str, flag: str = "") -> FrozenModel:
        """A reference, a teacher or a model that a reward asks, by its name; or SELF, or INITIAL.

        That is a frozen copy of what is not trained yet. Of a model with adapters it shares all
        weights, and the adapters are off.

        Args:
            flag: that names the model; then its tokenizer must be that of --model, and its prompts
                are those of --model too.
        """
        config, tokenizer = self.config, self.tokenizer
        own = name if flag else ""  # a reward asks none of the run's own
        shares_weights = own == SELF or (own == INITIAL and config.model.lora_rank > 0)
        if own == SELF:
            model = self.model
        elif own == INITIAL:
            model = (sharing_weights if shares_weights else copy.deepcopy)(self.model)
            if shares_weights:  # else adapters, if there are any, belong to the start
                disable_adapters(model)
        else:
            source, template = own_tokenizer(name)
            tokenizer = load_tokenizer(source, template or None)
            model = self.load(name, config.model.base_dtype).to(self.device)
            fit_vocab(model, name, tokenizer)
        if not shares_weights:
            model = low_precision_copy(config.speed, model.requires_grad_(False))
        if flag and tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"{flag} {name}: its tokenizer is not that of --model")
        name = f"{flag} {name}".strip()
        return FrozenModel(
            model,
            self.tokenizer if flag else tokenizer,
            packing=PACKINGS[config.speed.packing],
            name=name,
            backoff=OOMBackoff(
                name, "--micro-batch-size", config.memory.micro_batch_size, self.console.warn
            ),
            autocast=self.autocast,
            offload=config.memory.offload_reference and not shares_weights,
        )


def fit_vocab(model: Transformer, name: str, tokenizer: Tokenizer) -> None:
    """Drop vocabulary padding, because a token that cannot be decoded must never be sampled.

    Raises ConfigError if the tokenizer does not fit the model.
    """
    size, known = model.shape.vocab_size, tokenizer.n_vocab
    if known < size <= known + known // MOST_PADDING:
        model.trim_vocab(known)
    elif size != known:
        raise ConfigError(f"{name} has {size} tokens, --tokenizer {tokenizer.name} has {known}")
