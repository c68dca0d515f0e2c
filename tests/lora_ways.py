"""Tiny runs with adapters, and the gradient of their first step.

Run as a program, it is two processes: `python -m tests.lora_ways BASE FOLDER`.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from minigrpo import Config, Trainer, Transformer
from minigrpo.learner import Learner
from minigrpo.model import lora
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.runtime.distributed import DistContext
from minigrpo.types import RolloutBatch

from .gradients import TINY, free_port, make_trainer, with_settings

OPTIONS: dict[str, Any] = {
    **{name: x for name, x in TINY.items() if name not in ("layers", "width", "heads")},
    "tokenizer": "chess",
    "lora_rank": 2,
    "kl_coef": 0.1,
}
GROUPED: dict[str, Any] = {
    "heads": 4,
    "family": "qwen3",
    "kv_heads": 2,
    "head_dim": 6,
    "mlp_width": 24,
    "norm": "rms",
    "projections": "separate",
    "mlp": "swiglu",
    "head_norm": True,
    "rope_theta": 100.0,
    "tied": False,
}
SHAPES: dict[str, dict[str, Any]] = {"gpt2": {"heads": 2}, "grouped-query": GROUPED}
# Each prompt by itself, so that bfloat16 rounds alike however prompts are shared out.
LOW: dict[str, Any] = {
    "base_dtype": "bfloat16",
    "low_precision_weights": True,
    "use_amp": True,
    "micro_batch_size": 1,
    "rollout_batch_size": 1,
}
WAYS: dict[str, dict[str, Any]] = {
    "repeated": {"packing": "repeated"},
    "shared prompts, micro-batches of 2": {"packing": "shared-prompt", "micro_batch_size": 2},
    "tree, micro-batches of 1": {"packing": "prefix-tree", "micro_batch_size": 1},
    "checkpointing": {"gradient_checkpointing": True},
    "chunked log-probs, checkpointing": {"chunked_logprobs": True, "gradient_checkpointing": True},
}


def make_base(path: Path, family: str = "gpt2", seed: int = 3) -> Path:
    """A file with a tiny model for the chess tokenizer."""
    vocab = load_tokenizer("chess").n_vocab
    shape = ModelShape(vocab, context=160, layers=2, width=16, **SHAPES[family])
    path.parent.mkdir(parents=True, exist_ok=True)
    Transformer(shape, seed=seed).save_pretrained(path)
    return path


def make(folder: Path, base: Path, **changes: Any) -> Trainer:
    options = {**OPTIONS, "init_from": str(base), **changes, "out_dir": str(folder)}
    return Trainer(Config.of(**options), quiet=True)


def make_varied(folder: Path, base: Path, **changes: Any) -> Trainer:
    """As `make_trainer`: by default in float64; and its adapters have an effect."""
    trainer = make_trainer(folder, **{**OPTIONS, "init_from": str(base), **changes})
    randomise(trainer.model)
    return trainer


def randomise(model: Transformer) -> None:
    """Adapters start without effect; give them one."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in lora.adapters(model).values():
            layer.lora_B.normal_(0, 0.3, generator=generator)


def gradient(learner: Learner, batch: RolloutBatch) -> list[Tensor]:
    """Of the whole step, before clipping, for every parameter that is trained."""
    learner.optimizer.zero_grad()
    learner.gradient(*learner.prepare(batch))
    return [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]


def gradients_by_way(trainer: Trainer) -> dict[str, list[Tensor]]:
    batch = trainer.source.batch(0)
    return {way: gradient(with_settings(trainer, **x), batch) for way, x in WAYS.items()}


def numbers_reduced(trainer: Trainer) -> int:
    """How many numbers DDP sends in one update."""
    sizes = []

    def counted(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        sizes.append(bucket.buffer().numel())
        return allreduce_hook(state, bucket)

    learner = with_settings(trainer)
    learner.wrapped.register_comm_hook(None, counted)  # type: ignore[operator]
    gradient(learner, trainer.source.batch(0))
    return sum(sizes)


def two_low_steps(folder: Path, base: Path, **changes: Any) -> dict[str, Any]:
    """Metrics and weights of two steps under autocast, over a base in bfloat16."""
    trainer = make_varied(folder, base, dtype=torch.float32, **LOW, **changes)
    metrics = [trainer.learner.learn(trainer.source.batch(step), step) for step in range(2)]
    return {"metrics": metrics, "weights": trainer.model.state_dict()}


def one_process(base: Path, out: Path, rank: int) -> None:
    """Gradients in float64; and two steps in bfloat16, before which rank 1 finds another base."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist = DistContext.from_env()
    trainer = make_varied(out / f"ways{rank}", base, dist=dist)
    found: dict[str, Any] = gradients_by_way(trainer)
    found["reduced"] = numbers_reduced(trainer)
    own_base = make_base(out / "other", seed=4) if rank else base
    found |= two_low_steps(out / f"low{rank}", own_base, dist=dist)
    torch.save(found, out / f"{rank}.pt")
    dist.close()


def main(base: str, out: str) -> None:
    """The processes are forks of this one, because importing torch takes each of them seconds."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=one_process, args=(Path(base), Path(out), rank)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if codes := [process.exitcode for process in processes if process.exitcode]:
        sys.exit(str(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
