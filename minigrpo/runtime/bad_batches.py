"""Batches whose step was skipped: kept in the run's folder, to find out why."""

from pathlib import Path

import torch

from ..types import RolloutBatch
from .files import write_whole


def keep_bad_batch(run: Path, batch: RolloutBatch, step: int, rank: int) -> Path | None:
    """Write a process's share of the batch of a step, and return where; None if that fails.

    `torch.load(..., weights_only=True)` reads it.
    """
    path = run / "bad_batches" / f"step_{step + 1:06d}_rank_{rank}.pt"
    record = {
        "prompts": [example.prompt for example in batch.examples],
        "texts": [list(group) for group in batch.texts],
        **vars(batch.completions),
        "rewards": None if batch.rewards is None else torch.from_numpy(batch.rewards.total),
        "advantages": batch.advantages,
        "ref_logp": batch.ref_logp,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda aside: torch.save(record, aside))
    except (OSError, RuntimeError):  # a full disk must not end a run that the guard keeps going
        return None
    return path
