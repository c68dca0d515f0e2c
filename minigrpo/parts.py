"""The parts of a run from its config, for the trainer, the tools and the benchmarks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import LOSS_NAMES, Config
from .errors import collecting, refuse_rows
from .evaluate import held_out
from .identity import Contents, checksum, contents_of, digest
from .losses import LossInputs, LossSpec, Term, loss_spec
from .model import lora
from .model.encoding import check_prompt, encode_answer, messages_of, template_args
from .model.frozen_model import FrozenModel, with_context
from .model.hf import SHAPES, WEIGHTS, base_of, hub_folder, lineage, read_model_shape
from .model.packing import PACKINGS
from .model.tokenizer import Tokenizer, load_tokenizer
from .model.transformer import ModelShape, Transformer
from .rewards import RewardFunction, RewardScorer, load_rewards, named_apart
from .run.checkpoint import checkpoints, load_checkpoint, newest
from .run.console import Console
from .run.run_dir import RECORD, recorded_checksums
from .runtime.device import Precision, low_precision_copy
from .runtime.guard import NonFiniteGuard, OOMBackoff
from .runtime.rng import stream
from .runtime.watchdog import Watchdog
from .sampling.sampler import Sampler
from .task import Task
from .tasks.base import load_task, shipped_model
from .tasks.data import rows_of
from .turns.dialogues import Dialogues
from .turns.environments import EnvironmentSet, TurnTask
from .types import ConfigError, Example
from .userfiles import defined_in, files_read, load_name, script_read

FROM_PYTHON = "python:"  # begins a setting that stands for an object of the caller's
SELF, INITIAL = "self", "initial"  # the model that is trained, as a frozen one
CHECKED = 16  # examples of each split that a run makes before it starts, and checks


@dataclass(frozen=True)
class Given:
    """Python objects in place of names and files, by the name of the setting; None: a setting."""

    model: Transformer | None = None
    data: Sequence[Mapping[str, Any]] | None = None
    eval_data: Sequence[Mapping[str, Any]] | None = None
    task: type[Task] | Task | None = None
    rewards: Sequence[RewardFunction] | None = None
    loss: LossSpec | Callable[[LossInputs], Term] | None = None
    environment: EnvironmentSet | None = None

    @classmethod
    def of(cls, **objects: Any) -> "Given":
        """Objects in the forms that `minigrpo.train` takes. Raises ConfigError."""
        given = {name: value for name, value in objects.items() if value is not None}
        if not isinstance(given.get("model"), Transformer | None):
            raise ConfigError("model: no minigrpo.Transformer; save_pretrained(FOLDER), give that")
        for name in {"data", "eval_data"} & given.keys():
            given[name] = rows_of(name, given[name])
        rewards = given.pop("rewards", ())
        several = [rewards] if callable(rewards) else rewards
        functions = named_apart(
            x if isinstance(x, RewardFunction) else RewardFunction(x) for x in several
        )
        environment = given.get("environment")
        if not isinstance(environment, EnvironmentSet | None):
            given["environment"] = EnvironmentSet.of(environment)
        return cls(**given, rewards=functions or None)

    @property
    def objects(self) -> dict[str, Any]:
        """The objects that are given, by setting."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @cached_property
    def rows(self) -> dict[str, Contents]:
        """What the rows say, by setting."""
        return {x: contents_of(self.objects[x]) for x in ("data", "eval_data") if x in self.objects}

    @property
    def code(self) -> dict[str, str]:
        """A digest of all that the other objects say and do, by setting."""
        others = self.objects.keys() - {"model", "data", "eval_data"}
        return {f"code of {name}": digest(self.objects[name]) for name in sorted(others)}

    def as_settings(self) -> dict[str, str]:
        """A text for each object, which a resumed run compares as the setting of this name."""
        others = self.objects.keys() - self.rows.keys()
        texts = {name: described(self.objects[name]) for name in others}
        texts |= {name: contents.digest for name, contents in self.rows.items()}
        return {name: FROM_PYTHON + text for name, text in texts.items()}


