"""The model that a run starts from, and whether it fits the tokenizer and the task."""

from collections.abc import Callable
from importlib.resources import files

import tiktoken

from ..config import Config
from ..runtime.flags import ConfigError
from .transformer import ModelShape, Transformer

# a model may have one token in so many more than its tokenizer: vocabularies are padded to round
# numbers
MOST_PADDING = 8


def load_pretrained(name: str) -> Transformer:
    """The model that ships, or one by path. Raises ValueError with what does not fit."""
    shipped = str(files("minigrpo.assets").joinpath("warm-start.safetensors"))
    return Transformer.from_pretrained(shipped if name == "shipped" else name)


def build_model(
    config: Config, tokenizer: tiktoken.Encoding, say: Callable[[str], object] = lambda text: None
) -> Transformer:
    """The model that --init-from names. Raises ValueError if it is missing, damaged or does not
    fit.
    """
    if config.model.init_from == "scratch":
        shape = ModelShape(
            tokenizer.n_vocab,
            config.model.context,
            config.model.layers,
            config.model.width,
            config.model.heads,
        )
        model = Transformer(shape, seed=config.run.seed)
    else:
        try:
            model = load_pretrained(config.model.init_from)
        except ValueError as error:
            raise ConfigError(f"--init-from {error}") from None
    match_vocab(model, f"--init-from {config.model.init_from}", config, tokenizer, say)
    return model


def match_vocab(
    model: Transformer,
    name: str,
    config: Config,
    tokenizer: tiktoken.Encoding,
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Take padding off the model's vocabulary. Raises ConfigError if tokenizer or --max-new-tokens
    do not fit.
    """
    size, known = model.shape.vocab_size, tokenizer.n_vocab
    if known < size <= known + known // MOST_PADDING:
        say(
            f"{name}: {size - known} tokens more than --tokenizer {config.model.tokenizer} has are "
            "padding, and left out"
        )
        model.trim_vocab(known)
    elif size != known:
        raise ConfigError(
            f"{name}: has {size} tokens, --tokenizer {config.model.tokenizer} has {known}; choose a "
            "model and a tokenizer that fit"
        )
    if config.sampling.max_new_tokens >= model.shape.context:
        raise ConfigError(
            f"--max-new-tokens must leave room for a prompt in the model's context of "
            f"{model.shape.context}, "
            f"got {config.sampling.max_new_tokens}"
        )
