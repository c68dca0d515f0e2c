"""The gradient of a run's first step, in float64, for the invariance suite.

Run as a program, it is several processes: `python -m tests.gradients FOLDER all=2 few=3`.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from minigrpo import Config, Trainer
from minigrpo.learner import Learner
from minigrpo.model import logprobs
from minigrpo.model.transformer import Block
from minigrpo.runtime import accel
from minigrpo.runtime.distributed import DistContext
from minigrpo.types import RolloutBatch

TINY: dict[str, Any] = {
    "init_from": "scratch",
    "layers": 1,
    "width": 16,
    "heads": 2,
    "prompts_per_step": 4,
    "group_size": 3,
    "max_new_tokens": 6,
    "max_steps": 6,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "eval_size": 8,
    "eval_size_during": 4,
    "eval_every": 2,
    "save_every": 2,
    "reward_weights": "similarity=1",
}
# what a loss is tried with: a KL where there is one, unequal lengths (a sampled end of text is rare
# in a random model)
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.1, "temperature": 0.8},
    "dr_grpo": {"kl_coef": 0.1, "kl": "k2"},
    "dapo": {"kl_coef": 0.1, "kl": "k3_is"},
    "gspo": {"kl_coef": 0.1, "scale": "batch"},
    "cispo": {"sampler_correction": True, "top_k": 50, "temperature": 0.7},
    "rloo": {"kl_coef": 0.1, "kl": "k1_reward"},
    "maxrl": {"kl_coef": 0.1, "temperature": 0.9},
    "sapo": {"kl_coef": 0.1, "scale": "none"},
    "gmpo": {"kl_coef": 0.1, "advantage": "leave_one_out"},
    "nll": {"max_new_tokens": 96, "group_size": 1},
}
FEW = ("grpo", "gspo", "nll")  # of them, where all would take long
GROUPED = {"arch": "qwen3", "kv_heads": 1}  # a model in which query heads share keys and values
# name -> settings: each loss with a GPT-2 and with the other model
CASES: dict[str, dict[str, Any]] = {
    f"{prefix}{loss}": {"loss": loss, **options, **model}
    for prefix, model in {"": {}, "grouped ": GROUPED}.items()
    for loss, options in LOSSES.items()
}
LIKE_GRPO = ("maxrl", "sapo", "gmpo")  # up to a function of one completion: test_losses.py
QUICK = [*(loss for loss in LOSSES if loss not in LIKE_GRPO), "grouped grpo", "grouped nll"]
SLOW = [name for name in CASES if name not in QUICK]
# How two processes, of three prompts each, compute the gradient. micro_batch_size 2 leaves a
# micro-batch of one prompt for the end, as a run does that leaves out groups without variance.
WAYS: dict[str, dict[str, Any]] = {
    "micro-batches of 1": {"micro_batch_size": 1},
    "micro-batches of 2": {"micro_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing, micro-batches of 2": {"gradient_checkpointing": True, "micro_batch_size": 2},
    "chunked log-probs": {"chunked_logprobs": True},
    "chunked log-probs, micro-batches of 2": {"chunked_logprobs": True, "micro_batch_size": 2},
}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {"compile_model": True},
    "compiled, micro-batches of 2": {"compile_model": True, "micro_batch_size": 2},
    "compiled, checkpointing": {"compile_model": True, "gradient_checkpointing": True},
}
COMPILED_CASES = ("grpo", "grouped grpo")
# Each prompt by itself, so that bfloat16 rounds alike however prompts are shared out.
AUTOCAST = {"use_amp": True, "micro_batch_size": 1, "rollout_batch_size": 1}
AUTOCAST_CASES = ("grpo", "grouped cispo")
CHUNK = 5  # tokens per chunk of log-probs, so that tiny batches have several


def make_trainer(
    folder: Path,
    dist: DistContext | None = None,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Trainer:
    """A tiny trainer in float64 whose reference is not its policy, or the KL and its gradient would
    be 0.
    """
    torch.set_default_dtype(dtype)
    try:
        config = Config.of(
            **{
                **TINY,
                "prompts_per_step": 6,
                "group_size": 4,
                "max_new_tokens": 12,
                **changes,
                "out_dir": str(folder),
            }
        )
        trainer = Trainer(config, dist=dist, quiet=True)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        trainer.model.wte.weight[-1].mul_(
            8
        )  # end of text: some completions get one, at different lengths
        if hasattr(trainer.reference, "model"):
            trainer.reference.model.wte.weight.mul_(1.1)
    return trainer


def first_gradient(
    folder: Path,
    dist: DistContext | None = None,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> list[Tensor]:
    """Of the whole step, before clipping."""
    trainer = make_trainer(folder, dist, dtype, grad_clip=1e9, **changes)
    gradient = gradient_of(trainer.learner, trainer.source.batch(0))
    trainer.scorer.close()
    return gradient


def gradient_of(learner: Learner, batch: RolloutBatch) -> list[Tensor]:
    """The gradient of the first inner step; the weights stay as they are."""
    gradients: list[Tensor] = []
    learner.optimizer.step = lambda *a, **k: gradients.extend(  # type: ignore[method-assign,assignment]
        p.grad.clone() for p in learner.model.parameters()
    )
    learner.learn(batch, 0)
    return gradients[: len(list(learner.model.parameters()))]


def with_settings(trainer: Trainer, **changes: Any) -> Learner:
    """A learner for the trainer's model with some settings changed."""
    config = trainer.config.replace(**changes)
    trainer.model.logprob_chunk = accel.logprob_chunk(config.memory, trainer.model)
    return Learner(config, trainer.model, trainer.dist)