def described(value: Any) -> str:
    """The names that tell an object of `Given` from others; of a model its weights."""
    if isinstance(value, Transformer):
        return checksum(dict(value.named_parameters()))
    if isinstance(value, EnvironmentSet):
        return ",".join([*value.kinds, *value.tools])
    if isinstance(value, LossSpec):
        return ",".join(described(x) if callable(x) else str(x) for x in vars(value).values())
    if isinstance(value, partial):
        return f"{described(value.func)} {digest([value.args, value.keywords])}"
    if isinstance(value, list):
        return ",".join(f"{function.weight:g} x {function.name}" for function in value)
    return getattr(value, "__name__", type(value).__name__)


def own_tokenizer(model: str) -> dict[str, Any]:
    """The settings that a model brings: `tokenizer`; of a run also its template and its args."""
    for name, folder in lineage(model):
        if (folder / RECORD).is_file():
            of_run = Config.from_toml(folder / RECORD).model
            return {x: getattr(of_run, x) for x in ("tokenizer", "chat_template", "chat_args")}
        if (folder / "tokenizer.json").is_file():
            return {"tokenizer": name}
    return {"tokenizer": "chess"}


def shape_by_name(name: str, task: str) -> ModelShape:
    """The shape of a model by what --model names, without reading weights. Raises ConfigError."""
    *_, (base, folder) = lineage(name)
    return read_model_shape(shipped_model(task) if base == "shipped" else folder)


def load_model(name: str, config: Config, console: Console, matrices: str) -> Transformer:
    """A model by what --model names; adapters, of a run or of PEFT's, are merged into its weights.

    `config`: has the task for which a model is shipped, and the seed of random weights; `matrices`:
    a value of --base-dtype, see `Weights.store`.
    """
    if name == "shipped":
        return Transformer.from_pretrained(shipped_model(config.task.name), matrices)
    folder = hub_folder(name)
    bases = [each for each, _ in lineage(name)][1:]
    if (folder / RECORD).is_file():
        model = load_model_of_run(folder, console)
    elif bases:
        model = load_model(bases[0], config, console, "float32")
        lora.attach_peft(model, folder)
        console.say(f"{name}: adapters of {lora.peft_settings(model)} are merged into {bases[0]}")
    else:
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            console.say(f"--model {name}: random weights, of the shape in its config.json")
        return Transformer.from_pretrained(folder, matrices, seed=config.run.seed)
    lora.merge_adapters(model).store(matrices)
    return model


def load_model_of_run(run: Path, console: Console) -> Transformer:
    """The model of a run's newest checkpoint, or its last files; adapters beside their base."""
    config = Config.from_toml(run / RECORD)
    state = None
    if checkpoints(run / "checkpoints"):
        state = load_checkpoint(newest(run, console.say))
        console.say(f"{run}: the weights of step {state['step']}")
    if config.model.lora_rank:
        parts = Parts(config, console=console)
        parts.checksums |= recorded_checksums(run)
        model = parts.model
        if state is None:
            lora.load_peft(model, run)
        else:
            lora.load_trained(model, state["model"])
    elif state is None:
        model = Transformer.from_pretrained(run / WEIGHTS)
    else:
        model = Transformer(SHAPES.validate_python(state["run"]["shape"]), seed=None)
        model.load_state_dict(state["model"], assign=True)
    return model


def fit_vocab(model: Transformer, name: str, tokenizer: Tokenizer) -> None:
    """Drop vocabulary padding: what cannot be decoded must never be sampled. Raises ConfigError.

    Special tokens at the end may have no row, as Gemma's for images.
    """
    size, known = model.shape.vocab_size, tokenizer.n_vocab
    if known < size <= known * 9 / 8:  # published ones are padded to a round number
        model.trim_vocab(known)
    elif size > known or not {*range(size, known)} <= {*tokenizer.special.values()}:
        raise ConfigError(f"{name} has {size} tokens, --tokenizer {tokenizer.name} has {known}")


