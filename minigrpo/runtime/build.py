"""Build the parts of a run from its config, for the trainer, the tools and the benchmarks."""

import copy
from collections.abc import Callable
from functools import cache, partial

import torch

from ..config import Config
from ..learner import Learner
from ..model.architectures import shape_from_scratch
from ..model.lora import adapters, disable_adapters, merge_adapters
from ..model.packing import PACKINGS
from ..model.shape import ModelShape
from ..model.tokenizer import Tokenizer, load_tokenizer
from ..model.transformer import Transformer
from ..reference import NoReference, Reference
from ..rewards import RewardScorer
from ..tasks.confidence import with_confidence
from ..tasks.files import Listener
from ..tasks.registry import load_rewards, load_task
from ..types import Task
from . import accel
from .base_model import add_lora, base_dtype, model_digest
from .flags import ConfigError
from .frozen_model import FrozenModel
from .oom import OOMBackoff
from .reward_functions import success_among
from .rng import stream, weights_seed
from .text import check_file_name
from .token_rewards import TokenScoring
from .tokenizers import CHESS, own_tokenizer, warn_of_other_tokenizer, with_own_tokenizer
from .trained import load_model

Say = Callable[[str], object]
# Published models pad their vocabulary to a round number: accept up to 1 / MOST_PADDING more tokens
# than the tokenizer has.
MOST_PADDING = 8


def make_tokenizer(config: Config, say: Say = lambda text: None) -> Tokenizer:
    """The tokenizer of --tokenizer, with --chat-template and --system.

    `say` gets a line that names a tokenizer other than the default one, and what its template does.
    Raises ValueError in one line that names flag or file.
    """
    config = with_own_tokenizer(config)
    name, template = config.model.tokenizer, config.model.chat_template
    tokenizer = load_tokenizer(name, template or None)
    if name != CHESS or template:
        chat = "; its chat template writes prompts of messages and with --system, others stay plain"
        own = f" with --chat-template {template}" if template else ""
        say(f"tokenizer: {name}{own}, {tokenizer.n_vocab:,} tokens{chat if tokenizer.chat else ''}")
    return tokenizer.with_system(config.task.system) if config.task.system else tokenizer


def make_task(config: Config, listener: Listener | None = None) -> Task:
    """The task of --task and --data. Raises ValueError in one line that names flag or file."""
    given, seed, chat = config.task, config.run.seed, bool(config.task.system)
    own = {
        "history": given.history,
        "chat": chat,
        "student": given.student,
        "difficulty": given.difficulty,
        "timeout_s": given.reward_timeout,
    }
    task = load_task(given.name, seed=seed, data=given.data, listener=listener, **own)
    if not given.confidence:
        return task
    judge = success_among(load_rewards(given.rewards))
    return with_confidence(task, judge, seed=seed, chat=chat, supervised=config.supervised)


def make_scorer(
    config: Config,
    task: Task,
    warn: Say = lambda text: None,
    token_scoring: TokenScoring | None = None,
) -> RewardScorer:
    """The scorer. Raises ValueError for a bad reward file, or weights of which nothing is learnt.

    With weights of 0 alone all rewards are equal, unless --overlong punish makes them differ.
    Supervised training takes no rewards. With --confidence, the function that is the success judges
    answers within the task.
    """
    functions = load_rewards(config.task.rewards, warn)
    if config.task.confidence:
        functions = [function for function in functions if not function.success]
    scorer = RewardScorer(
        task,
        weights=config.task.weights(),
        functions=functions,
        workers=config.speed.num_reward_workers if config.speed.parallel_rewards else 0,
        timeout_s=config.task.reward_timeout,
        warn=warn,
        token_scoring=token_scoring,
    )
    if not (any(scorer.weights.values()) or config.supervised or config.loss.overlong == "punish"):
        scorer.close()
        raise ConfigError(
            f"--reward-weights: all weights are 0 ({', '.join(scorer.weights)}), so all rewards "
            "would be equal and nothing would be learnt; give a part a weight"
        )
    return scorer


def make_token_scoring(
    config: Config,
    tokenizer: Tokenizer,
    device: torch.device,
    warn: Say = lambda text: None,
    digests: dict[str, str] | None = None,
) -> TokenScoring:
    """What rewards that look at tokens need; it loads nothing before one of them asks.

    `digests` gets one of each model that is loaded, by a name that says where it comes from.
    """
    load = cache(partial(load_frozen, config, device, warn, digests))
    return TokenScoring(tokenizer, device, load)


