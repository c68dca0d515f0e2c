"""A tiny step in float64, for tests that compare gradients, batches and weights."""

import hashlib
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minigrpo import Config, Trainer
from minigrpo.learner import Learner
from minigrpo.losses import LossSpec
from minigrpo.model.shape import AttentionShape, GatedDeltaShape, ModelShape, Rope, ShortConvShape
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.parallel import Parallel
from minigrpo.shards import stored_like, whole
from minigrpo.types import Completion, Completions

from .tiny import TINY, tiny_chess_model

VOCAB = 12
EOS = VOCAB - 1
SIZES = {"vocab_size": VOCAB, "context": 40, "width": 16}
GEMMA3 = {"heads": 4, "kv_heads": 2, "head_dim": 6, "mlp_width": 24, "tied": False}
GEMMA3 |= {"attention_size": 8, "residual_multiplier": 0.7, "logits_divisor": 2.0}
WINDOWED = AttentionShape(window=5, rope=Rope(50.0))


DELTA = GatedDeltaShape(key_heads=2, value_heads=4, key_dim=3, value_dim=5, taps=3)


def attending(number: int, **fields: Any) -> tuple[AttentionShape, ...]:
    """Layers that all attend alike."""
    return (AttentionShape(**fields),) * number


SHAPES = {
    "gpt2": ModelShape(**SIZES, layers=attending(2), heads=2),
    # every variant that GPT-2 does not have
    "grouped-query": ModelShape(
        **SIZES, **GEMMA3, family="gemma3_text", layers=(WINDOWED, AttentionShape(rope=Rope(100.0)))
    ),
    # layers with a state, beside a window
    "hybrid": ModelShape(
        **SIZES,
        family="qwen3_5_text",
        layers=(
            DELTA,
            AttentionShape(window=4, rope=Rope(50.0, fraction=0.5)),
            ShortConvShape(taps=4),
        ),
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=24,
    ),
}


def group(*texts: str) -> list[Completion]:
    """Completions of one prompt, of a turn each."""
    return [*map(Completion, texts)]


def make_completions(
    seed: int,
    prompts: int = 3,
    samples: int = 4,
    width: int = 7,
    length: int = 9,
    dialogue: bool = False,
) -> Completions:
    """Ragged prompts and completions, some of a group equal, one of one token, padding junk.

    In a dialogue, a third of the tokens is not sampled: the mask has holes.
    """
    rng = np.random.default_rng(seed)
    prompt_len = rng.integers(1, width + 1, prompts)
    prompt_len[0] = width
    lengths = rng.integers(1, length + 1, (prompts, samples))
    ids = rng.integers(0, EOS, (prompts, samples, length))
    lengths[0, 0], lengths[-1, -1] = length, 1
    lengths[:, 1], ids[:, 1] = lengths[:, 0], ids[:, 0]  # a completion written twice
    ids[:, 2, : length // 2] = ids[:, 0, : length // 2]  # and one with a common beginning
    mask = np.arange(length) < lengths[..., None]
    if dialogue:
        mask &= rng.random(mask.shape) < 2 / 3
    return Completions(
        torch.from_numpy(rng.integers(0, EOS, (prompts, width))),
        torch.from_numpy(prompt_len),
        torch.from_numpy(ids),
        torch.from_numpy(mask),
    )


def tiny_trainer(folder: Path, **changes: Any) -> Trainer:
    """A quiet trainer with the settings TINY, on a model that lies beside its folder."""
    model = str(tiny_chess_model(folder.parent / "model"))
    config = Config.of(**{**TINY, "model": model, **changes, "out_dir": str(folder)})
    return Trainer(config, quiet=True)


def make_trainer(
    folder: Path,
    dist: DistContext | None = None,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Trainer:
    """A trainer in float64 whose reference is not its policy, or the KL would be 0."""
    sizes = {"prompts_per_step": 6, "group_size": 4, "max_new_tokens": 12, "model": "scratch"}
    config = Config.of(**{**TINY, **sizes, **changes, "out_dir": str(folder)})
    torch.set_default_dtype(dtype)
    try:
        trainer = Trainer(config, dist=dist, quiet=True)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        weights = trainer.model.wte.weight
        changed = whole(weights).clone()
        if trainer.step == 0:
            changed[-1].mul_(8)  # end of text: some completions get one, at different lengths
        weights.copy_(stored_like(changed, weights))
        if trainer.reference:
            trainer.reference.model.wte.weight.mul_(1.1)
    return trainer


def make_learner(
    config: Config, model: Transformer, loss: LossSpec, dist: DistContext | None = None
) -> Learner:
    """A learner alone, without a run."""
    parallel = Parallel.of(model.device, dist or DistContext(), config.memory.fsdp)
    return Learner(config, model, loss, parallel, warn=print)


def bits(trainer: Trainer) -> str:
    """sha256 of what is trained, and of the optimizer's state."""
    digest, state = hashlib.sha256(), trainer.learner.state_dict()
    for tensors in (state["model"], *state["optimizer"]["state"].values()):
        for name in sorted(tensors):
            digest.update(torch.as_tensor(tensors[name]).cpu().numpy().tobytes())
    return digest.hexdigest()


def join(rank: int, port: int, processes: int = 2) -> DistContext:
    """Meet the other processes."""
    os.environ |= {"WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return DistContext.from_env()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_together(
    work: Callable[[Path, int, list[int]], None], folder: Path, processes: int = 2
) -> list[int | None]:
    """Run `work(folder, rank, ports)` in processes that may meet twice; return their exit codes."""
    # it imports torch once for both, and has no threads that a fork would lose
    server, ports = multiprocessing.get_context("forkserver"), [free_port(), free_port()]
    server.set_forkserver_preload([work.__module__])
    ranks = range(processes)
    started = [server.Process(target=work, args=(folder, rank, ports)) for rank in ranks]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        process.kill()
    return [process.exitcode for process in started]
