"""The model at --init-from where a run needs it again: under adapters, or as the reference of a KL.

A checkpoint with adapters holds nothing of their base, and no checkpoint holds the reference. Both
are loaded again from --init-from, so a checkpoint records which weights were found there.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ..config import Config, ModelConfig
from ..model.lora import (
    adapters,
    add_adapters,
    cast_frozen,
    frozen_weights,
    layer_names,
    load_trained,
    merge_adapters,
    weights_digest,
)
from ..model.shape import ModelShape
from ..model.transformer import Transformer
from .flags import ConfigError
from .rng import weights_seed
from .saved_state import shape_of
from .settings import is_run

CHANGED = "other weights than when training began"


class BaseError(ConfigError):
    """The base of a run's adapters cannot be loaded, or is not the one that they belong to."""


def add_lora(
    model: Transformer,
    config: ModelConfig,
    seed: int = 0,
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Freeze a model and add the adapters of --lora-rank, in place; without it, do nothing.

    Raises ConfigError for a target that the model does not have.
    """
    rank, names = config.lora_rank, config.lora_targets
    if not rank:
        return
    targets = [name.strip() for name in names.split(",")] if names else []
    alpha = config.lora_alpha or 2.0 * rank
    try:
        add_adapters(model, rank=rank, alpha=alpha, targets=targets, seed=seed)
    except ValueError as error:
        raise ConfigError(f"--lora-targets: {error}") from None
    if dtype := base_dtype(config):
        cast_frozen(model, dtype)
    trained, total = (
        sum(p.numel() for p in model.parameters() if p.requires_grad or everything)
        for everything in (False, True)
    )
    layers = adapters(model)
    say(
        f"--lora-rank {rank}: {len(layers)} adapters, on {', '.join(layer_names(layers))}; "
        f"{trained / 1e6:.3f} M of {total / 1e6:.2f} M parameters are trained"
    )


def loadable_base(init_from: str) -> str:
    """--init-from as PEFT can load it; "" for a run and a model from scratch, which it cannot."""
    own = init_from in ("scratch", "shipped") or is_run(Path(init_from))
    return "" if own else init_from


def base_dtype(config: ModelConfig) -> torch.dtype | None:
    """How --base-dtype stores matrices; None: as they are, in float32."""
    return None if config.base_dtype == "float32" else getattr(torch, config.base_dtype)


def base_digest(config: Config, model: Transformer) -> str:
    """A hash of the weights that a resumed run must find again at --init-from; "" if none.

    `model` must not be trained yet, unless it has adapters.
    """
    if config.model.init_from == "scratch":  # made again from the seed
        return ""
    if config.model.lora_rank:
        return weights_digest(frozen_weights(model))
    return weights_digest(model.state_dict()) if config.loss.kl_coef else ""


def model_digest(model: Transformer, tokenizer: Mapping[str, str]) -> str:
    """A hash of all that decides what a model computes of a text.

    Args:
        tokenizer: its fingerprint.
    """
    # a field that a later version adds does not count while it has its default
    shape = {k: x for k, x in asdict(model.shape).items() if x != getattr(ModelShape, k, None)}
    parts = weights_digest(model.state_dict()), sorted(shape.items()), sorted(tokenizer.items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def check_base(config: Config, now: str, then: str) -> None:
    """Raise ConfigError if two digests differ; a checkpoint that has none is not checked."""
    if then and now != then:
        why = "the adapters" if config.model.lora_rank else "the reference of --kl-coef"
        raise ConfigError(
            f"--resume: --init-from {config.model.init_from} has {CHANGED}, and {why} "
            "must be those of before"
        )


def adapted_model(
    state: dict[str, Any], load: Callable[[str, torch.dtype | None], Transformer]
) -> Transformer:
    """The model of a checkpoint that holds adapters: their base, which `load` loads, with them.

    Raises BaseError in one line; an error of another kind for a state of another version.
    """
    shape, settings = shape_of(state), state["config"]
    known = {field.name for field in fields(ModelConfig)}
    config = ModelConfig(**{name: x for name, x in settings.items() if name in known})
    name = f"the adapters belong to --init-from {config.init_from}"
    if config.init_from == "scratch":
        model = Transformer(shape, seed=weights_seed(settings["seed"]))
    else:
        try:
            base = load(config.init_from, base_dtype(config))
            model = merge_adapters(base) if adapters(base) else base
        except ValueError as error:
            raise BaseError(f"{name}, which cannot be loaded from this folder: {error}") from None
        if model.shape.vocab_size > shape.vocab_size:
            model.trim_vocab(shape.vocab_size)
    if model.shape == shape:
        add_lora(model, config)
    expected = state.get("base", "")
    if model.shape != shape or expected not in ("", weights_digest(frozen_weights(model))):
        raise BaseError(f"{name}, which has {CHANGED}")
    load_trained(model, state["model"])
    return model