def load_frozen(
    config: Config, device: torch.device, warn: Say, digests: dict[str, str] | None, name: str
) -> FrozenModel:
    """A model that a reward asks, with its own tokenizer. Raises ConfigError in one line."""
    try:
        check_file_name(name)
        _, model = load_model(name, warn, base_dtype(config.model))
        own, template = own_tokenizer(name)
        tokenizer = load_tokenizer(own or CHESS, template or None)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    model = merge_adapters(model) if adapters(model) else model
    if digests is not None:
        by = "--student" if name == config.task.student else "the model of a reward,"
        digests[f"{by} {name}"] = model_digest(model, tokenizer.fingerprint)
    fit_vocab(model, name, tokenizer, warn)
    model = accel.low_precision_copy(config.speed, model.to(device).requires_grad_(False))
    model.logprob_chunk = accel.logprob_chunk(config.memory, model)
    return FrozenModel(
        model,
        tokenizer,
        name=name,
        packing=PACKINGS[config.speed.packing],
        temperature=config.sampling.temperature,
        backoff=OOMBackoff(name, "--micro-batch-size", config.memory.micro_batch_size, warn),
        autocast=partial(accel.autocast, config.speed, device),
        offload=config.memory.offload_reference,
    )


def make_model(
    config: Config,
    tokenizer: Tokenizer,
    device: torch.device | str = "cpu",
    say: Say = lambda text: None,
    warn: Say = lambda text: None,
) -> Transformer:
    """The model that --init-from names, on a device. Raises ConfigError if it does not fit."""
    sizes = config.model
    if sizes.init_from == "scratch":
        shape = shape_from_scratch(sizes, tokenizer.n_vocab)
        model = Transformer(shape, seed=weights_seed(config.run.seed))
    else:
        try:
            check_file_name(sizes.init_from)
            if not sizes.init_from:
                raise ValueError("must be shipped, scratch, or the path of a model, got nothing")
            # of a run that stopped early, the newest checkpoint is newer than model.safetensors
            name = sizes.init_from
            stored = base_dtype(sizes) if sizes.lora_rank else None  # trained ones are float32
            _, model = load_model(name, say, stored, task=config.task.name)
            if adapters(model):
                model = merge_adapters(model)
        except ValueError as error:
            raise ConfigError(f"--init-from {error}") from None
    match_vocab(model, f"--init-from {sizes.init_from}", config, tokenizer, say)
    warn_of_other_tokenizer(sizes.init_from, tokenizer, warn)
    add_lora(model, sizes, int(stream(config.run.seed, "adapters").integers(2**32)), say)
    model = model.to(device)
    model.logprob_chunk = accel.logprob_chunk(config.memory, model)
    return model


def match_vocab(
    model: Transformer,
    name: str,
    config: Config,
    tokenizer: Tokenizer,
    say: Say = lambda text: None,
) -> None:
    """`fit_vocab`, and raise ConfigError also if --max-new-tokens does not fit the model."""
    fit_vocab(model, name, tokenizer, say)
    check_room(config, model.shape)


def fit_vocab(
    model: Transformer, name: str, tokenizer: Tokenizer, say: Say = lambda text: None
) -> None:
    """Drop vocabulary padding, because a token that cannot be decoded must never be sampled.

    Raises ConfigError if the tokenizer does not fit the model.
    """
    size, known, flag = model.shape.vocab_size, tokenizer.n_vocab, tokenizer.name
    if lost := [stop for stop in tokenizer.unknown_stops if known <= stop < size]:
        raise ConfigError(
            f"{name}: its token {min(lost)} ends a text (eos_token_id), but --tokenizer {flag} "
            f"has {known} tokens only"
        )
    if size != known and is_padded(size, known):
        say(f"{name}: {size - known} tokens more than --tokenizer {flag} has are padding, dropped")
        model.trim_vocab(known)
    elif size != known:
        raise ConfigError(
            f"{name}: has {size} tokens, --tokenizer {flag} has {known}; "
            "choose a model and a tokenizer that match"
        )


def is_padded(size: int, known: int) -> bool:
    """Whether a vocabulary of `size` is that of a tokenizer of `known` tokens, and padding."""
    return known <= size <= known + known // MOST_PADDING


def check_room(config: Config, shape: ModelShape) -> None:
    """Raise ConfigError unless --max-new-tokens leaves room for a prompt."""
    if config.sampling.max_new_tokens >= shape.context:
        raise ConfigError(
            "--max-new-tokens must leave room for a prompt in the model's context of "
            f"{shape.context}, got {config.sampling.max_new_tokens}"
        )


def make_reference(config: Config, learner: Learner, tokenizer: Tokenizer) -> Reference:
    """The reference of --kl-coef: the learner's model as it is now, which is not trained yet.

    It is a frozen copy. Of a model with adapters it shares all weights, and the adapters are off.
    """
    if not config.loss.kl_coef:
        return NoReference()
    shared = config.model.lora_rank > 0
    if shared:
        model = accel.sharing_weights(learner.model)
        disable_adapters(model)
    else:
        copied = copy.deepcopy(learner.model).requires_grad_(False)
        model = accel.low_precision_copy(config.speed, copied)
    return FrozenModel(
        model,
        tokenizer,
        name="the reference of --kl-coef",
        packing=PACKINGS[config.speed.packing],
        temperature=config.sampling.temperature,
        backoff=learner.backoff,
        autocast=learner.autocast,
        offload=config.memory.offload_reference and not shared,
    )
