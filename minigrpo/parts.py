"""The parts of a run from its config, for the trainer, the tools and the benchmarks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from .config import LOSS_NAMES, Config
from .losses import LossInputs, LossSpec, Term, loss_spec
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
from .runtime.device import Precision, low_precision_copy
from .runtime.guard import NonFiniteGuard, OOMBackoff
from .runtime.rng import stream
from .sampling.sampler import Sampler
from .task import Task
from .tasks.base import load_task, shipped_model
from .turns.dialogues import Dialogues
from .turns.environments import EnvironmentSet, TurnTask
from .types import ConfigError, digest
from .userfiles import load_name

FROM_PYTHON = "python:"  # begins a setting that stands for an object of the caller's
CHESS = "chess"  # the tokenizer of models that bring none
# Published models pad their vocabulary to a round number: accept up to 1 / MOST_PADDING more tokens
# than the tokenizer has.
MOST_PADDING = 8
SELF, INITIAL = "self", "initial"  # the model that is trained, as a frozen one
CHECKED = 16  # examples of each split that are encoded before a run starts, and 4 x of the longest


# --- what a caller gives --------------------------------------------------------------------------

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Given:
    """Python objects in place of names and files, by the name of the setting; None: a setting."""

    model: Transformer | None = None
    data: Records | None = None
    eval_data: Records | None = None
    task: type[Task] | Task | None = None
    rewards: Sequence[RewardFunction] | None = None
    loss: LossSpec | Callable[[LossInputs], Term] | None = None
    environment: EnvironmentSet | None = None

    @classmethod
    def of(cls, **objects: Any) -> "Given":
        """Objects in the forms in which callers have them. Raises ConfigError.

        `data` and `eval_data` yield mappings; `rewards` is a function or several, decorated or
        plain; for `environment` see `EnvironmentSet.of`.
        """
        given = {name: value for name, value in objects.items() if value is not None}
        for name in {"data", "eval_data"} & given.keys():
            given[name] = [dict(row) for row in given[name]]
        rewards = given.pop("rewards", ())
        several = [rewards] if callable(rewards) else rewards
        functions = [x if isinstance(x, RewardFunction) else RewardFunction(x) for x in several]
        environment = given.get("environment")
        if not isinstance(environment, EnvironmentSet | None):
            given["environment"] = EnvironmentSet.of(environment)
        return cls(**given, rewards=functions or None)

    def as_settings(self) -> dict[str, str]:
        """A text for each object, which a resumed run compares as the setting of this name."""
        objects = {name: value for name, value in vars(self).items() if value is not None}
        return {name: FROM_PYTHON + described(value) for name, value in objects.items()}


NOTHING_GIVEN = Given()


def described(value: Any) -> str:
    """A text that tells an object of `Given` from others."""
    if isinstance(value, Transformer):  # it may have been trained since
        return digest([f"{x.cpu().double().norm():.10g}" for x in value.parameters()])
    if isinstance(value, EnvironmentSet):
        return value.describe()
    if not isinstance(value, list):
        return getattr(value, "__name__", type(value).__name__)
    if value and isinstance(value[0], RewardFunction):
        return ",".join(f"{function.weight:g} x {function.name}" for function in value)
    return digest(value)


# --- models by name -------------------------------------------------------------------------------


def config_of_run(run: str | Path) -> Config:
    """The settings of a run's folder. Raises ConfigError."""
    return Config.from_toml(Path(run) / RECORD)


def own_tokenizer(model: str) -> tuple[str, str]:
    """The tokenizer of a model, and the chat template of the run that it comes from, or ""."""
    if (Path(model) / RECORD).is_file():
        of_run = config_of_run(model).model
        return of_run.tokenizer, of_run.chat_template
    has_own = (hub_folder(model, weights=False) / "tokenizer.json").is_file()
    return (model if has_own else CHESS), ""


def load_model(name: str, config: Config, console: Console, matrices: str) -> Transformer:
    """A model by what --model names: shipped, a run, a folder or file, or ORG/NAME on the Hub.

    Adapters of a run are merged into its weights.

    Args:
        config: says for which task a model is shipped, and the seed of random weights.
        matrices: a value of --base-dtype, see `Weights.store`.
    """
    if name == "shipped":
        return Transformer.from_pretrained(shipped_model(config.task.name), matrices)
    if (Path(name) / RECORD).is_file():
        model = load_model_of_run(Path(name), console)
        model.store(matrices)
        return model
    folder = hub_folder(name)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        console.say(f"--model {name}: random weights, of the shape in its config.json")
    return Transformer.from_pretrained(folder, matrices, seed=config.run.seed)


def load_model_of_run(run: Path, console: Console) -> Transformer:
    """The model of a run's newest checkpoint, or of the files that it ended with."""
    config = config_of_run(run)
    state = None
    if checkpoints(run / "checkpoints"):
        state = load_checkpoint(newest(run, console.say))
        console.say(f"{run}: the weights of step {state['step']}")
    if config.model.lora_rank:
        model = Parts(config, console=console).model
        if state:
            load_trained(model, state["model"])
        else:
            load_peft(model, run / ADAPTER_FILE)
        return merge_adapters(model)
    if state is None:
        return Transformer.from_pretrained(run / WEIGHTS)
    model = Transformer(SHAPES.validate_python(state["run"]["shape"]), seed=None)
    model.load_state_dict(state["model"], assign=True)
    return model