class Parts:
    """The parts of a run, each made when it is first asked for; bad input raises ConfigError."""

    def __init__(
        self,
        config: Config,
        device: torch.device | str = "cpu",
        console: Console | None = None,
        given: Given | None = None,
        folder: Path | None = None,
    ) -> None:
        """`config`: from `resolve`; `given`: the caller's objects; `folder`: that of the run."""
        self.config = config
        self.device = torch.device(device)
        self.console = console or Console(quiet=True)
        self.given = given or Given()
        self.watchdog = Watchdog(folder and folder / "hung_calls.jsonl")
        self.precision = Precision(config.speed, self.device, NonFiniteGuard())
        # checksums of the models that a resume loads again, by name: see `recognise`
        self.checksums: dict[str, str] = {}

    def asked(self, name: str) -> Any:
        """The caller's object for a setting, or its text. Raises ConfigError for objects gone."""
        given = getattr(self.given, name)
        value = self.config.flat()[name]
        if given is None and value.startswith(FROM_PYTHON):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: run the script that gave it, or name a file")
        return value if given is None else given

    @cached_property
    def own_environments(self) -> EnvironmentSet | None:
        """The environments and tools of the caller, or of --environment."""
        asked = self.asked("environment") or None
        return EnvironmentSet.load(asked) if isinstance(asked, str) else asked

    @cached_property
    def functions(self) -> Sequence[RewardFunction]:
        """The reward functions of the caller, or of --rewards."""
        asked = self.asked("rewards") or ()
        return load_rewards(asked) if isinstance(asked, str) else asked

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of --tokenizer, with --chat-template, --chat-args and --system."""
        model = self.config.model
        system = self.config.task.system
        return load_tokenizer(model.tokenizer, model.chat_template, system, model.chat_args)

    @cached_property
    def plain_task(self) -> Task:
        """The task of --task, --data and --eval-data, without its environments."""
        settings = self.config.task
        return load_task(
            self.asked("task"),
            seed=self.config.run.seed,
            data=self.asked("data"),
            eval_data=self.asked("eval_data"),
            chat=bool(settings.system),
            environment=self.own_environments,
            args=settings.task_args,
        )

    @cached_property
    def environments(self) -> EnvironmentSet | None:
        """The environments of the caller, or else those of the task."""
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
        """A row of the table, or a function or LossSpec of the user's."""
        asked = self.asked("loss")
        is_in_file = isinstance(asked, str) and asked not in LOSS_NAMES
        return loss_spec(load_name("--loss", asked) if is_in_file else asked)

    @cached_property
    def scorer(self) -> RewardScorer:
        """The scorer of the task and of --rewards. Raises ConfigError if they pay for nothing."""
        speed = self.config.speed
        loss = self.config.loss
        scorer = RewardScorer(
            self.task,
            weights=self.config.task.reward_weights,
            functions=self.functions,
            environments=self.environments.parts if self.environments else {},
            workers=speed.num_reward_workers if speed.parallel_rewards else 1,
            watchdog=self.watchdog,
            warn=self.console.warn,
            tokenizer=self.tokenizer,
            token_model=cache(self.frozen),
        )
        is_paid = any(scorer.weights.values()) or loss.overlong == "punish"
        teaches_alone = loss.kl_coef or loss.teacher or loss.name not in LOSS_NAMES
        if not (is_paid or teaches_alone or self.config.supervised):
            raise ConfigError("no reward: give --rewards functions, or a --reward-weights above 0")
        return scorer

    def check_examples(self) -> None:
        """Raise ConfigError for examples that do not fit the model, before a run gets to them."""
        settings = self.config.task
        if settings.eval_data and not settings.data:
            raise ConfigError("--eval-data needs --data, the files to train on")
        task = self.task
        examples = list[Example]()
        errors = list[str]()
        with self.console.bar("checking rows", task.num_known) as advance:
            for number in range(task.num_known):
                with collecting(errors):
                    example = task.known(number)
                    if example.prompt or example.messages:  # else its environment asks
                        self._check_fit(example)
                    examples.append(example)
                advance()
        refuse_rows(errors, task.num_known)
        made = [*map(task.train, range(CHECKED)), *held_out(task, CHECKED)]
        for example in made:
            self._check_fit(example)
        self._warn_of([*examples, *made])

    def _check_fit(self, example: Example) -> None:
        """Raise ConfigError for an example that does not fit the model, or the teacher."""
        tokenizer = self.tokenizer
        context = self.model.shape.context
        room = context - self.config.sampling.max_new_tokens
        if field := self.config.loss.teacher_context:
            check_prompt(tokenizer, with_context(tokenizer, example, field), room)
        if self.config.supervised:
            if not example.answer:
                raise ConfigError(f"{example.label} has no answer, which --loss nll learns")
            room = min(room, context - len(encode_answer(tokenizer, example, context)))
        check_prompt(tokenizer, example, room)

    def _warn_of(self, examples: Sequence[Example]) -> None:
        """Say what is plausible in examples, and does something else or nothing."""
        tokenizer = self.tokenizer
        for example in examples:
            if messages_of(tokenizer, example):  # of these it is an error
                continue
            spelled = [token for token in tokenizer.special if token in example.prompt]
            if spelled:
                said = "stays text. Give messages: the chat template writes its tokens"
                self.console.warn(f"{example.label}: {spelled[0]} in the prompt {said}")
                break
        given = {name for example in examples for name in template_args(example)}
        given |= self.config.model.chat_args.keys()
        if tokenizer.chat and (unread := given - tokenizer.chat.variables):
            said = f"{tokenizer.chat.name} never reads {', '.join(sorted(unread))}"
            self.console.warn(f"--chat-args, chat_template_kwargs: {said}")
        for name, contents in self.given.rows.items():
            for kind in sorted(contents.unread):
                said = f"holds a {kind}, in which a resume cannot see changes"
                self.console.warn(f"{name} {said}")

    def digests(self) -> dict[str, str]:
        """What all processes must have alike."""
        examples = [self.task.train(i) for i in range(CHECKED)]
        examples += map(self.task.known, range(self.task.num_known))
        return {
            "rows": digest([self.task.about, examples]),
            "rewards": digest([self.scorer.names, self.scorer.weights]),
            "code": digest([*map(defined_in, self._users_code())]),
            "tokenizer": self.tokenizer.fingerprint,
            **{f"the weights of {name}": found for name, found in self.checksums.items()},
            **files_read(),
            **script_read(),
        }

    def _users_code(self) -> list[Any]:
        """The functions and classes that users may give.

        Processes compare the contents of their files: paths may differ, as may what is computed in
        a file, such as a rank or a device.
        """
        environments = self.environments or EnvironmentSet.of()
        return [
            *(function.function for function in self.functions),
            *(self.loss.ratio, self.loss.surrogate, self.loss.weights),
            type(getattr(self.plain_task, "source", self.plain_task)),
            *(kind.make for kind in environments.kinds.values()),
            *(tool.function for tool in environments.tools.values()),
        ]

    def recognise(self, name: str, parameters: Mapping[str, Tensor]) -> None:
        """Take the checksum of weights that are not in checkpoints: a resume loads them again.

        Raises ConfigError if a run had other weights under this name: see `run_dir.RunDir.open`.
        """
        found = checksum(parameters)
        if self.checksums.setdefault(name, found) != found:
            raise ConfigError(f"{name}: its weights are not those that the run began with")

    @cached_property
    def base(self) -> str:
        """--model; or if PEFT's adapters there are like those of --lora-rank etc., their base."""
        settings = self.config.model
        name = settings.name
        base = base_of(hub_folder(name, weights=False))
        if not (base and settings.lora_rank) or (Path(name) / RECORD).is_file():
            return name
        shape = shape_by_name(base, self.config.task.name)
        there, wanted = Transformer(shape, seed=None), Transformer(shape, seed=None)
        lora.attach_peft(there, hub_folder(name))
        lora.add_adapters(wanted, settings.lora_rank, settings.lora_alpha, settings.lora_targets)
        forms = [(lora.peft_names(model), lora.peft_settings(model)) for model in (there, wanted)]
        return base if forms[0] == forms[1] else name

    @cached_property
    def model(self) -> Transformer:
        """The model that --model names, with --lora-rank, on the device."""
        settings = self.config.model
        # without adapters all weights are trained, in float32
        matrices = settings.base_dtype if settings.lora_rank else "float32"
        asked = self.asked("model")
        if isinstance(asked, Transformer):
            model = asked
            if settings.lora_rank:  # it gets new ones
                lora.merge_adapters(model)
            if not lora.adapters(model):
                model.store(matrices)
        elif settings.name == "scratch":
            model = Transformer(ModelShape(self.tokenizer.n_vocab), self.config.run.seed)
        else:
            model = load_model(self.base, self.config, self.console, matrices)
        fit_vocab(model, f"--model {settings.name}", self.tokenizer)
        if self.base != settings.name:
            lora.attach_peft(model, hub_folder(settings.name))
            self.console.say(f"--model {settings.name}: its adapters are trained on")
        else:
            seed = int(stream(self.config.run.seed, "adapters").integers(2**32))
            kind = settings.lora_rank, settings.lora_alpha, settings.lora_targets
            lora.add_adapters(model, *kind, seed)
        model = model.to(self.device)
        # A checkpoint has what is trained. A resume loads the rest again, or, if a frozen model is
        # a copy of the start, all of it.
        loss = self.config.loss
        is_copied = INITIAL in (loss.teacher, self._reference_name)
        again = {n: p for n, p in model.named_parameters() if is_copied or not p.requires_grad}
        if again and settings.name != "scratch":  # random numbers may differ in their last bits
            self.recognise(f"--model {settings.name}", again)
        return model

    @property
    def _reference_name(self) -> str:
        """The model of the KL, as `frozen` takes it; "" if there is no KL."""
        settings = self.config.loss
        has_kl = settings.kl_coef and not self.config.supervised
        return (settings.reference or INITIAL) if has_kl else ""

    @cached_property
    def sampler(self) -> Sampler:
        """The model, ready to sample from, for the examples of the task."""
        dialogues = None
        if self.environments is not None:
            dialogues = Dialogues(
                self.config, self.environments, self.tokenizer, self.console.warn, self.watchdog
            )
        return Sampler(
            self.config,
            self.model,
            self.tokenizer,
            autocast=self.precision.autocast,
            warn=self.console.warn,
            speculate=self.task.speculate,
            dialogues=dialogues,
        )

    @cached_property
    def reference(self) -> FrozenModel | None:
        """The reference of --kl-coef: that of --reference, or the model as it is now."""
        name = self._reference_name
        return self.frozen(name, "--reference") if name else None

    @cached_property
    def teacher(self) -> FrozenModel | None:
        """The model of --teacher."""
        name = self.config.loss.teacher
        return self.frozen(name, "--teacher") if name else None

    def frozen(self, name: str, flag: str = "") -> FrozenModel:
        """The model that a flag names, or a reward, for which it has its own tokenizer.

        SELF is the model that is trained, as it is when it is asked; INITIAL is a copy of it as it
        is now, which shares all weights but those of adapters; others are named as for --model.
        """
        config = self.config
        tokenizer = self.tokenizer
        label = f"{flag} {name}".strip()
        shares_weights = name == SELF
        if name == SELF:
            model = self.model
        elif name == INITIAL and config.model.lora_rank:
            model = self.model.sharing_weights()
            lora.freeze_adapters(model)
            shares_weights = True
        elif name == INITIAL:
            model = copy.deepcopy(self.model)
        else:
            brought = own_tokenizer(name)
            own = load_tokenizer(brought.pop("tokenizer"), **brought)
            model = load_model(name, config, self.console, config.model.base_dtype).to(self.device)
            fit_vocab(model, name, own)
            if not flag:
                tokenizer = own
            elif own.vocabulary != tokenizer.vocabulary:
                raise ConfigError(f"{label}: its tokenizer is not that of --model")
            self.recognise(label, dict(model.named_parameters()))
        if not shares_weights:
            model = low_precision_copy(config.speed, model.requires_grad_(False))
        size, warn = config.memory.micro_batch_size, self.console.warn
        return FrozenModel(
            model,
            tokenizer,
            packing=PACKINGS[config.speed.packing],
            name=label,
            run_in_parts=OOMBackoff(label, "--micro-batch-size", size, warn).run,
            autocast=self.precision.autocast,
            offload=config.memory.offload_reference and not shares_weights,
        )
