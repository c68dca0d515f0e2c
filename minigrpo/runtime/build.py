"""Build the parts of a run from its config, for the trainer, the tools and the benchmarks."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch

from ..config import Config
from ..learner import Learner
from ..model.architectures import shape_from_scratch
from ..model.lora import adapters, disable_adapters, merge_adapters
from ..model.packing import PACKINGS
from ..model.shape import ModelShape
from ..model.tokenizer import Tokenizer, load_tokenizer
from ..model.transformer import Transformer
from ..reference import FrozenReference, NoReference, Reference
from ..rewards import RewardScorer
from ..tasks.files import Listener
from ..tasks.registry import load_rewards, load_task
from ..types import Task
from . import accel
from .base_model import add_lora, base_dtype
from .flags import ConfigError
from .rng import stream, weights_seed
from .text import check_file_name
from .tokenizers import CHESS, with_own_tokenizer
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
    task, seed = config.task, config.run.seed
    return load_task(
        task.name,
        seed=seed,
        data=task.data,
        listener=listener,
        history=task.history,
        difficulty=task.difficulty,
    )


def make_scorer(config: Config, task: Task, warn: Say = lambda text: None) -> RewardScorer:
    """The scorer. Raises ValueError for a bad reward file, or a weight of an unknown part."""
    return RewardScorer(
        task,
        weights=config.task.weights(),
        functions=load_rewards(config.task.rewards, warn),
        workers=config.speed.num_reward_workers if config.speed.parallel_rewards else 0,
        timeout_s=config.task.reward_timeout,
        warn=warn,
    )


def make_model(
    config: Config,
    tokenizer: Tokenizer,
    device: torch.device | str = "cpu",
    say: Say = lambda text: None,
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
            path = Path(sizes.init_from)
            _, model = load_model(path, say, base_dtype(sizes), task=config.task.name)
            if adapters(model):
                model = merge_adapters(model)
        except ValueError as error:
            raise ConfigError(f"--init-from {error}") from None
    match_vocab(model, f"--init-from {sizes.init_from}", config, tokenizer, say)
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
    """Drop vocabulary padding, because a token that cannot be decoded must never be sampled.

    Raises ConfigError if the tokenizer or --max-new-tokens does not fit the model.
    """
    size, known, flag = model.shape.vocab_size, tokenizer.n_vocab, tokenizer.name
    if size != known and is_padded(size, known):
        say(f"{name}: {size - known} tokens more than --tokenizer {flag} has are padding, dropped")
        model.trim_vocab(known)
    elif size != known:
        raise ConfigError(
            f"{name}: has {size} tokens, --tokenizer {flag} has {known}; "
            "choose a model and a tokenizer that match"
        )
    check_room(config, model.shape)


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


def make_reference(config: Config, learner: Learner) -> Reference:
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
    return FrozenReference(
        model,
        packing=PACKINGS[config.speed.packing],
        temperature=config.sampling.temperature,
        backoff=learner.backoff,
        autocast=learner.autocast,
        offload=config.memory.offload_reference and not shared,
    )