def gradients_by_way(
    folder: Path, dist: DistContext, ways: dict[str, dict[str, Any]], cases: Iterable[str]
) -> dict[str, list[Tensor]]:
    """ "CASE, WAY" -> the gradient. A case has one batch, which is sampled once."""
    found = {}
    for case in cases:
        trainer = make_trainer(folder / case, dist, grad_clip=1e9, **CASES[case])
        batch = trainer.source.batch(0)
        for way, changes in ways.items():
            found[f"{case}, {way}"] = gradient_of(with_settings(trainer, **changes), batch)
        trainer.scorer.close()
    return found


def all_reduces(trainer: Trainer, micro_batch_size: int) -> int:
    """How often DDP communicates in one update."""
    calls = []

    def counted(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        calls.append(bucket.index())
        return allreduce_hook(state, bucket)

    learner = with_settings(trainer, micro_batch_size=micro_batch_size)
    learner.wrapped.register_comm_hook(None, counted)  # type: ignore[operator]
    gradient_of(learner, trainer.source.batch(0))
    return len(calls)


def compile_with(backend: str) -> None:
    """Make torch.compile use this backend. The default one needs minutes of a C++ compiler."""
    compile_block = Block.compile
    Block.compile = lambda self, **options: compile_block(self, backend=backend, **options)  # type: ignore[method-assign]


def gradients(own: Path, dist: DistContext, cases: Iterable[str]) -> dict[str, Any]:
    """CASE -> the gradient."""
    return {case: first_gradient(own / case, dist, **CASES[case]) for case in cases}


def gradients_under_autocast(own: Path, dist: DistContext) -> dict[str, Any]:
    found = {}
    for case in AUTOCAST_CASES:
        options = CASES[case] | AUTOCAST
        found[f"{case}, autocast"] = first_gradient(own / case, dist, torch.float32, **options)
    return found


def reduced(own: Path, dist: DistContext) -> dict[str, Any]:
    """How often processes communicate with micro-batches of several sizes."""
    trainer = make_trainer(own / "reduced", dist)
    return {"all-reduces": [all_reduces(trainer, size) for size in (0, 2, 1)]}


def two_steps(own: Path, dist: DistContext) -> dict[str, Any]:
    """What two steps sample, their metrics, and the weights after them."""
    trainer = make_trainer(own / "sampled", dist)
    batches, metrics = [], []
    for step in range(2):
        batch = trainer.source.batch(step)
        assert batch.rewards is not None
        batches.append((batch.texts, batch.rewards.total.tolist()))
        metrics.append(trainer.learner.learn(batch, step))
    return {"batches": batches, "metrics": metrics, "weights": trainer.model.state_dict()}


def poisoned_step(own: Path, dist: DistContext) -> dict[str, Any]:
    """Skipped steps, and whether the weights stay, after an infinity in one process only."""
    trainer = make_trainer(own / "poisoned", dist)
    before = trainer.model.wte.weight.clone()
    if dist.rank == 1:
        trainer.model.ln_f.weight.register_hook(lambda grad: grad * torch.inf)
    trainer.learner.learn(trainer.source.batch(0), 0)
    unchanged = torch.equal(trainer.model.wte.weight, before)
    return {"poisoned": (trainer.learner.guard.skipped, unchanged)}


def one_process(out: Path, suite: str, rank: int, count: int) -> None:
    """One process of several. Writes its results to `out/SUITE/RANK.pt`.

    Suites: "few", some losses; "all", in addition the quick cases in all ways; "rest", the slow
    cases in all ways; "compiler", blocks compiled with the real compiler.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    dist = DistContext.from_env()
    own = out / suite / str(dist.rank)
    logprobs.CHUNK = CHUNK
    result: dict[str, Any] = {}
    if suite in ("all", "rest"):
        cases = QUICK if suite == "all" else SLOW
        result |= gradients(own, dist, cases) | gradients_by_way(own / "ways", dist, WAYS, cases)
    if suite == "few":
        result |= gradients(own, dist, FEW)
    if suite in ("all", "few"):
        result |= two_steps(own, dist) | poisoned_step(own, dist)
    if suite == "all":
        result |= gradients_under_autocast(own / "autocast", dist) | reduced(own, dist)
        compile_with("eager")
    if suite in ("all", "compiler"):
        result |= gradients_by_way(own / "compiled", dist, COMPILED, COMPILED_CASES)
    torch.save(result, out / suite / f"{dist.rank}.pt")
    dist.close()


def main(out: Path, *suites: str) -> None:
    """Run suites, given as NAME=PROCESSES, one after the other.

    The processes are forks of this one, because importing torch takes each of them seconds.
    """
    for suite, count in (word.split("=") for word in suites):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        fork = multiprocessing.get_context("fork")
        arguments = [(out, suite, rank, int(count)) for rank in range(int(count))]
        processes = [fork.Process(target=one_process, args=given) for given in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if codes := [process.exitcode for process in processes if process.exitcode]:
            sys.exit(f"{suite}: {codes}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
