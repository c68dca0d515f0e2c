"""The gradient of a run's first step, in float64, for the invariance suite.

Run as a program, it is one of several processes.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigrpo import Config, Trainer
from minigrpo.runtime.distributed import DistContext

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
    "nll": {"max_new_tokens": 96, "group_size": 1},
}


def make_trainer(folder: Path, dist: DistContext | None = None, **changes: Any) -> Trainer:
    """A tiny trainer in float64 whose reference is not its policy, or the KL and its gradient would
    be 0.
    """
    torch.set_default_dtype(torch.float64)
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


def first_gradient(folder: Path, dist: DistContext | None = None, **changes: Any) -> list[Tensor]:
    """Of the whole step, before clipping."""
    trainer = make_trainer(folder, dist, grad_clip=1e9, **changes)
    gradients: list[Tensor] = []
    trainer.learner.optimizer.step = lambda *a, **k: gradients.extend(  # type: ignore[method-assign,assignment]
        p.grad.clone() for p in trainer.model.parameters()
    )
    trainer.learner.learn(trainer.source.batch(0), 0)
    trainer.scorer.close()
    return gradients[: len(list(trainer.model.parameters()))]  # of the first inner step


def main(out: Path) -> None:
    """One process of several: gradients of every loss, and what it sampled."""
    dist = DistContext.from_env()
    own = out / str(dist.rank)
    result: dict[str, Any] = {
        loss: first_gradient(own / loss, dist, loss=loss, **options)
        for loss, options in LOSSES.items()
    }
    trainer = make_trainer(own / "sampled", dist)
    batches = []
    for step in range(2):
        batch = trainer.source.batch(step)
        assert batch.rewards is not None
        batches.append((batch.texts, batch.rewards.total.tolist()))
        trainer.learner.learn(batch, step)
    result |= {"batches": batches, "weights": trainer.model.state_dict()}

    trainer = make_trainer(own / "poisoned", dist)
    before = trainer.model.wte.weight.clone()
    if dist.rank == 1:  # an infinity in one process only
        trainer.model.ln_f.weight.register_hook(lambda grad: grad * torch.inf)
    trainer.learner.learn(trainer.source.batch(0), 0)
    result["poisoned"] = (
        trainer.learner.guard.skipped,
        torch.equal(trainer.model.wte.weight, before),
    )
    torch.save(result, out / f"{dist.rank}.pt")
    dist.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