def fit_vocab(model: Transformer, name: str, tokenizer: Tokenizer) -> None:
    """Drop vocabulary padding, because a token that cannot be decoded must never be sampled.

    Raises ConfigError if the tokenizer does not fit the model.
    """
    size, known = model.shape.vocab_size, tokenizer.n_vocab
    if known < size <= known + known // MOST_PADDING:
        model.trim_vocab(known)
    elif size != known:
        raise ConfigError(f"{name} has {size} tokens, --tokenizer {tokenizer.name} has {known}")


# --- the parts ------------------------------------------------------------------------------------


class Parts:
    """The parts of a run, each made when it is first asked for; bad input raises ConfigError."""

    def __init__(
        self,
        config: Config,
        device: torch.device | str = "cpu",
        console: Console | None = None,
        given: Given = NOTHING_GIVEN,
    ) -> None:
        """`config`: from `resolve`; `given`: the caller's objects."""
        self.config = config
        self.device = torch.device(device)
        self.console = console or Console(quiet=True)
        self.given = given
        self.guard = NonFiniteGuard()
        self.precision = Precision(config.speed, self.device, self.guard)

    def setting(self, name: str) -> str:
        """A setting that names something. Raises ConfigError if it was an object that is gone."""
        value: str = self.config.flat()[name]
        if value.startswith(FROM_PYTHON):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: run the script that gave it, or name a file")
        return value

    # --- what is asked, and what is paid ----------------------------------------------------------

    @cached_property
    def own_environments(self) -> EnvironmentSet | None:
        """The environments and tools of the caller, or of --environment."""
        if self.given.environment is not None:
            return self.given.environment
        setting = self.setting("environment")
        return EnvironmentSet.load(setting) if setting else None

    @cached_property
    def functions(self) -> Sequence[RewardFunction]:
        """The reward functions of the caller, or of --rewards."""
        if self.given.rewards is not None:
            return self.given.rewards
        setting = self.setting("rewards")
        return load_rewards(setting) if setting else ()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """That of --tokenizer, with --chat-template and --system."""
        model = self.config.model
        return load_tokenizer(model.tokenizer, model.chat_template or None, self.config.task.system)

    @cached_property
    def plain_task(self) -> Task:
        """The task of --task, --data and --eval-data, without its environments."""
        given = self.given
        settings = self.config.task
        return load_task(
            self.setting("task") if given.task is None else given.task,
            seed=self.config.run.seed,
            data=self.setting("data") if given.data is None else given.data,
            eval_data=self.setting("eval_data") if given.eval_data is None else given.eval_data,
            chat=bool(settings.system),
            environment=self.own_environments,
            args=settings.task_args,
        )

    @cached_property
    def environments(self) -> EnvironmentSet | None:
        """Those of the caller, or else the task's."""
        task = self.plain_task
        if self.own_environments is None and (task.environment or task.tools):
            return EnvironmentSet.of(task.environment, task.tools)
        return self.own_environments

    @cached_property
    def task(self) -> Task:
        """The task, whose prompts begin in their environments if there are any."""
        if self.environments is None:
            return self.plain_task
        return TurnTask(self.plain_task, self.environments, self.config.run.seed)

    @cached_property
    def loss(self) -> LossSpec:
        """The loss of --loss: a row of the table, or a function or LossSpec of the user's.

        A file is run: trust it.
        """
        if self.given.loss is not None:
            return loss_spec(self.given.loss)
        setting = self.setting("loss")
        return loss_spec(setting if setting in LOSS_NAMES else load_name("--loss", setting))

    @cached_property
    def scorer(self) -> RewardScorer:
        """The scorer of the task's reward functions and those of --rewards.

        Where all weights are 0, so that nothing would be learnt, it is an error.
        """
        speed = self.config.speed
        loss = self.config.loss
        scorer = RewardScorer(
            self.task,
            weights=self.config.task.reward_weights,
            functions=self.functions,
            environments=self.environments.parts if self.environments else {},
            workers=speed.num_reward_workers if speed.parallel_rewards else 0,
            warn=self.console.warn,
            tokenizer=self.tokenizer,
            token_model=cache(self.another_model),
        )
        is_paid = any(scorer.weights.values()) or loss.overlong == "punish"
        teaches_alone = loss.kl_coef or loss.teacher or loss.name not in LOSS_NAMES
        if not (is_paid or teaches_alone or self.config.supervised):
            raise ConfigError("no reward: give --rewards functions, or a --reward-weights above 0")
        return scorer

    def check_examples(self) -> None:
        """Raise ConfigError for examples that do not fit the model, before a run gets to them."""
        config = self.config
        if config.task.eval_data and not config.task.data:
            raise ConfigError("--eval-data needs --data, the files to train on")
        examples = [self.task.train(i) for i in range(CHECKED)]
        num_held_out = min(CHECKED, self.task.num_held_out or CHECKED)
        examples += [self.task.held_out(i) for i in range(num_held_out)]
        examples += self.task.longest(4 * CHECKED)
        context = self.model.shape.context
        field = config.loss.teacher_context
        read = [with_context(self.tokenizer, each, field) for each in examples] if field else []
        encode_prompts(self.tokenizer, examples + read, context - config.sampling.max_new_tokens)
        if config.supervised:
            encode_pairs(self.tokenizer, examples, context)
            if not any(example.answer for example in examples):
                raise ConfigError("--loss nll learns true answers, and these examples have none")

    # --- the model --------------------------------------------------------------------------------

    @cached_property
    def model(self) -> Transformer:
        """The model that --model names, with --lora-rank, on the device."""
        settings = self.config.model
        seed = self.config.run.seed
        if self.given.model is not None:
            model = self.given.model
        elif settings.name == "scratch":
            model = Transformer(ModelShape(self.tokenizer.n_vocab), seed)
        else:  # without adapters all weights are trained, in float32
            matrices = settings.base_dtype if settings.lora_rank else "float32"
            model = load_model(self.setting("model"), self.config, self.console, matrices)
        fit_vocab(model, f"--model {settings.name}", self.tokenizer)
        add_adapters(
            model,
            settings.lora_rank,
            settings.lora_alpha,
            settings.lora_targets,
            seed=int(stream(seed, "adapters").integers(2**32)),
        )
        return model.to(self.device)

    @cached_property
    def sampler(self) -> Sampler:
        """The model, ready to sample from, for the examples of the task."""
        dialogues = None
        if self.environments is not None:
            warn = self.console.warn
            dialogues = Dialogues(self.config, self.environments, self.tokenizer, warn)
        return self._sampler(self.task.speculate, dialogues)

    @cached_property
    def prompt_sampler(self) -> Sampler:
        """The model, ready to complete prompts of one turn, whatever the task is."""
        return self._sampler(speculate=False, dialogues=None)

    def _sampler(self, speculate: bool, dialogues: Dialogues | None) -> Sampler:
        return Sampler(
            self.config,
            self.model,
            self.tokenizer,
            autocast=self.precision.autocast,
            warn=self.console.warn,
            speculate=speculate,
            dialogues=dialogues,
        )

    # --- frozen models ----------------------------------------------------------------------------

    @cached_property
    def reference(self) -> FrozenModel | None:
        """The reference of --kl-coef: that of --reference, or the model as it is now."""
        settings = self.config.loss
        if not settings.kl_coef or self.config.supervised:
            return None
        if not settings.reference:
            return self.initial_copy("--reference")
        return self.another_model(settings.reference, "--reference")

    @cached_property
    def teacher(self) -> FrozenModel | None:
        """The model of --teacher."""
        name = self.config.loss.teacher
        if not name:
            return None
        if name == SELF:
            return self.the_policy_itself()
        if name == INITIAL:
            return self.initial_copy("--teacher")
        return self.another_model(name, "--teacher")

    def the_policy_itself(self) -> FrozenModel:
        """The model that is trained, as it is when it is asked."""
        return self._frozen("--teacher self", self.model, self.tokenizer, shares_weights=True)

    def initial_copy(self, flag: str) -> FrozenModel:
        """A copy of the model as it is now.

        Of a model with adapters it shares all weights, and the adapters are off.
        """
        name = f"{flag} {INITIAL}"
        if not self.config.model.lora_rank:
            return self._frozen(name, copy.deepcopy(self.model), self.tokenizer)
        model = self.model.sharing_weights()
        disable_adapters(model)
        return self._frozen(name, model, self.tokenizer, shares_weights=True)

    def another_model(self, name: str, flag: str = "") -> FrozenModel:
        """A model that a reward asks, with its own tokenizer.

        Args:
            flag: that names it; then it reads what --model reads, and needs the same tokenizer.
        """
        source, template = own_tokenizer(name)
        tokenizer = load_tokenizer(source, template or None)
        model = load_model(name, self.config, self.console, self.config.model.base_dtype)
        fit_vocab(model, name, tokenizer)
        if not flag:
            return self._frozen(name, model.to(self.device), tokenizer)
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ConfigError(f"{flag} {name}: its tokenizer is not that of --model")
        return self._frozen(f"{flag} {name}", model.to(self.device), self.tokenizer)

    def _frozen(
        self, name: str, model: Transformer, tokenizer: Tokenizer, shares_weights: bool = False
    ) -> FrozenModel:
        """`name`: in errors. `shares_weights`: with the model that is trained."""
        config = self.config
        if not shares_weights:
            model = low_precision_copy(config.speed, model.requires_grad_(False))
        size, warn = config.memory.micro_batch_size, self.console.warn
        return FrozenModel(
            model,
            tokenizer,
            packing=PACKINGS[config.speed.packing],
            name=name,
            run_in_parts=OOMBackoff(name, "--micro-batch-size", size, warn).run,
            autocast=self.precision.autocast,
            offload=config.memory.offload_reference and not shares_weights,
        )
