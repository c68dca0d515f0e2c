"""The jobs of the peers benchmark, and the ways to train that it compares: two tables."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]  # flags of this library, or settings of TRL's GRPOConfig
RANK = "lora_rank"  # a flag here; among TRL's settings it becomes PEFT's LoraConfig
DEFAULT_BATCH = 8  # TRL's per_device_train_batch_size, if the user sets none


@dataclass(frozen=True)
class Way:
    """A way to train: flags of this library, and settings of TRL that do the same."""

    flags: Settings
    settings: Settings


WAYS: Mapping[str, Way] = {
    "float32": Way({}, {"bf16": False}),
    "bfloat16": Way({"use_amp": True, "low_precision_weights": True}, {"bf16": True}),
    "lora-float32": Way({RANK: 8}, {"bf16": False, RANK: 8}),
    # frozen weights are stored in two bytes
    "lora-bfloat16": Way(
        {"use_amp": True, RANK: 8, "base_dtype": "bfloat16"},
        {"bf16": True, RANK: 8, "model_init_kwargs": {"dtype": "bfloat16"}},
    ),
}


@dataclass(frozen=True)
class Job:
    """What is trained, in which ways, for how many steps, and how many rows take turns."""

    workload: Settings  # of WorkloadFlags
    ways: tuple[str, ...] = ("float32", "bfloat16")
    flags: Settings = field(default_factory=dict)  # of this library, in every way
    steps: int = 30
    probe_steps: int = 3  # for each candidate for TRL's best settings
    warm_up: int = 2  # steps that train but are not timed
    at_once: int = 8  # rows that take turns; those after them start when these have ended
    held_out: int = 64  # prompts on which the trained models are compared
    as_it_is: bool = True  # also a row with TRL's own settings


LARGE: Settings = {  # every way; a few steps on random text: there is nothing to compare after them
    "ways": tuple(WAYS),
    # no true answer is known that completions resemble, so nothing is worth proposing
    "flags": {"chunked_logprobs": True, "speculate": "none"},
    "steps": 4,
    "probe_steps": 2,
    "warm_up": 1,
    "held_out": 0,
    "as_it_is": False,
}
JOBS: Mapping[str, Job] = {
    "chess": Job({"natural": True}),
    "forced": Job({"preset": "tiny"}),
    "gpt2": Job(
        {"preset": "gpt2", "prompts_per_step": 2, "group_size": 8, "max_new_tokens": 48},
        at_once=2,
        **LARGE,
    ),
    "qwen2.5-0.5b": Job(
        {"preset": "qwen2.5-0.5b"},
        at_once=1,  # two rows would not fit into 24 GB together
        **LARGE,
    ),
}


def as_it_is(completions: int) -> Settings:
    """What a user of TRL gets who sets only the job: micro-batches of 8, with accumulation."""
    return _in_batches(completions, math.gcd(DEFAULT_BATCH, completions))


def candidates(way: Way, completions: int) -> list[Settings]:
    """Settings of TRL, of which the fastest is its row. None of them changes the job."""
    sizes = {completions, math.gcd(completions, max(1, completions // 4))}
    return [
        {**_in_batches(completions, size), "gradient_checkpointing": False, **way.settings}
        for size in sorted(sizes, reverse=True)
    ]


def least_memory(way: Way, completions: int) -> Settings:
    """What is tried if no candidate fits into memory."""
    return {**_in_batches(completions, 1), "gradient_checkpointing": True, **way.settings}


def _in_batches(completions: int, size: int) -> Settings:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": completions // size}


def in_words(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
