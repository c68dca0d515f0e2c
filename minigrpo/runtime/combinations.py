"""Checks across settings: values that are valid one by one but not together."""

import re
from typing import TYPE_CHECKING

from ..model.architectures import shape_from_scratch
from .flags import ConfigError, flag, shown
from .speculation import parse_sources

if TYPE_CHECKING:
    from ..config import Config
    from ..losses import LossSpec

FIRST_PROFILED, LAST_PROFILED = 4, 6  # steps that --profile traces


def check(c: "Config", spec: "LossSpec") -> None:
    """Raise ConfigError for the first combination of settings that is not allowed.

    `spec` is the row of the config's loss.
    """
    size, prompts, heads = c.sampling.group_size, c.sampling.prompts_per_step, c.model.heads
    last_step = min(c.run.stop_after or c.run.max_steps, c.run.max_steps)
    loss, buffer, resume = c.loss.name, c.loss.overlong_buffer, c.run.resume
    may_ask_models = c.task.student or c.task.rewards or c.task.name.endswith(".py")
    scale = spec.scale if c.loss.scale == "auto" else c.loss.scale
    may_subtract = c.loss.overlong == "punish" or (c.loss.kl == "k1_reward" and c.loss.kl_coef)
    no_slots = not c.speed.kv_cache or c.memory.share_prompt_kv
    for bad, message in (
        (
            size < 2 and not c.supervised,
            f"--group-size must be at least 2 with --loss {loss}, got {size}",
        ),
        (
            c.loss.overlong == "punish" and buffer > c.sampling.max_new_tokens,
            f"--overlong-buffer must be at most --max-new-tokens, got {buffer}",
        ),
        (
            scale == "mean" and may_subtract,
            "--scale mean, the default of --loss maxrl, divides by mean rewards, which --overlong "
            "punish and --kl k1_reward can make negative; group, batch and none allow both",
        ),
        (
            c.supervised and c.loss.kl_coef,
            f"--kl-coef must be 0 with --loss {loss}, which samples nothing, got {c.loss.kl_coef}",
        ),
        (
            c.supervised and c.task.name == "teach",
            f"--task teach has no true explanations, so --loss {loss} has nothing to train on",
        ),
        (
            c.speed.cuda_graphs and no_slots,
            "--cuda-graphs needs --kv-cache, and does not work with --share-prompt-kv",
        ),
        (
            c.speed.low_precision_weights and not c.speed.use_amp,
            "--low-precision-weights needs --use-amp, whose precision they take",
        ),
        (
            c.model.base_dtype != "float32" and not (c.model.lora_rank or may_ask_models),
            f"--base-dtype {c.model.base_dtype} needs frozen weights: --lora-rank, or a model that "
            "rewards ask (--student, --rewards, a task of your own)",
        ),
        (
            c.run.profile and last_step < LAST_PROFILED,
            f"--profile traces steps {FIRST_PROFILED} to {LAST_PROFILED}, but the run ends earlier",
        ),
        (
            resume and not c.run.out_dir,
            "--resume needs --out-dir, the folder of the run to continue",
        ),
        (
            resume not in ("", "auto") and not re.fullmatch("[0-9]{1,9}", resume),
            f"--resume must be auto or a step number, got {shown(resume)}",
        ),
    ):
        if bad:
            raise ConfigError(message)
    for name in ("micro_batch_size", "rollout_batch_size"):
        batch = getattr(c.memory, name)
        check_divides(name, batch, prompts, f"--prompts-per-step {prompts}")
    check_divides("kv_heads", c.model.kv_heads, heads, f"--heads {heads}")
    try:
        shape_from_scratch(c.model, vocab_size=1)  # its sizes do not depend on the vocabulary
    except ValueError as error:
        raise ConfigError(str(error)) from None
    c.task.weights()
    parse_sources(c.speed.speculate)


def check_divides(name: str, size: int, prompts: int, of_what: str) -> None:
    """Raise ConfigError unless `size` is 0 or divides `prompts`, which `of_what` describes."""
    if size and (size > prompts or prompts % size):
        divisors = ", ".join(str(n) for n in range(1, prompts + 1) if prompts % n == 0)
        raise ConfigError(
            f"{flag(name)} must divide {of_what}: one of {divisors} (0: all), got {size}"
        )


def check_shares(config: "Config", processes: int) -> None:
    """Raise ConfigError unless prompts and micro-batches divide evenly among processes."""
    prompts = config.sampling.prompts_per_step
    if prompts % processes:
        less = max(processes, prompts // processes * processes)
        near = sorted({less, (prompts // processes + 1) * processes})
        raise ConfigError(
            f"--prompts-per-step {prompts} does not divide among {processes} processes; "
            f"{' or '.join(map(str, near))} would"
        )
    share = prompts // processes
    for name in ("micro_batch_size", "rollout_batch_size"):
        size = getattr(config.memory, name)
        check_divides(name, size, share, f"the {share} prompts of each process")
